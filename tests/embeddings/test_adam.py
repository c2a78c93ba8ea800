"""Adam and its relatives in fused collections: against torch, their state, and what comes with every optimizer."""

import copy

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagCollection

from tests.embeddings.test_fused import batch, keys_of, loss_of, make_tables
from tpurec.embeddings import (
    SGD,
    Adagrad,
    Adam,
    FusedEmbeddingBagCollection,
    RowWiseAdagrad,
    RowWiseAdam,
    fuse,
    fused_optimizer_state_dict,
    load_fused_optimizer_state_dict,
    set_learning_rate,
)
from tpurec.errors import ConfigError, DataError


@pytest.mark.parametrize("tables", ["mixed_dims", "shared_tables"])
def test_lazy_adam_is_torchs_sparse_adam(tables):
    """SparseAdam counts steps per parameter and touches no other rows, too; its eps is added before the correction."""
    configs = make_tables(tables)
    theirs = EmbeddingBagCollection(configs)
    for bag in theirs.embedding_bags.values():
        bag.sparse = True
    fused = fuse(copy.deepcopy(theirs), Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-14))
    optimizer = torch.optim.SparseAdam(list(theirs.parameters()), lr=0.01, betas=(0.8, 0.95), eps=1e-14)
    for step in range(8):
        features = batch(keys_of(configs), seed=step)
        if step == 5:
            set_learning_rate(fused, 0.002)
            optimizer.param_groups[0]["lr"] = 0.002
        optimizer.zero_grad()
        loss_of(theirs(features)).backward()
        optimizer.step()
        loss_of(fused(features)).backward()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight, rtol=0, atol=2e-6)
    state = fused.optimizer_state_dict()
    for config in configs:
        kept = optimizer.state[theirs.embedding_bags[config.name].weight]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[f"embedding_bags.{config.name}.{name}"], kept[name], rtol=1e-4, atol=1e-8)
        assert state[f"embedding_bags.{config.name}.step"].item() == 8


@pytest.mark.parametrize(
    ("kind", "keywords", "expected"),
    [
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9)}, Adam(0.1, (0.8, 0.9), decoupled_weight_decay=True)),
        (torchrec.optim.Adam, {"beta1": 0.5}, Adam(0.01, (0.5, 0.999), decoupled_weight_decay=True)),
        (
            torchrec.optim.PartialRowWiseAdam,
            {"learning_rate": 0.1, "weight_decay": 0.2, "eps": 1e-6, "beta2": 0.9},
            RowWiseAdam(0.1, (0.9, 0.9), 1e-6, 0.2, decoupled_weight_decay=True),
        ),
        (torch.optim.Adam, {"decoupled_weight_decay": False, "weight_decay": 0.1}, Adam(0.01, weight_decay=0.1)),
        (torchrec.optim.SGD, {"lr": 0.3, "max_gradient_norm": 2.0}, SGD(0.3, max_gradient_norm=2.0)),
    ],
)
def test_torchrecs_form_means_what_fbgemm_does(kind, keywords, expected):
    fused = FusedEmbeddingBagCollection(make_tables("one_dim"), optimizer_type=kind, optimizer_kwargs=keywords)
    assert fused.optimizer == expected


@pytest.mark.parametrize("optimizer", [Adam(lr=0.01), RowWiseAdam(lr=0.01), SGD(lr=0.01, rounding_seed=3)])
def test_loaded_state_goes_on_to_the_bit_and_the_step_count_matters(optimizer):
    configs = make_tables("mixed_dims")
    torch.manual_seed(0)
    run = FusedEmbeddingBagCollection(configs, optimizer)
    for step in range(3):
        loss_of(run(batch(keys_of(configs), seed=step))).backward()
    weights = copy.deepcopy(run.state_dict())
    state = {name: tensor.clone() for name, tensor in fused_optimizer_state_dict(run).items()}
    shapes = {"exp_avg": [(40, 16), (50, 8), (30, 16)], "exp_avg_sq": [(40,), (50,), (30,)], "step": [(), (), ()]}
    if isinstance(optimizer, RowWiseAdam):
        for name, expected in shapes.items():
            assert [state[f"embedding_bags.{table}.{name}"].shape for table in "abc"] == expected
    assert all(tensor.item() == 3 for name, tensor in state.items() if name.endswith(".step"))
    resumed, wrong = (FusedEmbeddingBagCollection(configs, optimizer) for _ in range(2))
    for other, kept in ((resumed, state), (wrong, {n: s if s.dim() else s * 0 for n, s in state.items()})):
        other.load_state_dict(weights)
        load_fused_optimizer_state_dict(other, kept)
    for collection in (run, resumed, wrong):
        loss_of(collection(batch(keys_of(configs), seed=9))).backward()
    for name, weight in run.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight)
    if isinstance(optimizer, Adam):
        assert any(not torch.equal(wrong.state_dict()[name], weight) for name, weight in run.state_dict().items())


def test_tables_of_one_stack_have_to_agree_in_the_step_count():
    fused = FusedEmbeddingBagCollection(make_tables("one_dim"), Adam(lr=0.1))
    state = {name: tensor.clone() for name, tensor in fused.optimizer_state_dict().items()}
    state["embedding_bags.b.step"].fill_(4)
    with pytest.raises(DataError, match=r"agree in `step`; they have \{'a': 0, 'b': 4\}"):
        fused.load_optimizer_state_dict(state)
    assert fused.optimizer_state_dict()["embedding_bags.b.step"].item() == 0


def test_copies_and_conversions_keep_all_state():
    configs = make_tables("shared_tables")
    fused = FusedEmbeddingBagCollection(configs, RowWiseAdam(lr=0.1))
    loss_of(fused(batch(keys_of(configs)))).backward()
    twin = copy.deepcopy(fused)
    loss_of(twin(batch(keys_of(configs), seed=1))).backward()
    assert fused.optimizer_state_dict()["embedding_bags.a.step"].item() == 1
    assert twin.optimizer_state_dict()["embedding_bags.a.step"].item() == 2
    low, double = copy.deepcopy(fused).to(torch.bfloat16), copy.deepcopy(fused).double()
    for other, dtype in ((low, torch.float32), (double, torch.float64)):
        for name, tensor in fused.optimizer_state_dict().items():
            moved = other.optimizer_state_dict()[name]
            assert moved.dtype == (dtype if tensor.dim() else torch.int32) and torch.equal(
                moved.to(tensor.dtype), tensor
            )
        loss_of(other(batch(keys_of(configs), seed=1))).backward()
    fused.reset_state()
    assert not any(tensor.any() for tensor in fused.optimizer_state_dict().values())


@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam])
def test_clipping_bounds_the_step_of_a_row_and_leaves_short_gradients_alone(optimizer):
    configs = make_tables("one_dim")
    plain = FusedEmbeddingBagCollection(configs, optimizer(lr=0.1))
    loose, tight = (FusedEmbeddingBagCollection(configs, optimizer(lr=0.1, max_gradient_norm=n)) for n in (1e6, 1e-3))
    for other in (loose, tight):
        other.load_state_dict(plain.state_dict())
    before = plain.state_dict()["embedding_bags.a.weight"].clone()
    for collection in (plain, loose, tight):
        (1000 * loss_of(collection(batch(["f1", "f2"])))).backward()
    after = [collection.state_dict()["embedding_bags.a.weight"] for collection in (plain, loose, tight)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-6, atol=1e-6)
    if optimizer is SGD:  # the others divide the size of a first gradient out
        norms = (after[2] - before).norm(dim=1)
        assert norms.max() <= 0.1 * 1e-3 * 1.01 and (after[0] - before).norm(dim=1).max() > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(lr=0.1, betas=(0.9, 1.0)), "betas = "),
        (lambda: RowWiseAdam(lr=0.1, eps=0), "RowWiseAdam: eps = 0"),
        (lambda: SGD(lr=0.1, max_gradient_norm=0), "max_gradient_norm = 0"),
        (lambda: Adagrad(lr=0.1, rounding_seed=-1), "rounding_seed = -1"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
