"""What every CPU implementation does first: drop unused capacity and padding ids, so that plain kernels can be used."""

from __future__ import annotations

import torch
from torch import Tensor

POOLINGS = ("sum", "mean")


def check_inputs(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str) -> None:
    """Refuse shapes and dtypes that an op cannot take; looks at no values.

    Args:
        table: `[num_rows, dim]`, float32, bfloat16, float16 or float64.
        ids: `[num_ids]`, int32 or int64.
        offsets: `[num_bags + 1]`, int32 or int64.
        weights: `[num_ids]` of a floating dtype, or None.
        pooling: `sum` or `mean`.

    Raises:
        ValueError: naming the argument, its shape or dtype, and what is expected.
    """
    if table.dim() != 2 or not table.dtype.is_floating_point:
        raise ValueError(f"table: {table.dtype} {list(table.shape)}; a floating [num_rows, dim] is expected")
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: {value.dtype} {list(value.shape)}; one dimension of int32 or int64 is expected")
    if offsets.shape[0] < 1:
        raise ValueError("offsets: empty; num_bags + 1 values are expected")
    if weights is not None and (weights.dim() != 1 or not weights.dtype.is_floating_point):
        raise ValueError(f"weights: {weights.dtype} {list(weights.shape)}; one dimension of floats is expected")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling: {pooling!r}; one of {POOLINGS} is expected")


def used_rows(ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Drop ids behind `offsets[-1]` and negative ids, with their weights.

    Args:
        ids: `[num_ids]`; -1 (any negative) is skipped.
        offsets: `[num_bags + 1]`, ascending.
        weights: `[num_ids]` or None.

    Returns:
        ids int32 or int64 `[used]`, offsets `[num_bags + 1]` of the same dtype, weights `[used]` or None, and the
        positions int64 `[used]` in the given ids that were kept.
    """
    used = int(offsets[-1])
    first = int(offsets[0])
    ids = ids[first:used]
    if weights is not None:
        weights = weights[first:used]
    offsets = offsets.to(ids.dtype)
    if first:
        offsets = offsets - first
    if ids.numel() == 0 or int(ids.min()) >= 0:
        return ids, offsets, weights, torch.arange(first, used)
    keep = ids >= 0
    kept_before = torch.zeros(keep.numel() + 1, dtype=ids.dtype)
    torch.cumsum(keep, 0, out=kept_before[1:])
    positions = keep.nonzero().squeeze(1)
    weights = weights[positions] if weights is not None else None
    return ids[positions], kept_before[offsets], weights, positions + first


def bag_of_each(offsets: Tensor) -> Tensor:
    """Bag number of every id.

    Args:
        offsets: `[num_bags + 1]`, first 0.

    Returns:
        int64 `[offsets[-1]]`.
    """
    return torch.repeat_interleave(offsets.diff().long())


def mean_weights(offsets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The factor of every id that turns a weighted sum into the mean: `w / sum(w)` of its bag, 0 where the sum is 0.

    Args:
        offsets: `[num_bags + 1]`, first 0.
        weights: `[used]` or None for all ones.
        dtype: dtype of the result.

    Returns:
        `[used]` of `dtype`.
    """
    return (weights.to(dtype) if weights is not None else 1) * bag_scales(offsets, weights, dtype)[bag_of_each(offsets)]


def bag_scales(offsets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`1 / sum(weights)` of every bag (`1 / length` without weights), 0 where the sum is 0.

    Args:
        offsets: `[num_bags + 1]`, first 0.
        weights: `[used]` or None.
        dtype: dtype of the result.

    Returns:
        `[num_bags]` of `dtype`.
    """
    if weights is None:
        sums = offsets.diff().to(dtype)
    else:
        sums = torch.zeros(offsets.numel() - 1, dtype=dtype).index_add_(0, bag_of_each(offsets), weights.to(dtype))
    return torch.where(sums == 0, torch.zeros_like(sums), 1 / sums)
