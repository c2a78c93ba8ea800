"""A small DLRM, its batches, and one training step of it, eager and compiled, for the checks of this folder."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from tpurec.embeddings import RowWiseAdagrad, TorchBatch, dense_gradients, dense_parameters, fuse
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.features.packing import Ladder, PackedBatch, PackedFeature

KEYS = ("f1", "f2", "f3")
NUM_DENSE = 4
LADDER = Ladder((8, 16, 32))
Step = Callable[[TorchBatch], Tensor]


def packed_batch(
    seed: int, rows: int = 50, batch_size: int = 8, longest: int = 4, ladder: Ladder = LADDER
) -> PackedBatch:
    """A batch of random ids, fewer than `longest` per bag, at the rung that they need."""
    generator = np.random.default_rng(seed)
    bags = {}
    for name in KEYS:
        lengths = generator.integers(0, longest, batch_size).astype(np.int32)
        bags[name] = lengths, generator.integers(0, rows, lengths.sum()).astype(np.int32)
    capacity = ladder.rung(max(len(ids) for _, ids in bags.values()))
    features = {}
    for name, (lengths, ids) in bags.items():
        padded = np.full(capacity, -1, np.int32)
        padded[: len(ids)] = ids
        features[name] = PackedFeature(padded, lengths)
    dense = generator.normal(size=(batch_size, NUM_DENSE)).astype(np.float32)
    labels = (generator.random(batch_size) < 0.5).astype(np.float32)
    return PackedBatch(dense, labels, np.ones(batch_size, bool), features, batch_size)


def make_model(
    device: str,
    optimizer: EmbeddingOptimizer | None = None,
    rows: int = 50,
    dim: int = 8,
    hidden: int = 16,
    keys: Sequence[str] = KEYS,
) -> nn.Module:
    """The model, fused; table `tN` has `rows + N` rows."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{number}", embedding_dim=dim, num_embeddings=rows + number, feature_names=[name])
        for number, name in enumerate(keys)
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), NUM_DENSE, [hidden, dim], [hidden, 1])
    return fuse(model, optimizer or RowWiseAdagrad(lr=0.1)).to(device)


def _loss(model: nn.Module, batch: TorchBatch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch.dense, batch.features).squeeze(1), batch.labels)


def eager_step(model: nn.Module) -> Step:
    """A step whose operations run as they are called."""
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)

    def step(batch: TorchBatch) -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled_step(model: nn.Module) -> Step:
    """The same step as one graph, with the gradient inside."""
    parameters = dict(model.named_parameters())

    def step(batch: TorchBatch) -> Tensor:
        loss = _loss(model, batch)
        gradients = dense_gradients(loss, model)
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].sub_(0.1 * gradient)
        return loss.detach()

    compiled = torch.compile(step, backend="tpu", fullgraph=True, dynamic=False)

    def run(batch: TorchBatch) -> Tensor:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(batch)

    return run
