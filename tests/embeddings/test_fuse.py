"""`fuse` on TorchRec's models, and the helpers that tell tables from dense parameters."""

import copy

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from tests.embeddings.test_fused import batch, keys_of, make_tables
from tpurec.embeddings import (
    SGD,
    Adagrad,
    FusedEmbeddingBagCollection,
    RowWiseAdagrad,
    dense_parameters,
    fuse,
    fused_collections,
    fused_optimizer_state_dict,
    load_fused_optimizer_state_dict,
    named_dense_parameters,
    set_learning_rate,
)
from tpurec.errors import ConfigError, DataError

BATCH_SIZE = 16


class TwoTower(nn.Module):
    """A collection per tower, as in TorchRec's two-tower example; both may be the same one."""

    def __init__(self, query, candidate):
        super().__init__()
        self.query, self.candidate = query, candidate
        self.query_layer, self.candidate_layer = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, dense, features):
        query = self.query_layer(self.query(features).values())
        return (query * self.candidate_layer(self.candidate(features).values())).sum(1) + dense.sum(1)


def collection(pooling=PoolingType.SUM):
    return EmbeddingBagCollection(tables=make_tables("one_dim", pooling))


MODELS = {
    "DLRM": lambda: DLRM(collection(), 4, [32, 16], [8, 1]),
    "DLRM_DCN": lambda: DLRM_DCN(collection(), 4, [32, 16], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
    "DeepFM": lambda: SimpleDeepFMNN(4, collection(), 8, 4),
    "two_tower": lambda: TwoTower(collection(), collection()),
    "mean": lambda: TwoTower(collection(PoolingType.MEAN), collection(PoolingType.MEAN)),
}


@pytest.mark.parametrize("model", MODELS)
def test_outputs_and_state_dict_stay_the_same(model):
    """To the bit, before training; then one step changes both tables and dense parameters."""
    torch.manual_seed(0)
    plain = MODELS[model]()
    fused = fuse(copy.deepcopy(plain), RowWiseAdagrad(lr=0.1))
    assert not any(isinstance(module, EmbeddingBagCollection) for module in fused.modules())
    assert list(fused.state_dict()) == list(plain.state_dict())
    dense, features = torch.rand(BATCH_SIZE, 4), batch(["f1", "f2"], BATCH_SIZE)
    assert torch.equal(fused(dense, features), plain(dense, features))
    fused(dense, features).sum().backward()
    moved = [name for name, value in fused.state_dict().items() if not torch.equal(value, plain.state_dict()[name])]
    assert moved and all("embedding_bags" in name for name in moved)
    assert all(parameter.grad is not None for parameter in dense_parameters(fused))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_unfused_model_with_torchs_optimizer(model, optimizer):
    """Five steps. 1e-5: float32 sums in another order, through a small network."""
    torch.manual_seed(0)
    plain = MODELS[model]()
    ours = {"sgd": SGD(lr=0.05), "adagrad": Adagrad(lr=0.05, eps=1e-4)}[optimizer]
    fused = fuse(copy.deepcopy(plain), ours)
    theirs = {
        "sgd": torch.optim.SGD(plain.parameters(), lr=0.05),
        "adagrad": torch.optim.Adagrad(plain.parameters(), lr=0.05, eps=1e-4),
    }[optimizer]
    dense_optimizer = type(theirs)(
        dense_parameters(fused), **{k: v for k, v in theirs.defaults.items() if k in ("lr", "eps")}
    )
    for step in range(5):
        dense, features = torch.rand(BATCH_SIZE, 4), batch(["f1", "f2"], BATCH_SIZE, seed=step)
        for module, stepper in ((plain, theirs), (fused, dense_optimizer)):
            stepper.zero_grad()
            module(dense, features).square().mean().backward()
            stepper.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_a_collection_used_twice_stays_shared():
    shared = collection()
    model = fuse(TwoTower(shared, shared), SGD(lr=0.1))
    assert model.query is model.candidate
    assert len(list(fused_collections(model))) == 1


def test_a_collection_alone_gives_a_fused_one_and_frozen_stays_frozen():
    plain = collection().eval()
    plain.embedding_bags["a"].weight.requires_grad_(False)
    fused = fuse(plain, SGD(lr=0.1))
    assert isinstance(fused, FusedEmbeddingBagCollection) and not fused.training
    assert not fused.embedding_bags["a"].weight.requires_grad
    assert fused.embedding_bags["b"].weight.requires_grad


def test_a_model_without_collections_is_refused():
    with pytest.raises(ConfigError, match="Linear contains no EmbeddingBagCollection"):
        fuse(nn.Linear(1, 1), SGD(lr=0.1))


def test_dense_parameters_are_all_but_the_tables():
    model = fuse(MODELS["two_tower"](), SGD(lr=0.1))
    names = [name for name, _ in named_dense_parameters(model)]
    assert names == ["query_layer.weight", "query_layer.bias", "candidate_layer.weight", "candidate_layer.bias"]
    set_learning_rate(model, 0.25)
    assert [fused.learning_rate for _, fused in fused_collections(model)] == [0.25, 0.25]


def test_optimizer_state_of_a_model_is_named_by_path():
    """Case 23."""
    model = fuse(MODELS["two_tower"](), RowWiseAdagrad(lr=0.1))
    model(torch.rand(BATCH_SIZE, 4), batch(keys_of(make_tables("one_dim")), BATCH_SIZE)).sum().backward()
    state = copy.deepcopy(fused_optimizer_state_dict(model))
    assert list(state) == [
        f"{tower}.embedding_bags.{table}.sum" for tower in ("query", "candidate") for table in ("a", "b")
    ]
    other = fuse(MODELS["two_tower"](), RowWiseAdagrad(lr=0.1))
    load_fused_optimizer_state_dict(other, state)
    for name, tensor in fused_optimizer_state_dict(other).items():
        assert torch.equal(tensor, state[name])
    state.pop("query.embedding_bags.b.sum")
    with pytest.raises(DataError, match=r"missing .*query\.embedding_bags\.b\.sum"):
        load_fused_optimizer_state_dict(other, state)
