"""`tpurec::column_step_`: one optimizer step on some columns of rows whose other columns are on other ranks.

The specification is `tpurec/kernels/column_step.py`. Table and state change in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.jagged_rows import plain_table
from tpurec.ops.row_step import RowStep


@torch.library.custom_op("tpurec::column_step_", mutates_args=("parts", "state"), device_types="cpu")
def column_step_(
    parts: list[Tensor],
    state: list[Tensor],
    rows: Tensor,
    grad_rows: Tensor,
    mean_squares: Tensor,
    lr: Tensor,
    optimizer: str,
    eps: float,
    weight_decay: float,
    num_rows: int,
    dim: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    decoupled_weight_decay: bool = False,
    rounding_seed: int = -1,
) -> None:
    """Take one optimizer step on rows whose gradients are combined already.

    Args:
        parts: the columns of the stacked tables, changed in place; laid out as in `tpurec::embedding_bag`.
        state: as of `tpurec::embedding_update_`, changed in place.
        rows: int32 `[count]` rows of the stack, none twice; -1 is no row.
        grad_rows: `[count, dim]`, of these columns, duplicates combined and clipped; L2 decay is added here.
        mean_squares: `[count]`, the mean square over all columns of the whole row, after clipping and L2 decay; what
            accumulators per row take.
        lr: learning rate, a float32 scalar tensor.
        optimizer: as of `tpurec::embedding_update_`, as all that follow.
        eps: as there.
        weight_decay: as there.
        num_rows: rows of the stack.
        dim: columns of the stack.
        beta1: as there.
        beta2: as there.
        decoupled_weight_decay: as there.
        rounding_seed: as there.

    Raises:
        ValueError: a shape, dtype or optimizer that does not fit.
    """
    rule = RowStep(optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, 0.0, rounding_seed)
    _check(parts, state, rows, grad_rows, mean_squares, dim, rule)
    table = plain_table(parts, num_rows, dim)
    rule.check_state(state, num_rows, dim)
    if rule.counts_steps:
        state[-1].add_(1)
    held = (rows >= 0).nonzero().squeeze(1)
    if held.numel():
        rule.apply(table, state, rows[held].long(), grad_rows[held], lr, mean_squares[held])


@column_step_.register_fake
def _(
    parts: list[Tensor],
    state: list[Tensor],
    rows: Tensor,
    grad_rows: Tensor,
    mean_squares: Tensor,
    lr: Tensor,
    optimizer: str,
    eps: float,
    weight_decay: float,
    num_rows: int,
    dim: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    decoupled_weight_decay: bool = False,
    rounding_seed: int = -1,
) -> None:
    rule = RowStep(optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, 0.0, rounding_seed)
    _check(parts, state, rows, grad_rows, mean_squares, dim, rule)


def _check(
    parts: list[Tensor],
    state: list[Tensor],
    rows: Tensor,
    grad_rows: Tensor,
    mean_squares: Tensor,
    dim: int,
    rule: RowStep,
) -> None:
    if not rule.takes_states(len(state), len(parts)):
        raise ValueError(f"state: {len(state)} tensors; {rule.optimizer} needs {rule.num_states or 'none'}")
    if rows.dim() != 1 or rows.dtype != torch.int32:
        raise ValueError(f"rows: {rows.dtype} {list(rows.shape)}; int32 [count] is expected")
    count = rows.shape[0]
    if grad_rows.shape != (count, dim):
        raise ValueError(f"grad_rows: {list(grad_rows.shape)}; {[count, dim]} is expected")
    if mean_squares.shape != (count,):
        raise ValueError(f"mean_squares: {list(mean_squares.shape)}; {[count]} is expected")
