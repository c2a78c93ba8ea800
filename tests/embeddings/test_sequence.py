"""The fused unpooled collection against TorchRec's `EmbeddingCollection`, and its interface."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)

from tpurec.embeddings import (
    SGD,
    Adam,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    RowWiseAdagrad,
    RowWiseAdam,
    dense_gradients,
    dense_parameters,
    fuse,
    fused_collections,
    fused_optimizer_state_dict,
    load_fused_optimizer_state_dict,
    set_learning_rate,
    to_torch,
)
from tpurec.errors import ConfigError, DataError
from tpurec.features.packing import PackedBatch, PackedFeature

TABLES = {"one": [("a", 40, ["f1"])], "shared": [("a", 40, ["f1", "f2"]), ("b", 50, ["f3", "f1"])]}
OPTIMIZERS = {
    "sgd": (SGD(lr=0.5), lambda weights: torch.optim.SGD(weights, lr=0.5)),
    "adam": (Adam(lr=0.1, eps=1e-12), lambda weights: torch.optim.Adam(weights, lr=0.1, eps=1e-12)),
}


def make_tables(name="shared", dim=8):
    return [
        EmbeddingConfig(name=table, embedding_dim=dim, num_embeddings=rows, feature_names=list(names))
        for table, rows, names in TABLES[name]
    ]


def batch(keys=("f1", "f2", "f3"), batch_size=9, seed=0, dtype=torch.int64, every_row=0):
    """Bags of 0 to 5 ids; `every_row`: the first bag of every feature has all of so many rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(keys), batch_size), generator=generator)
    lengths[:, 0] = every_row or lengths[:, 0]
    values = []
    for per_key in lengths:
        ids = torch.randint(0, 40, (int(per_key.sum()),), generator=generator)
        ids[:every_row] = torch.arange(every_row)
        values.append(ids)
    return KeyedJaggedTensor(list(keys), torch.cat(values).to(dtype), lengths=lengths.flatten())


def loss_of(output):
    total = torch.zeros(())
    for number, name in enumerate(output):
        values = output[name].values()
        total = total + ((number + 1) * values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().mean()
    return total


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_torchrec_after_five_steps(optimizer, tables):
    """Every batch touches every row, as torch's Adam is not lazy; ids repeat within a bag and over features."""
    ours, theirs_of = OPTIMIZERS[optimizer]
    configs = make_tables(tables)
    for config in configs:
        config.num_embeddings = 40
    plain = EmbeddingCollection(configs)
    fused = fuse(copy.deepcopy(plain), ours)
    assert isinstance(fused, FusedEmbeddingCollection) and list(fused.state_dict()) == list(plain.state_dict())
    optimizer = theirs_of(list(plain.parameters()))
    for step in range(5):
        features = batch(seed=step, every_row=40, dtype=(torch.int64, torch.int32)[step % 2])
        mine, other = fused(features), plain(features)
        assert list(mine) == list(other)
        for name in other:
            torch.testing.assert_close(mine[name].values(), other[name].values(), rtol=0, atol=1e-5)
            assert torch.equal(mine[name].lengths(), other[name].lengths())
        loss_of(mine).backward()
        optimizer.zero_grad()
        loss_of(other).backward()
        optimizer.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight, rtol=0, atol=1e-5)


def test_outputs_are_torchrecs_to_the_bit_and_so_is_the_interface():
    plain = EmbeddingCollection(make_tables(), need_indices=True)
    fused = fuse(copy.deepcopy(plain), SGD(lr=0.1))
    features = batch()
    mine, other = fused(features), plain(features)
    for name in other:
        assert isinstance(mine[name], JaggedTensor)
        assert torch.equal(mine[name].values(), other[name].values())
        assert torch.equal(mine[name].weights(), other[name].weights())
        assert torch.equal(mine[name].to_padded_dense(3), other[name].to_padded_dense(3))
    assert fused.embedding_names_by_table() == plain.embedding_names_by_table()
    assert fused.embedding_dim() == plain.embedding_dim() and fused.need_indices()
    assert [one.name for one in fused.embedding_configs()] == [one.name for one in plain.embedding_configs()]


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), RowWiseAdam(lr=0.1)])
def test_only_rows_of_the_batch_change_and_skipped_ids_give_zeros(optimizer):
    fused = FusedEmbeddingCollection(make_tables("one"), optimizer)
    before = fused.state_dict()["embeddings.a.weight"].clone()
    ids = torch.tensor([3, -1, 3, 7])
    output = fused(KeyedJaggedTensor(["f1"], ids, lengths=torch.tensor([2, 0, 2])))["f1"]
    assert torch.equal(output.values().detach()[1], torch.zeros(8))
    loss_of({"f1": output}).backward()
    changed = (fused.state_dict()["embeddings.a.weight"] != before).any(1).nonzero().flatten().tolist()
    assert changed == [3, 7] and fused.embeddings["a"].weight.grad is None


@pytest.mark.parametrize("static", [False, True])
def test_batches_with_unused_capacity_and_without_examples(static):
    """A packed batch: on the CPU padding never reaches the output, whether it was cut or not."""
    fused = FusedEmbeddingCollection(make_tables("one"), SGD(lr=0.1))
    feature = PackedFeature(np.array([5, 6, 7, -1, -1], np.int32), np.array([1, 2], np.int32), None)
    labels = np.zeros(2, np.float32)
    packed = PackedBatch(np.zeros((2, 0), np.float32), labels, np.ones(2, bool), {"f1": feature}, 2)
    output = fused(to_torch(packed, static=static).features)["f1"]
    assert torch.equal(output.values(), fused.embeddings["a"].weight[[5, 6, 7]])
    assert output.lengths().tolist() == [1, 2]
    for sizes in ({"lengths": torch.zeros(0, dtype=int)}, {"offsets": torch.zeros(1, dtype=int)}):
        nothing = fused(KeyedJaggedTensor(["f0", "f1"], torch.zeros(0, dtype=torch.int64), **sizes, stride=0))
        assert nothing["f1"].values().shape == (0, 8) and not len(nothing["f1"].lengths())


class _Model(nn.Module):
    """Both kinds of collection and a dense part, as sequence models have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        bag = EmbeddingBagConfig(name="u", embedding_dim=8, num_embeddings=40, feature_names=["f2"])
        self.user = EmbeddingBagCollection([bag])
        self.history = EmbeddingCollection(make_tables("one"))
        self.dense = nn.Linear(16, 1)

    def forward(self, features):
        summed = self.history(features)["f1"].to_padded_dense(4).tanh().sum(1)
        return self.dense(torch.cat([summed, self.user(features).values()], 1)).squeeze(1)


def test_a_model_with_both_kinds_trains_with_all_of_the_interface():
    model = fuse(_Model(), Adam(lr=0.1))
    assert [path for path, _ in fused_collections(model)] == ["user", "history"]
    assert len(list(dense_parameters(model))) == 2
    set_learning_rate(model, 0.05)
    assert model.history.learning_rate == model.user.learning_rate == pytest.approx(0.05)
    before = copy.deepcopy(model.state_dict())
    gradients = dense_gradients(model(batch()).square().sum(), model)
    assert set(gradients) == {"dense.weight", "dense.bias"}
    for name in ("user.embedding_bags.u.weight", "history.embeddings.a.weight"):
        assert not torch.equal(model.state_dict()[name], before[name])
    state = {name: tensor.clone() for name, tensor in fused_optimizer_state_dict(model).items()}
    assert {f"history.embeddings.a.{name}" for name in ("exp_avg", "exp_avg_sq", "step")} <= state.keys()
    twin = fuse(_Model(), Adam(lr=0.05))
    twin.load_state_dict(model.state_dict())
    load_fused_optimizer_state_dict(twin, state)
    copied = copy.deepcopy(model)
    for other in (model, twin, copied):
        other(batch(seed=1)).square().sum().backward()
    for name, weight in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], weight) and torch.equal(copied.state_dict()[name], weight)
    assert model.double().history.embeddings["a"].weight.dtype == torch.float64
    assert model.history(batch())["f1"].values().dtype == torch.float64


def test_frozen_tables_stay():
    fused = FusedEmbeddingCollection(make_tables(), SGD(lr=1.0))
    fused.embeddings["a"].weight.requires_grad_(False)
    before = copy.deepcopy(fused.state_dict())
    loss_of(fused(batch())).backward()
    after = fused.state_dict()
    assert torch.equal(after["embeddings.a.weight"], before["embeddings.a.weight"])
    assert not torch.equal(after["embeddings.b.weight"], before["embeddings.b.weight"])


def test_what_does_not_fit_is_named():
    fused = FusedEmbeddingCollection(make_tables("one"), SGD(lr=1.0))
    with pytest.raises(DataError, match=r"feature 'f1': id 40 .* is not a row of table 'a'"):
        fused(KeyedJaggedTensor(["f1"], torch.tensor([40]), lengths=torch.tensor([1])))
    with pytest.raises(DataError, match="'f1' is not in the batch"):
        fused(batch(keys=("f2",)))
    tables = make_tables()
    tables[1].embedding_dim = 16
    with pytest.raises(ConfigError, match="'b' has embedding_dim 16, 'a' has 8"):
        FusedEmbeddingCollection(tables, SGD(lr=1.0))
    with pytest.raises(ConfigError, match="no tables"):
        FusedEmbeddingCollection([], SGD(lr=1.0))
    with pytest.raises(DataError, match=r"missing \['embeddings.a.sum'\]; extra \['embedding_bags.a.sum'\]"):
        FusedEmbeddingCollection(make_tables("one"), RowWiseAdagrad(lr=1.0)).load_optimizer_state_dict(
            {"embedding_bags.a.sum": torch.zeros(40)}
        )
    pooled = FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=40, feature_names=["f1"])], SGD(lr=1.0)
    )
    with pytest.raises(DataError, match=r"embeddings\.a"):
        load_fused_optimizer_state_dict(pooled, {"embeddings.a.sum": torch.zeros(40)})
