"""What every CPU implementation does first: check, drop unused capacity and padding ids, and find each id's bag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POOLINGS = ("sum", "mean")


def check_inputs(
    parts: Sequence[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str, num_features: int
) -> None:
    """Refuse shapes and dtypes that an op cannot take; looks at no values.

    Args:
        parts: the tensors that hold the tables, at least one.
        ids: `[num_ids]`, int32 or int64.
        offsets: `[num_bags + 1]`, int32 or int64.
        weights: `[num_ids]` of a floating dtype, or None.
        pooling: `sum` or `mean`.
        num_features: features that the bags belong to.

    Raises:
        ValueError: naming the argument, its shape or dtype, and what is expected.
    """
    if not parts or any(part.dim() != 2 for part in parts):
        raise ValueError(f"parts: {[list(part.shape) for part in parts]}; matrices are expected")
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: {value.dtype} {list(value.shape)}; one dimension of int32 or int64 is expected")
    if offsets.shape[0] < 1 or num_features < 1 or (offsets.shape[0] - 1) % num_features:
        raise ValueError(f"offsets: {offsets.shape[0]} values; {num_features} features * batch_size + 1 are expected")
    if weights is not None and (weights.shape != ids.shape or not weights.dtype.is_floating_point):
        raise ValueError(f"weights: {weights.dtype} {list(weights.shape)}; floats {list(ids.shape)} are expected")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling: {pooling!r}; one of {POOLINGS} is expected")


def plain_table(parts: Sequence[Tensor], num_rows: int, dim: int) -> Tensor:
    """The table of a CPU op, which is not packed.

    Args:
        parts: one tensor `[num_rows, dim]` of a floating dtype.
        num_rows: rows of the stack.
        dim: its columns.

    Returns:
        The tensor.

    Raises:
        ValueError: another layout.
    """
    if len(parts) != 1 or parts[0].shape != (num_rows, dim) or not parts[0].dtype.is_floating_point:
        found = [f"{part.dtype} {list(part.shape)}" for part in parts]
        raise ValueError(f"parts: {', '.join(found)}; on the CPU one floating [{num_rows}, {dim}] is expected")
    return parts[0]


def compute_dtype(table: Tensor) -> torch.dtype:
    """The dtype that a table's rows are pooled and updated in.

    Args:
        table: a part of any dtype; packed bfloat16 is int32.

    Returns:
        float64 for float64, float32 for everything else.
    """
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def used_rows(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Drop ids before `offsets[0]` and from `offsets[-1]` on, and ids that are no rows, with their weights.

    Args:
        ids: `[num_ids]`; ids outside of [0, num_rows) are skipped.
        offsets: `[num_bags + 1]`, ascending.
        weights: `[num_ids]` or None.
        num_rows: rows of the table.

    Returns:
        ids `[used]`, offsets `[num_bags + 1]` of the same dtype from 0, weights `[used]` or None, and the positions
        int64 `[used]` in the given ids that were kept; None if they are the first `used` ones.

    Raises:
        IndexError: offsets that do not lie within the ids.
    """
    first, last = int(offsets[0]), int(offsets[-1])
    if not 0 <= first <= last <= ids.numel():
        raise IndexError(f"offsets go from {first} to {last}, but there are {ids.numel()} ids")
    ids = ids[first:last]
    weights = weights[first:last] if weights is not None else None
    offsets = offsets.to(ids.dtype)
    offsets = offsets - first if first else offsets
    if first == last:
        return ids, offsets, weights, None
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < num_rows:
        return ids, offsets, weights, torch.arange(first, last) if first else None
    keep = (ids >= 0) & (ids < num_rows)
    kept_before = torch.zeros(last - first + 1, dtype=ids.dtype)
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
    return torch.repeat_interleave(offsets.diff().long(), output_size=int(offsets[-1]))


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


def normalized_weights(offsets: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that turn a weighted sum into the weighted mean: `w / sum(w)` of the bag, 0 where the sum is 0.

    Args:
        offsets: `[num_bags + 1]`, first 0.
        weights: `[used]`.
        dtype: dtype of the result.

    Returns:
        `[used]` of `dtype`.
    """
    return weights.to(dtype) * bag_scales(offsets, weights, dtype)[bag_of_each(offsets)]
