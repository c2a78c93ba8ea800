"""FBGEMM's CPU kernels for stacked tables, called with rows of the whole stack.

FBGEMM thinks in tables with an offset each. Here every feature gets offset 0 and the whole stack as its range, and
features count as one table exactly if `feature_tables` says so: then their gradients are combined before the step.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

_POOLING_MODE = {"sum": 0, "mean": 1}
_OUTPUT_FP32 = 0


class _Layout(NamedTuple):
    placements: Tensor
    row_offsets: Tensor
    column_offsets: Tensor
    table_rows: Tensor


@lru_cache(maxsize=256)
def _layout(feature_tables: tuple[int, ...], num_rows: int, dim: int) -> _Layout:
    first = feature_tables[0]
    starts = [(table - first) * num_rows for table in feature_tables]
    return _Layout(
        torch.zeros(len(feature_tables), dtype=torch.int32),
        torch.zeros(len(feature_tables), dtype=torch.int64),
        torch.arange(len(feature_tables) + 1, dtype=torch.int32) * dim,
        torch.tensor([*starts, starts[-1] + num_rows], dtype=torch.int64),
    )


def can_look_up(table: Tensor) -> bool:
    """Whether the lookup kernel takes a table.

    Args:
        table: `[num_rows, dim]`.

    Returns:
        True for contiguous float32.
    """
    return table.dtype == torch.float32 and table.is_contiguous()


def look_up(
    table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str, num_features: int
) -> Tensor:
    """Pooled lookup that writes the output's layout directly; runs on one thread.

    Args:
        table: `[num_rows, dim]` float32, contiguous.
        ids: `[used]`, all in range.
        offsets: `[num_features * batch_size + 1]`, of the ids' dtype.
        weights: `[used]` float32 or None; only with pooling `sum`.
        pooling: `sum` or `mean`.
        num_features: features of the bags.

    Returns:
        `[batch_size, num_features * dim]` float32.
    """
    num_rows, dim = table.shape
    layout = _layout(tuple(range(num_features)), num_rows, dim)
    return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
        table.view(-1),
        layout.row_offsets,
        layout.column_offsets,
        num_features * dim,
        layout.table_rows,
        ids,
        offsets,
        _POOLING_MODE[pooling],
        weights,
        _OUTPUT_FP32,
    )


def can_update(table: Tensor, feature_tables: list[int], optimizer: str, weight_decay: float) -> bool:
    """Whether FBGEMM's fused update does what is asked, and is the fastest way to do it.

    Its row-wise Adagrad takes several times as long as the blocked update here, and it knows no weight decay for SGD
    and Adagrad.

    Args:
        table: `[num_rows, dim]`.
        feature_tables: table of every feature.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`.
        weight_decay: L2 coefficient.

    Returns:
        True for SGD and Adagrad without weight decay on a contiguous float32 table, features grouped by table.
    """
    grouped = all(before <= after for before, after in pairwise(feature_tables))
    return optimizer in ("sgd", "adagrad") and not weight_decay and grouped and can_look_up(table)


def update_(
    table: Tensor,
    state: Tensor | None,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    lr: Tensor,
    eps: float,
    pooling: str,
    feature_tables: list[int],
) -> None:
    """One step on the rows of a batch, in place: SGD without a state, Adagrad with one.

    Args:
        table: `[num_rows, dim]` float32, contiguous.
        state: `[num_rows, dim]` float32, contiguous, or None.
        grad: `[batch_size, num_features * dim]` float32, contiguous.
        ids: `[used]`, all in range.
        offsets: `[num_features * batch_size + 1]`, of the ids' dtype.
        weights: `[used]` float32 or None; only with pooling `sum`.
        lr: scalar.
        eps: of Adagrad.
        pooling: `sum` or `mean`.
        feature_tables: table of every feature, ascending.
    """
    num_rows, dim = table.shape
    layout = _layout(tuple(feature_tables), num_rows, dim)
    common = (
        grad,
        table.view(-1),
        layout.placements,
        layout.row_offsets,
        layout.column_offsets,
        dim,
        layout.table_rows,
        0,  # bits of the total hash size: the GPU kernels sort by them
        ids,
        offsets,
        _POOLING_MODE[pooling],
        weights,
        False,  # stochastic rounding
    )
    if state is None:
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*common, lr)
    else:
        torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(
            *common, state.view(-1), layout.placements, layout.row_offsets, lr, eps
        )
