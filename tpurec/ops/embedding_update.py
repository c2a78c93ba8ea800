"""`tpurec::embedding_update_`: the fused backward of `tpurec::embedding_bag`: one optimizer step on the rows it read.

The specification is `tpurec/kernels/embedding_update.py`. Table and state change in place; nothing is allocated that
grows with the number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpurec.ops.jagged_rows import bag_of_each, check_inputs, mean_weights, used_rows

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@torch.library.custom_op("tpurec::embedding_update_", mutates_args=("table", "state"), device_types="cpu")
def embedding_update_(
    table: Tensor,
    state: Tensor | None,
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
) -> None:
    """Add the gradients of each row that occurs in `ids` and take one optimizer step on it.

    Args:
        table: `[num_rows, dim]`, changed in place.
        state: the accumulators, changed in place: `[num_rows, dim]` for `adagrad`, `[num_rows]` for `rowwise_adagrad`,
            None for `sgd`.
        grad: `[batch_size, num_features * dim]`, the gradient of the lookup's output.
        ids: `[num_ids]` int32 or int64, as in the lookup.
        offsets: `[num_features * batch_size + 1]`, as in the lookup.
        weights: `[num_ids]` or None, as in the lookup.
        lr: learning rate, a float32 scalar tensor, so that a schedule recompiles nothing.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`.
        eps: added to the root of the accumulator.
        weight_decay: L2 coefficient.
        pooling: `sum` or `mean`, as in the lookup.
        feature_tables: for every feature the number of the table it reads; rows of different tables never coincide.

    Raises:
        ValueError: a shape, dtype or optimizer that does not fit.
        IndexError: an id >= num_rows.
    """
    _check_update(table, state, ids, offsets, weights, optimizer, pooling)
    num_features, dim = len(feature_tables), table.shape[1]
    ids, offsets, weights, _ = used_rows(ids, offsets, weights)
    if ids.numel() == 0:
        return
    if int(ids.max()) >= table.shape[0]:
        raise IndexError(f"id {int(ids.max())} is outside of the table's {table.shape[0]} rows")
    batch_size = (offsets.numel() - 1) // num_features
    compute = torch.float64 if table.dtype == torch.float64 else torch.float32
    factors = mean_weights(offsets, weights, compute) if pooling == "mean" else weights
    bags = bag_of_each(offsets)
    # A bag's gradient stays where it is: line b, feature f of `grad` is line b * num_features + f of the view.
    lines = bags % batch_size * num_features + bags // batch_size
    ordered, order = torch.sort(ids, stable=True)
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = F.pad(counts.cumsum(0), (1, 0))
    grad_rows = F.embedding_bag(
        lines[order],
        grad.reshape(-1, dim).to(compute),
        starts,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=None if factors is None else factors[order].to(compute),
    )
    _step(table, state, rows, grad_rows, lr, optimizer, eps, weight_decay)


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
    values = table[rows].to(grad_rows.dtype)
    if weight_decay:
        grad_rows = grad_rows + weight_decay * values
    if optimizer == "sgd":
        step = grad_rows
    else:
        squares = grad_rows.square()
        if optimizer == "rowwise_adagrad":
            squares = squares.mean(1)
        sums = state[rows] + squares.to(state.dtype)
        state[rows] = sums
        roots = sums.sqrt() + eps
        step = grad_rows / (roots[:, None] if optimizer == "rowwise_adagrad" else roots)
    table[rows] = (values - lr * step).to(table.dtype)


@embedding_update_.register_fake
def _(
    table: Tensor,
    state: Tensor | None,
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
) -> None:
    _check_update(table, state, ids, offsets, weights, optimizer, pooling)


def _check_update(
    table: Tensor,
    state: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    optimizer: str,
    pooling: str,
) -> None:
    check_inputs(table, ids, offsets, weights, pooling)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: {optimizer!r}; one of {OPTIMIZERS} is expected")
    expected = {"sgd": None, "adagrad": list(table.shape), "rowwise_adagrad": [table.shape[0]]}[optimizer]
    actual = None if state is None else list(state.shape)
    if actual != expected:
        raise ValueError(f"state: {actual}; {expected} is expected for {optimizer}")
