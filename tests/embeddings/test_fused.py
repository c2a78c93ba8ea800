"""The fused collection against TorchRec's own (FBGEMM), and its interface."""

import copy

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection as TorchRecFused
from torchrec.types import DataType

from tpurec.embeddings import SGD, Adagrad, FusedEmbeddingBagCollection, RowWiseAdagrad
from tpurec.errors import ConfigError, DataError

OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (Adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad(lr=0.1), torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
}
TABLES = {
    "one_dim": [("a", 16, 40, ["f1"]), ("b", 16, 50, ["f2"])],
    "mixed_dims": [("a", 16, 40, ["f1"]), ("b", 8, 50, ["f2"]), ("c", 16, 30, ["f3"])],
    "shared_tables": [("a", 16, 40, ["f1", "f2"]), ("b", 8, 50, ["f3", "f1"])],
}


def make_tables(name, pooling=PoolingType.SUM, data_type=DataType.FP32):
    return [
        EmbeddingBagConfig(
            name=table, embedding_dim=dim, num_embeddings=rows, feature_names=list(names), pooling=pooling,
            data_type=data_type,
        )
        for table, dim, rows, names in TABLES[name]
    ]  # fmt: skip


def keys_of(tables):
    return list(dict.fromkeys(key for table in tables for key in table.feature_names))


def batch(keys, batch_size=16, seed=0, weighted=False, dtype=torch.int64, rows=30):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(keys) * batch_size,), generator=generator)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(list(keys), values, weights=weights, lengths=lengths)


def loss_of(output):
    values = output.values()
    target = torch.linspace(-1, 1, values.numel()).view_as(values)
    return (values - target).square().mean()


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)],
    ids=["sum", "weighted_sum", "mean"],
)
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_torchrec_after_ten_steps(optimizer, tables, pooling, weighted):
    """Cases 06, 12, 15 and 16. 1e-6: row-wise Adagrad adds up squares in another order than FBGEMM.

    FBGEMM has no weighted mean: it averages w * E over the number of ids.
    """
    ours, kind, keywords = OPTIMIZERS[optimizer]
    configs = make_tables(tables, pooling)
    theirs = TorchRecFused(configs, kind, keywords, is_weighted=weighted)
    fused = FusedEmbeddingBagCollection(configs, ours, is_weighted=weighted)
    assert list(fused.state_dict()) == list(theirs.state_dict())
    fused.load_state_dict(theirs.state_dict())
    for step in range(10):
        features = batch(keys_of(configs), seed=step, weighted=weighted)
        mine, other = fused(features), theirs(features)
        assert mine.keys() == other.keys() and mine.offset_per_key() == other.offset_per_key()
        torch.testing.assert_close(mine.values(), other.values(), rtol=0, atol=1e-6)
        loss_of(mine).backward()
        loss_of(other).backward()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torchrec_constructor_form_means_the_same(optimizer):
    ours, kind, keywords = OPTIMIZERS[optimizer]
    configs = make_tables("one_dim")
    assert FusedEmbeddingBagCollection(configs, optimizer_type=kind, optimizer_kwargs=keywords).optimizer == ours


def test_only_rows_of_the_batch_change():
    """Case 16, and no gradient is left on a table."""
    configs = make_tables("shared_tables")
    fused = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1))
    before = {name: weight.clone() for name, weight in fused.state_dict().items()}
    features = batch(keys_of(configs))
    loss_of(fused(features)).backward()
    used = {config.name: set() for config in configs}
    for config in configs:
        for key in config.feature_names:
            used[config.name] |= set(features[key].values().tolist())
    for config in configs:
        name = f"embedding_bags.{config.name}.weight"
        changed = (fused.state_dict()[name] != before[name]).any(1).nonzero().flatten().tolist()
        assert set(changed) == used[config.name]
        assert fused.embedding_bags[config.name].weight.grad is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bfloat16_tables_train_with_float32_state(optimizer):
    configs = make_tables("one_dim", data_type=DataType.BF16)
    fused = FusedEmbeddingBagCollection(configs, OPTIMIZERS[optimizer][0])
    exact = FusedEmbeddingBagCollection(make_tables("one_dim"), OPTIMIZERS[optimizer][0])
    exact.load_state_dict({name: weight.float() for name, weight in fused.state_dict().items()})
    features = batch(["f1", "f2"])
    outputs = fused(features), exact(features)
    assert outputs[0].values().dtype == torch.float32
    torch.testing.assert_close(outputs[0].values(), outputs[1].values())
    for output in outputs:
        loss_of(output).backward()
    for name, weight in exact.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight.bfloat16(), rtol=0.01, atol=1e-3)
    assert all(tensor.dtype == torch.float32 for tensor in fused.optimizer_state_dict().values())


@pytest.mark.parametrize("batch_size", [0, 1, 16])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN], ids=["sum", "mean"])
def test_empty_batches_and_empty_bags(batch_size, pooling):
    """Cases 01, 02 and 03: [0, D] and zeros, and nothing changes in the backward pass."""
    configs = make_tables("mixed_dims", pooling)
    fused = FusedEmbeddingBagCollection(configs, Adagrad(lr=0.1))
    before = copy.deepcopy(fused.state_dict())
    lengths = torch.zeros(3 * batch_size, dtype=torch.int32)
    out = fused(KeyedJaggedTensor(["f1", "f2", "f3"], torch.empty(0, dtype=torch.int64), lengths=lengths)).values()
    assert out.shape == (batch_size, 40) and not out.any()
    out.sum().backward()
    for name, weight in fused.state_dict().items():
        assert torch.equal(weight, before[name])


def test_weights_train_through_the_lookup():
    """The gradient of the weights is that of the formula, taken from the rows before the step."""
    configs = make_tables("one_dim", PoolingType.MEAN)
    fused = FusedEmbeddingBagCollection(configs, SGD(lr=0.1), is_weighted=True)
    tables = [weight.clone() for weight in fused.state_dict().values()]
    features = batch(["f1", "f2"], weighted=True)
    weights = features.weights().requires_grad_()
    loss_of(fused(features)).backward()
    expected = weights.detach().clone().requires_grad_()
    lengths, ends = features.lengths().view(2, -1), features.offset_per_key()
    columns = []
    for key in range(2):
        rows = tables[key][features.values()[ends[key] : ends[key + 1]]]
        bag = torch.repeat_interleave(lengths[key])
        part = expected[ends[key] : ends[key + 1]]
        total = torch.zeros(16).index_add(0, bag, part)
        pooled = torch.zeros(16, 16).index_add(0, bag, rows * part[:, None])
        columns.append(pooled / total.clamp(min=1e-30)[:, None])
    out = torch.cat(columns, 1)
    (out - torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean().backward()
    torch.testing.assert_close(weights.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_weights_that_are_not_expected_or_missing_are_refused():
    """Case 06."""
    configs = make_tables("one_dim")
    with pytest.raises(DataError, match="has weights, but the collection is not weighted"):
        FusedEmbeddingBagCollection(configs, SGD(lr=0.1))(batch(["f1", "f2"], weighted=True))
    with pytest.raises(DataError, match="is weighted, but the batch has no weights"):
        FusedEmbeddingBagCollection(configs, SGD(lr=0.1), is_weighted=True)(batch(["f1", "f2"]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("static", [False, True])
def test_a_weight_that_is_not_finite_is_refused_with_its_place_unless_its_id_is_skipped(bad, static):
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f1", "f2"])
    fused = FusedEmbeddingBagCollection([table], SGD(lr=0.1), is_weighted=True)
    layout = {"length_per_key": [2, 3], "offset_per_key": [0, 2, 5]} if static else {}

    def look_up(ids):
        weights = torch.tensor([1.0, 1.0, 1.0, bad, 1.0])
        lengths = torch.tensor([2, 0, 1, 2])
        return fused(KeyedJaggedTensor(["f1", "f2"], torch.tensor(ids), weights, lengths=lengths, **layout)).values()

    with pytest.raises(DataError, match=rf"feature 'f2': the weight {bad} \(value 1 of the feature; 1 in all\)"):
        look_up([0, 1, 2, 3, 4])
    assert look_up([0, 1, 2, -1, 4]).isfinite().all()


def test_learning_rate_changes_between_steps():
    configs = make_tables("one_dim")
    once, twice = (FusedEmbeddingBagCollection(configs, SGD(lr=lr)) for lr in (0.2, 0.5))
    twice.load_state_dict(once.state_dict())
    twice.set_learning_rate(0.2)
    assert twice.learning_rate == pytest.approx(0.2)
    for fused in (once, twice):
        loss_of(fused(batch(["f1", "f2"]))).backward()
    for name, weight in once.state_dict().items():
        assert torch.equal(weight, twice.state_dict()[name])
    with pytest.raises(ConfigError, match="learning rate -1"):
        once.set_learning_rate(-1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_round_trips(optimizer):
    configs = make_tables("shared_tables")
    first = FusedEmbeddingBagCollection(configs, OPTIMIZERS[optimizer][0])
    loss_of(first(batch(["f1", "f2", "f3"]))).backward()
    second = FusedEmbeddingBagCollection(configs, OPTIMIZERS[optimizer][0])
    second.load_state_dict(first.state_dict())
    second.load_optimizer_state_dict(copy.deepcopy(first.optimizer_state_dict()))
    for fused in (first, second):
        loss_of(fused(batch(["f1", "f2", "f3"], seed=1))).backward()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    shapes = {"sgd": {}, "adagrad": {"a": (40, 16), "b": (50, 8)}, "rowwise_adagrad": {"a": (40,), "b": (50,)}}
    expected = {f"embedding_bags.{name}.sum": shape for name, shape in shapes[optimizer].items()}
    assert {name: tuple(tensor.shape) for name, tensor in first.optimizer_state_dict().items()} == expected


def test_optimizer_state_with_missing_or_extra_parts_is_refused_by_name():
    """Case 23; nothing is loaded then."""
    fused = FusedEmbeddingBagCollection(make_tables("one_dim"), Adagrad(lr=0.1))
    good = copy.deepcopy(fused.optimizer_state_dict())
    with pytest.raises(DataError, match=r"missing \['embedding_bags.a.sum'\]"):
        fused.load_optimizer_state_dict({"embedding_bags.b.sum": torch.ones(50, 16)})
    with pytest.raises(DataError, match=r"extra \['embedding_bags.z.sum'\]"):
        fused.load_optimizer_state_dict({**good, "embedding_bags.z.sum": torch.ones(1)})
    with pytest.raises(DataError, match=r"'embedding_bags.b.sum': shape \[50\], \[50, 16\]"):
        fused.load_optimizer_state_dict(
            {"embedding_bags.a.sum": torch.ones(40, 16), "embedding_bags.b.sum": torch.ones(50)}
        )
    for name, tensor in fused.optimizer_state_dict().items():
        assert torch.equal(tensor, good[name])


def test_frozen_tables_stay():
    configs = make_tables("one_dim")
    fused = FusedEmbeddingBagCollection(configs, SGD(lr=0.1))
    fused.embedding_bags["a"].weight.requires_grad_(False)
    before = copy.deepcopy(fused.state_dict())
    loss_of(fused(batch(["f1", "f2"]))).backward()
    after = fused.state_dict()
    assert torch.equal(after["embedding_bags.a.weight"], before["embedding_bags.a.weight"])
    assert not torch.equal(after["embedding_bags.b.weight"], before["embedding_bags.b.weight"])


def test_copies_and_conversions_keep_weights_and_storage_together():
    """A parameter that was cut off from its storage would be saved, but not trained or looked up."""
    configs = make_tables("mixed_dims")
    features = batch(["f1", "f2", "f3"])
    fused = FusedEmbeddingBagCollection(configs, Adagrad(lr=0.1))
    before = copy.deepcopy(fused.state_dict())
    for other in (copy.deepcopy(fused), copy.deepcopy(fused).to(torch.float64), copy.deepcopy(fused).to("cpu")):
        names = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
        out = other(features).values()
        out.sum().backward()
        assert {name: parameter.data_ptr() for name, parameter in other.named_parameters()} == names
        assert not torch.equal(other.state_dict()["embedding_bags.a.weight"], before["embedding_bags.a.weight"])
    for name, weight in fused.state_dict().items():
        assert torch.equal(weight, before[name])
    assert other.embedding_bags["a"].weight.dtype == torch.float32


def test_meta_device_allocates_nothing_and_can_be_materialised():
    table = EmbeddingBagConfig(name="t", embedding_dim=128, num_embeddings=2**30, feature_names=["f"])
    assert FusedEmbeddingBagCollection([table], SGD(lr=0.1), device="meta").embedding_bags["t"].weight.is_meta
    fused = FusedEmbeddingBagCollection(make_tables("one_dim"), RowWiseAdagrad(lr=0.1), device="meta")
    fused.to_empty(device="cpu")
    fused.reset_parameters()
    loss_of(fused(batch(["f1", "f2"]))).backward()


def test_same_seed_gives_torchrecs_initial_weights():
    configs = make_tables("mixed_dims")
    torch.manual_seed(0)
    plain = EmbeddingBagCollection(tables=configs)
    for name, weight in plain.state_dict().items():
        rows = weight.shape[0]
        assert weight.abs().max() <= rows**-0.5
        assert FusedEmbeddingBagCollection(configs, SGD(lr=0.1)).state_dict()[name].abs().max() <= rows**-0.5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FusedEmbeddingBagCollection([], SGD(lr=0.1)), "no tables"),
        (lambda: FusedEmbeddingBagCollection(make_tables("one_dim") * 2, SGD(lr=0.1)), "two tables are named 'a'"),
        (lambda: FusedEmbeddingBagCollection(make_tables("one_dim")), "either optimizer or optimizer_type"),
        (lambda: FusedEmbeddingBagCollection(make_tables("one_dim"), torch.optim.SGD), "optimizer_type="),
        (
            lambda: FusedEmbeddingBagCollection(
                make_tables("one_dim"), optimizer_type=torch.optim.RMSprop, optimizer_kwargs={}
            ),
            "cannot run inside the backward pass",
        ),
        (
            lambda: FusedEmbeddingBagCollection(
                make_tables("one_dim"), optimizer_type=torch.optim.SGD, optimizer_kwargs={"momentum": 0.9}
            ),
            "'momentum' = 0.9",
        ),
        (
            lambda: FusedEmbeddingBagCollection(make_tables("one_dim", data_type=DataType.INT8), SGD(lr=0.1)),
            "data_type INT8 cannot be trained",
        ),
        (lambda: SGD(lr=-1.0), "lr = -1.0"),
        (lambda: Adagrad(lr=0.1, eps=0.0), "eps = 0 divides by zero"),
    ],
)
def test_what_cannot_be_fused_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("tables", TABLES)
def test_many_small_tables_of_a_dim_are_one_launch(tables, monkeypatch):
    """One lookup and one update per dim, however many features there are."""
    from tpurec.embeddings import lookup

    calls = []
    original = lookup.embedding_bag
    monkeypatch.setattr(lookup, "embedding_bag", lambda *arguments: calls.append("bag") or original(*arguments))
    configs = make_tables(tables)
    FusedEmbeddingBagCollection(configs, SGD(lr=0.1))(batch(keys_of(configs)))
    assert len(calls) == len({config.embedding_dim for config in configs})


def test_stacks_stay_below_the_largest_tensor_of_a_tpu():
    def build(rows):
        return FusedEmbeddingBagCollection(
            [EmbeddingBagConfig(name=f"t{i}", embedding_dim=128, num_embeddings=rows) for i in range(3)],
            SGD(lr=0.1),
            device="meta",
        )

    def storages(fused):
        return {weight.untyped_storage()._cdata for weight in fused.parameters()}

    assert len(storages(build(10_000_000))) == 1
    assert len(storages(build(15_000_000))) == 2
