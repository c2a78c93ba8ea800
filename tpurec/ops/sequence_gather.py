"""`tpurec::sequence_gather`: unpooled lookup in stacked tables, one row per id.

The specification is `tpurec/kernels/sequence_gather.py`. Its fused update is `tpurec::embedding_update_` with a bag per
id, which moves no byte of rows or gradients more than an op of its own would: each gradient is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.jagged_rows import compute_dtype, plain_table


@torch.library.custom_op("tpurec::sequence_gather", mutates_args=(), device_types="cpu")
def sequence_gather(parts: list[Tensor], ids: Tensor, num_rows: int, dim: int) -> Tensor:
    """Read the row of every id.

    Args:
        parts: the stacked tables, as of `tpurec::embedding_bag`. They take no gradient here.
        ids: `[num_ids]` int32 or int64 rows of the stack; ids outside of [0, num_rows), such as the padding -1, give
            zeros.
        num_rows: rows of the stack.
        dim: columns of the stack.

    Returns:
        `[num_ids, dim]` float32 (float64 for float64 tables).

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    _check(parts, ids)
    table = plain_table(parts, num_rows, dim)
    is_row = (ids >= 0) & (ids < num_rows)
    if is_row.all():
        return table.index_select(0, ids).to(compute_dtype(table))
    found = table.new_zeros(ids.shape[0], dim, dtype=compute_dtype(table))
    places = is_row.nonzero().squeeze(1)
    return found.index_copy_(0, places, table.index_select(0, ids[places]).to(found.dtype))


@sequence_gather.register_fake
def _(parts: list[Tensor], ids: Tensor, num_rows: int, dim: int) -> Tensor:
    _check(parts, ids)
    return parts[0].new_empty(ids.shape[0], dim, dtype=compute_dtype(parts[0]))


def _check(parts: list[Tensor], ids: Tensor) -> None:
    if not parts:
        raise ValueError("parts: no tensor; the tables are expected")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: {ids.dtype} {list(ids.shape)}; int32 or int64 [num_ids] is expected")
