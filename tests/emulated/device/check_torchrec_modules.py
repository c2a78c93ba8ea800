"""TorchRec's own collections and models with parameters and batches on the device: outputs and gradients as on the CPU.

Each reads `length_per_key` of its batch, one number a key, and nothing else; tables have kilobytes. `DLRM_Transformer`
is not among them: torch_tpu's attention is a Pallas kernel, which the CPU cannot run.
"""

import copy

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.deepfm import DeepFM
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.emulated.device.both_devices import Behaviour, check

KEYS, BATCH_SIZE, ROWS = ["a", "b", "c"], 37, 50
PER_KEY = (24,)  # bytes of one int64 a key


def batch(kind="mixed", weighted=False, dtype=torch.int64):
    # As many ids of every key: one program looks up all.
    counts = torch.cat([(torch.arange(BATCH_SIZE) * 7 % 4).roll(shift) for shift in (0, 5, 11)])
    if kind == "a key is empty":
        counts[BATCH_SIZE : 2 * BATCH_SIZE] = 0
    if kind == "all empty":
        counts = counts * 0
    values = (torch.arange(int(counts.sum())) * 11 % ROWS).to(dtype)
    weights = torch.linspace(-1, 1, len(values)).requires_grad_() if weighted else None
    return KeyedJaggedTensor(KEYS, values, weights=weights, lengths=counts.to(dtype))


def with_own_sizes():
    """Key `a` has 12 bags, `b` 6, `c` 20; each of 40 examples has one of them."""
    counts = torch.arange(38) * 7 % 4
    return KeyedJaggedTensor(
        KEYS,
        torch.arange(int(counts.sum())) * 11 % ROWS,
        lengths=counts,
        stride_per_key_per_rank=[[12], [6], [20]],
        inverse_indices=(KEYS, torch.arange(120).view(3, 40) % 6),
    )


def tables(config, dims=(8, 8), shared=True, **keywords):
    """Table `u` is read by key `c`, and if `shared` also by `a`."""
    names = [["a", "b"], ["c", "a"]] if shared else [["a", "b"], ["c"]]
    return [
        config(name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=features, **keywords)
        for name, dim, features in zip("tu", dims, names, strict=True)
    ]


def bags(pooling=PoolingType.SUM, dims=(8, 4), weighted=False, shared=True):
    return EmbeddingBagCollection(tables(EmbeddingBagConfig, dims, shared, pooling=pooling), weighted)


def seeded(make):
    """The same parameters whenever it is made."""

    def made():
        torch.manual_seed(0)
        return make()

    return made


def of_model(build):
    """A model on its collection, with a batch and dense features."""

    def made():
        torch.manual_seed(0)
        dense = torch.rand(BATCH_SIZE, 5)
        return [build(bags(dims=(8, 8), shared=False)), dense, batch()]

    return made


class PairOfTowers(torch.nn.Module):
    """Two-tower retrieval as TorchRec's example has it: the product of a query's and a candidate's projected vector."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection
        self.query, self.candidate = torch.nn.Linear(16, 8), torch.nn.Linear(8, 8)

    def forward(self, features):
        pooled = self.collection(features)
        query = self.query(torch.cat([pooled["a"], pooled["b"]], 1))
        return (query * self.candidate(pooled["c"])).sum(1).sigmoid()


class OfKeyed(torch.nn.Module):
    """What an embedding tower puts on its collection."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 3)

    def forward(self, pooled):
        return self.layer(pooled.values())


def forward(module, *inputs):
    return module(*inputs)


def padded(module, features):
    """A sequence model's first steps: unpooled vectors, padded."""
    return [one.to_padded_dense(3) for one in module(features).values()]


def collections():
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        yield f"pooled, {pooling.value}", seeded(lambda pooling=pooling: [bags(pooling), batch()])
    yield "pooled, weighted", seeded(lambda: [bags(weighted=True), batch(weighted=True)])
    yield "pooled, int32", seeded(lambda: [bags(), batch(dtype=torch.int32)])
    for kind in ("a key is empty", "all empty"):
        yield f"pooled, {kind}", seeded(lambda kind=kind: [bags(), batch(kind)])
        yield f"unpooled, {kind}", seeded(lambda kind=kind: [EmbeddingCollection(tables(EmbeddingConfig)), batch(kind)])
    yield (
        "unpooled with ids",
        seeded(lambda: [EmbeddingCollection(tables(EmbeddingConfig), need_indices=True), batch()]),
    )


COLLECTIONS = {name: Behaviour(forward, made, PER_KEY, backward=True) for name, made in collections()} | {
    "pooled, a size per key": Behaviour(
        forward, seeded(lambda: [bags(), with_own_sizes()]), PER_KEY, writes=(32, 12), backward=True
    ),
    "unpooled and padded": Behaviour(
        padded, seeded(lambda: [EmbeddingCollection(tables(EmbeddingConfig)), batch()]), PER_KEY, backward=True
    ),
    "weights by position": Behaviour(
        forward,
        seeded(
            lambda: [
                FeatureProcessedEmbeddingBagCollection(
                    bags(weighted=True, shared=False), PositionWeightedModuleCollection(dict.fromkeys(KEYS, 4))
                ),
                batch(),
            ]
        ),
        PER_KEY,
        backward=True,
    ),
    "tower": Behaviour(
        lambda module, features: module(features),
        seeded(lambda: [EmbeddingTower(bags(dims=(8, 4), shared=False), OfKeyed()), batch()]),
        PER_KEY,
        backward=True,
    ),
}
MODELS = {
    "DLRM": of_model(lambda collection: DLRM(collection, 5, [16, 8], [8, 1])),
    "DLRM_DCN": of_model(lambda collection: DLRM_DCN(collection, 5, [16, 8], [8, 1], 2, 4)),
    "DLRM_Projection": of_model(lambda collection: DLRM_Projection(collection, 5, [16, 8], [8, 1], [16], [24])),
    "SimpleDeepFMNN": of_model(lambda collection: SimpleDeepFMNN(5, collection, 16, 4)),
    "two towers": seeded(lambda: [PairOfTowers(bags(dims=(8, 8), shared=False)), batch()]),
    "DeepFM": seeded(
        lambda: [DeepFM(torch.nn.Linear(20, 3)), [torch.rand(BATCH_SIZE, 3, 4), torch.rand(BATCH_SIZE, 8)]]
    ),
}


@pytest.mark.parametrize("name", COLLECTIONS)
def test_collection_as_on_the_cpu(name):
    check(COLLECTIONS[name])


@pytest.mark.parametrize("name", MODELS)
def test_model_as_on_the_cpu(name):
    check(Behaviour(forward, MODELS[name], () if name == "DeepFM" else PER_KEY, backward=True))


def test_a_step_of_training_changes_the_parameters_as_on_the_cpu():
    """`DLRMTrain` takes its batch whole and gives loss, logits and labels."""
    made = MODELS["DLRM"]()
    trained = []
    for device in ("cpu", "tpu"):
        module, dense, features = (item.to(device) for item in [*copy.deepcopy(made[:2]), batch()])
        labels = (torch.arange(BATCH_SIZE, device=device) % 2).float()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        batch_of = type("Batch", (), {"dense_features": dense, "sparse_features": features, "labels": labels})
        loss, _ = DLRMTrain(module)(batch_of)
        loss.backward()
        optimizer.step()
        trained.append([loss.detach(), *(one.detach() for one in module.parameters())])
    for mine, other in zip(*reversed(trained), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(trained[0][1], next(made[0].parameters()))
