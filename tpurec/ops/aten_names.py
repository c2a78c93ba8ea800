"""torch's own op that weighted `nn.EmbeddingBag`s need in training and torch_tpu 0.2.0 lacks, on `tpu` tensors.

TorchRec's collections are made of them: without this the weights of ids, those by position included, do not train.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAME = "_embedding_bag_per_sample_weights_backward"
_SUM = 0  # torch's number of the mode; it takes no weights in another
_library: torch.library.Library | None = None


def register() -> None:
    """Register the op for the `tpu` key, if torch_tpu has none; a second call does nothing."""
    global _library
    if _library is None and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", "PrivateUse1"):
        _library = torch.library.Library("aten", "IMPL")
        _library.impl(_NAME, per_sample_weights_gradient, "PrivateUse1")


def per_sample_weights_gradient(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """`aten::_embedding_bag_per_sample_weights_backward`: the product of each id's row and its bag's gradient.

    Args:
        grad: `[B, D]`.
        weight: `[num_rows, D]`.
        indices: int32 or int64 `[N]`.
        offsets: `[B]`, or `[B + 1]` with the end.
        offset2bag: `[N]`, the bag of each id; empty if it is to be found from the offsets.
        mode: torch's number of the pooling; only that of sums.
        padding_idx: the id that counts for nothing.

    Returns:
        `[N]` of the gradient's dtype; 0 for ids in no bag.

    Raises:
        RuntimeError: another pooling.
    """
    if mode != _SUM:
        raise RuntimeError(f"{_NAME}: mode {mode}; weights of ids go with sums, which are mode {_SUM}")
    num_ids, num_bags = indices.shape[0], grad.shape[0]
    if not num_ids or not num_bags:
        return grad.new_zeros(num_ids)
    if offset2bag.shape[0] != num_ids:
        begins = offsets.new_zeros(num_ids + 1).index_add(0, offsets, torch.ones_like(offsets))
        offset2bag = begins.cumsum(0)[:num_ids] - 1
    counts = (offset2bag >= 0) & (offset2bag < num_bags) & (indices != padding_idx)
    bags, rows = offset2bag.clamp(0, num_bags - 1), indices.clamp(0, weight.shape[0] - 1)
    products = (grad.index_select(0, bags) * weight.index_select(0, rows)).sum(1)
    return torch.where(counts, products, torch.zeros_like(products))
