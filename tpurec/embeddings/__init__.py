"""TorchRec-compatible embedding collections whose optimizer runs in the backward pass."""

from tpurec.embeddings.deferred import deferred_tables
from tpurec.embeddings.device_checks import check_on_device, raise_offence
from tpurec.embeddings.fuse import (
    dense_parameters,
    fuse,
    fused_collections,
    fused_optimizer_state_dict,
    load_fused_optimizer_state_dict,
    named_dense_parameters,
    set_learning_rate,
)
from tpurec.embeddings.fused import FusedEmbeddingBagCollection
from tpurec.embeddings.gradients import dense_gradients
from tpurec.embeddings.jagged import TorchBatch, to_torch
from tpurec.embeddings.optimizers import SGD, Adagrad, Adam, EmbeddingOptimizer, RowWiseAdagrad, RowWiseAdam
from tpurec.embeddings.sequence import FusedEmbeddingCollection

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingOptimizer",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "TorchBatch",
    "check_on_device",
    "deferred_tables",
    "dense_gradients",
    "dense_parameters",
    "fuse",
    "fused_collections",
    "fused_optimizer_state_dict",
    "load_fused_optimizer_state_dict",
    "named_dense_parameters",
    "raise_offence",
    "set_learning_rate",
    "to_torch",
]
