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

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
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
) -> None:
    """Add the gradients of each row that occurs in `ids` and take one optimizer step on it.

    Args:
        parts: the stacked tables, changed in place; laid out as in the lookup.
        state: the accumulators, float32, changed in place: one tensor `[num_rows, dim]` for `adagrad` (packed like the
            tables on a TPU), one `[num_rows]` for `rowwise_adagrad`, none for `sgd`.
        grad: `[batch_size, num_features * dim]`, the gradient of the lookup's output.
        ids: `[num_ids]` int32 or int64, as in the lookup.
        offsets: `[num_features * batch_size + 1]`, as in the lookup.
        weights: `[num_ids]` or None, as in the lookup.
        lr: learning rate, a float32 scalar tensor, so that a schedule recompiles nothing.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`.
        eps: added to the root of the accumulator.
        weight_decay: L2 coefficient.
        pooling: `sum` or `mean`, as in the lookup.
        feature_tables: for every feature the number of the table it reads; features of different tables never have a
            row in common.
        num_rows: rows of the stack.
        dim: columns of the stack.

    Raises:
        ValueError: a shape, dtype or optimizer that does not fit.
        IndexError: offsets that do not lie within the ids.
    """
    _check(parts, state, grad, ids, offsets, weights, optimizer, pooling, feature_tables, dim)
    table = plain_table(parts, num_rows, dim)
    sums = _plain_state(state, optimizer, num_rows, dim)
    ids, offsets, weights, _ = used_rows(ids, offsets, weights, num_rows)
    if ids.numel() == 0:
        return
    compute = compute_dtype(table)
    grad = grad.to(compute).contiguous()
    if weights is not None:
        weights = normalized_weights(offsets, weights, compute) if pooling == "mean" else weights.to(compute)
        pooling = "sum"
    if fbgemm_cpu.can_update(table, feature_tables, optimizer, weight_decay):
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
        _step(table, sums, rows[first : first + block], grad_rows, lr, optimizer, eps, weight_decay)


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


def _step(
    table: Tensor,
    state: Tensor | None,
    rows: Tensor,
    grad_rows: Tensor,
    lr: Tensor,
    optimizer: str,
    eps: float,
    weight_decay: float,
) -> None:
    """One optimizer step on `rows`, int64 and unique, with gradients `[len(rows), dim]`, which it may overwrite."""
    values = table.index_select(0, rows).to(grad_rows.dtype)
    if weight_decay:
        grad_rows.add_(values, alpha=weight_decay)
    if optimizer == "sgd":
        values.sub_(grad_rows.mul_(lr))
    else:
        sums = state.index_select(0, rows)
        if optimizer == "rowwise_adagrad":
            squares = torch.linalg.vector_norm(grad_rows, dim=1).square_().div_(grad_rows.shape[1])
            sums.add_(squares)
            values.addcmul_(grad_rows, (-lr / (sums.sqrt() + eps))[:, None].to(values.dtype))
        else:
            sums.addcmul_(grad_rows, grad_rows)
            values.sub_(grad_rows.mul_(lr).div_(sums.sqrt().add_(eps)))
        state.index_copy_(0, rows, sums)
    table.index_copy_(0, rows, values.to(table.dtype))


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
) -> None:
    _check(parts, state, grad, ids, offsets, weights, optimizer, pooling, feature_tables, dim)


def _check(
    parts: list[Tensor],
    state: list[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    optimizer: str,
    pooling: str,
    feature_tables: list[int],
    dim: int,
) -> None:
    check_inputs(parts, ids, offsets, weights, pooling, len(feature_tables))
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: {optimizer!r}; one of {OPTIMIZERS} is expected")
    if bool(state) == (optimizer == "sgd"):
        raise ValueError(f"state: {len(state)} tensors; {optimizer} needs {'none' if optimizer == 'sgd' else 'some'}")
    expected = ((offsets.shape[0] - 1) // len(feature_tables), len(feature_tables) * dim)
    if grad.shape != expected:
        raise ValueError(f"grad: {list(grad.shape)}; {list(expected)} is expected")


def _plain_state(state: list[Tensor], optimizer: str, num_rows: int, dim: int) -> Tensor | None:
    if optimizer == "sgd":
        return None
    expected = (num_rows, dim) if optimizer == "adagrad" else (num_rows,)
    if len(state) != 1 or state[0].shape != expected or state[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in state)
        raise ValueError(f"state: {found}; on the CPU one float32 {list(expected)} is expected for {optimizer}")
    return state[0]
