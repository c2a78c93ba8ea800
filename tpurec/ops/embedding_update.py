"""`tpurec::embedding_update_`: the fused backward of `tpurec::embedding_bag`: one optimizer step on the rows it read.

The specification is `tpurec/kernels/embedding_update.py`. Table and state change in place; nothing is allocated that
grows with the number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpurec.ops import fbgemm_cpu
from tpurec.ops.jagged_rows import (
    bag_of_each,
    bag_scales,
    check_inputs,
    compute_dtype,
    normalized_weights,
    plain_table,
    used_rows,
)
from tpurec.ops.row_step import RowStep

# Rows are updated in blocks of about this many values, so that a block's gradients stay in the cache.
_BLOCK_VALUES = 1 << 18


@torch.library.custom_op("tpurec::embedding_update_", mutates_args=("parts", "state"), device_types="cpu")
def embedding_update_(
    parts: list[Tensor],
    state: list[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    lr: Tensor,
    optimizer: str,
    eps: float,
    weight_decay: float,
    pooling: str,
    feature_tables: list[int],
    num_rows: int,
    dim: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    decoupled_weight_decay: bool = False,
    max_gradient_norm: float = 0.0,
    rounding_seed: int = -1,
) -> None:
    """Add the gradients of each row that occurs in `ids` and take one optimizer step on it.

    Args:
        parts: the stacked tables, changed in place; laid out as in the lookup.
        state: the accumulators, float32, changed in place: `[num_rows, dim]` for `adagrad` (packed like the tables on
            a TPU), `[num_rows]` for `rowwise_adagrad`, none for `sgd`, two `[num_rows, dim]` for `adam`,
            `[num_rows, dim]` and `[num_rows]` for `rowwise_adam`. Behind them, for Adam and for stochastic rounding,
            the number of updates so far, int32 `[]`: every call adds one, also one whose ids are all skipped.
        grad: `[batch_size, num_features * dim]`, the gradient of the lookup's output.
        ids: `[num_ids]` int32 or int64, as in the lookup.
        offsets: `[num_features * batch_size + 1]`, as in the lookup.
        weights: `[num_ids]` or None, as in the lookup.
        lr: learning rate, a float32 scalar tensor, so that a schedule recompiles nothing.
        optimizer: `sgd`, `adagrad`, `rowwise_adagrad`, `adam` or `rowwise_adam`.
        eps: added to the root of the accumulator.
        weight_decay: coefficient.
        pooling: `sum` or `mean`, as in the lookup.
        feature_tables: for every feature the number of the table it reads; features of different tables never have a
            row in common.
        num_rows: rows of the stack.
        dim: columns of the stack.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        decoupled_weight_decay: weight decay acts on the row (AdamW), not on the gradient (L2).
        max_gradient_norm: the combined gradient of a row is scaled down to this Euclidean norm; 0 for no limit.
        rounding_seed: bfloat16 rows are rounded stochastically from this seed; -1 for to nearest.

    Raises:
        ValueError: a shape, dtype or optimizer that does not fit.
        IndexError: offsets that do not lie within the ids.
    """
    rule = RowStep(optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, max_gradient_norm, rounding_seed)
    _check(parts, state, grad, ids, offsets, weights, rule, pooling, feature_tables, dim)
    table = plain_table(parts, num_rows, dim)
    rule.check_state(state, num_rows, dim)
    if rule.counts_steps:
        state[-1].add_(1)
    ids, offsets, weights, _ = used_rows(ids, offsets, weights, num_rows)
    if ids.numel() == 0:
        return
    compute = compute_dtype(table)
    grad = grad.to(compute).contiguous()
    if weights is not None:
        weights = normalized_weights(offsets, weights, compute) if pooling == "mean" else weights.to(compute)
        pooling = "sum"
    if not max_gradient_norm and fbgemm_cpu.can_update(table, feature_tables, optimizer, weight_decay):
        sums = state[0] if optimizer == "adagrad" else None
        fbgemm_cpu.update_(table, sums, grad, ids, offsets, weights, lr, eps, pooling, feature_tables)
        return
    lines, starts, rows, factors = _by_row(ids, offsets, weights, pooling, len(feature_tables), compute)
    grad_lines = grad.view(-1, dim)
    block = max(64, _BLOCK_VALUES // dim)
    bounds = [*starts[:-1:block].tolist(), int(starts[-1])]
    for first, begin, end in zip(range(0, rows.numel(), block), bounds, bounds[1:], strict=False):
        grad_rows = F.embedding_bag(
            lines[begin:end],
            grad_lines,
            starts[first : first + block + 1] - begin,
            mode="sum",
            include_last_offset=True,
            per_sample_weights=None if factors is None else factors[begin:end],
        )
        rule.apply(table, state, rows[first : first + block], grad_rows, lr)


def _by_row(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str, num_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Group the occurrences by row, in the order of the batch within a row.

    Returns:
        The gradient line of every occurrence, int32 `[used]`, by row; where each row's occurrences begin, int32
        `[num_unique + 1]`; the rows, int64 `[num_unique]`; and the factor of every occurrence or None.
    """
    num_bags = offsets.numel() - 1
    bags = bag_of_each(offsets)
    # One key of row and place: unstable sorting of it is stable sorting by row, and NumPy sorts int64 with SIMD.
    place = bags if weights is None else torch.arange(ids.numel())
    keys = (ids.long() << 32) | place
    keys.numpy().sort()
    ordered, place = keys >> 32, keys & 0xFFFFFFFF
    is_first = torch.ones(ids.numel(), dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    begins = is_first.nonzero().squeeze(1)
    starts = F.pad(begins, (0, 1), value=ids.numel()).to(torch.int32)
    factors = None
    if weights is not None:
        factors, place = weights[place], bags[place]
    elif pooling == "mean":
        factors = bag_scales(offsets, None, dtype)[place]
    # Line b * num_features + f of the gradient's view belongs to bag f * batch_size + b.
    line_of_bag = torch.arange(num_bags, dtype=torch.int32).view(-1, num_features).t().reshape(-1)
    return line_of_bag[place], starts, ordered[begins], factors


@embedding_update_.register_fake
def _(
    parts: list[Tensor],
    state: list[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    lr: Tensor,
    optimizer: str,
    eps: float,
    weight_decay: float,
    pooling: str,
    feature_tables: list[int],
    num_rows: int,
    dim: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    decoupled_weight_decay: bool = False,
    max_gradient_norm: float = 0.0,
    rounding_seed: int = -1,
) -> None:
    rule = RowStep(optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, max_gradient_norm, rounding_seed)
    _check(parts, state, grad, ids, offsets, weights, rule, pooling, feature_tables, dim)


def _check(
    parts: list[Tensor],
    state: list[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    rule: RowStep,
    pooling: str,
    feature_tables: list[int],
    dim: int,
) -> None:
    check_inputs(parts, ids, offsets, weights, pooling, len(feature_tables))
    if not rule.takes_states(len(state), len(parts)):
        needed = rule.num_states or "none"
        raise ValueError(f"state: {len(state)} tensors; {rule.optimizer} needs {needed}")
    expected = ((offsets.shape[0] - 1) // len(feature_tables), len(feature_tables) * dim)
    if grad.shape != expected:
        raise ValueError(f"grad: {list(grad.shape)}; {list(expected)} is expected")
