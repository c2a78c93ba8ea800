"""Batches and tables with one offence each, for the device checks on the CPU and on the emulated TPU."""

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tpurec.embeddings import FusedEmbeddingBagCollection, RowWiseAdagrad

# Offence to what the error says.
OFFENCES = {
    "id": r"feature 'f2', table 'b': id 60 \(value 4 of the feature\) is not one of 60 rows",
    "length": "feature 'f1', table 'a': length -2 of example 1 is negative",
    "capacity": "feature 'f3', table 'b': lengths of examples 0 to 2 sum to 9; there is room for 8 values",
    "weight": r"feature 'f3', table 'b': weight inf \(value 1 of the feature\) is not finite",
    "pooled": "feature 'f2', table 'b': the pooled vector of example 3 has nan in it",
    "gradient": "feature 'f1', table 'a': the gradient of example 0 has -inf in it; no table was changed",
}
_LENGTHS = [[2, 1, 0, 3], [1, 2, 0, 2], [0, 2, 3, 1]]
_CAPACITY = 8


def make_collection(device: str) -> FusedEmbeddingBagCollection:
    """Two tables in one storage; `b` serves two features."""
    tables = [
        EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=50, feature_names=["f1"]),
        EmbeddingBagConfig(name="b", embedding_dim=8, num_embeddings=60, feature_names=["f2", "f3"]),
    ]
    torch.manual_seed(0)
    return FusedEmbeddingBagCollection(tables, RowWiseAdagrad(lr=0.1), is_weighted=True, device=device)


def batch_with(offence: str | None, device: str = "cpu") -> KeyedJaggedTensor:
    """A batch of static shape, with the offence if it is one of the batch's."""
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
    ids = torch.arange(3 * _CAPACITY, dtype=torch.int32)
    weights = torch.linspace(0.5, 1.5, 3 * _CAPACITY)
    if offence == "id":
        ids[_CAPACITY + 4] = 60
        ids[_CAPACITY + 6] = 10_000  # behind the last: padding
    if offence == "length":
        lengths[0, 1] = -2
    if offence == "capacity":
        lengths[2] = torch.tensor([0, 5, 4, 1])
    if offence == "weight":
        weights[2 * _CAPACITY + 1] = float("inf")
    return KeyedJaggedTensor(
        ["f1", "f2", "f3"],
        ids.to(device),
        weights=weights.to(device),
        lengths=lengths.flatten().to(device),
        stride=4,
        length_per_key=[_CAPACITY] * 3,
        offset_per_key=[0, _CAPACITY, 2 * _CAPACITY, 3 * _CAPACITY],
    )


def spoil(collection: FusedEmbeddingBagCollection, offence: str) -> tuple[KeyedJaggedTensor, float]:
    """The batch with an offence and the factor of the loss; for `pooled` a row of the table is spoilt."""
    device = str(collection.device)
    if offence == "pooled":
        with torch.no_grad():
            weight = collection.embedding_bags["b"].weight
            spoilt = weight.cpu().clone()
            spoilt[_CAPACITY + 4, 5] = float("nan")  # value 4 of f2, of example 3
            weight.copy_(spoilt.to(device))
    return batch_with(offence, device), float("-inf") if offence == "gradient" else 1.0
