"""`tpurec::embedding_bag`: pooled lookup in stacked tables, and `tpurec::embedding_bag_weights_grad`.

The specification is `tpurec/kernels/embedding_bag.py`. Bags are feature-major, as in a KeyedJaggedTensor; the output
has one line per example with the features side by side, as in a KeyedTensor.

The tables of one dim are stacked below one another in `num_rows` rows. On the CPU they are one plain tensor
`[num_rows, dim]`; on a TPU they are the parts of a packed `tpurec.kernels.storage.Storage`.
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

# Values gathered at a time, so that a block stays in the cache.
_BLOCK_VALUES = 1 << 18


@torch.library.custom_op("tpurec::embedding_bag", mutates_args=(), device_types="cpu")
def embedding_bag(
    parts: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
) -> Tensor:
    """Pool the rows of every bag.

    Args:
        parts: the stacked tables. They take no gradient here, as that would be as large as the tables: see
            `tpurec.embeddings.FusedEmbeddingBagCollection`.
        ids: `[num_ids]` int32 or int64 rows of the stack; ids outside of [0, num_rows), such as the padding -1, are
            skipped with their weights.
        offsets: `[num_features * batch_size + 1]` int32 or int64, ascending; ids behind the last are ignored.
        weights: `[num_ids]` float32, one per id, or None. Differentiable.
        pooling: `sum`, or `mean`: `sum(w E) / sum(w)`, zeros where the weights of a bag sum to 0.
        num_features: how many features the bags belong to, feature after feature.
        num_rows: rows of the stack.
        dim: columns of the stack.

    Returns:
        `[batch_size, num_features * dim]` float32 (float64 for float64 tables); zeros for empty bags.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: offsets that do not lie within the ids.
    """
    check_inputs(parts, ids, offsets, weights, pooling, num_features)
    table = plain_table(parts, num_rows, dim)
    batch_size = (offsets.numel() - 1) // num_features
    compute = compute_dtype(table)
    ids, offsets, weights, _ = used_rows(ids, offsets, weights, num_rows)
    if ids.numel() == 0:
        return table.new_zeros(batch_size, num_features * dim, dtype=compute)
    if weights is not None:
        weights = normalized_weights(offsets, weights, compute) if pooling == "mean" else weights.to(compute)
        pooling = "sum"
    # FBGEMM writes this layout directly but on one thread; torch's kernel uses all threads and then needs a transpose.
    if num_features > 1 and fbgemm_cpu.can_look_up(table) and torch.get_num_threads() < 4:
        return fbgemm_cpu.look_up(table, ids, offsets, weights, pooling, num_features)
    if table.dtype != compute:  # torch's kernel would round the pooled rows to the table's dtype
        unique, ids = torch.unique(ids, return_inverse=True)
        table = table[unique].to(compute)
        offsets = offsets.to(ids.dtype)
    out = F.embedding_bag(ids, table, offsets, mode=pooling, per_sample_weights=weights, include_last_offset=True)
    return out.view(num_features, batch_size, dim).transpose(0, 1).reshape(batch_size, num_features * dim)


@embedding_bag.register_fake
def _(
    parts: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
) -> Tensor:
    check_inputs(parts, ids, offsets, weights, pooling, num_features)
    batch_size = (offsets.shape[0] - 1) // num_features
    return parts[0].new_empty(batch_size, num_features * dim, dtype=compute_dtype(parts[0]))


@torch.library.custom_op("tpurec::embedding_bag_weights_grad", mutates_args=(), device_types="cpu")
def embedding_bag_weights_grad(
    grad: Tensor,
    parts: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
) -> Tensor:
    """Gradient of `embedding_bag` with respect to the weights.

    Args:
        grad: `[batch_size, num_features * dim]`, the gradient of the output.
        parts: the stacked tables, as they were in the lookup.
        ids: `[num_ids]` int32 or int64, as in the lookup.
        offsets: `[num_features * batch_size + 1]`, as in the lookup.
        weights: `[num_ids]`, as in the lookup.
        pooling: `sum`, or `mean`: then the gradient is `g (E_i - out) / sum(w)`, 0 where the weights sum to 0.
        num_features: as in the lookup.
        num_rows: rows of the stack.
        dim: columns of the stack.

    Returns:
        `[num_ids]` of the weights' dtype; 0 for skipped ids and unused capacity.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: offsets that do not lie within the ids.
    """
    check_inputs(parts, ids, offsets, weights, pooling, num_features)
    table = plain_table(parts, num_rows, dim)
    result = torch.zeros_like(weights)
    rows, offsets, used_weights, positions = used_rows(ids, offsets, weights, num_rows)
    if rows.numel() == 0:
        return result
    compute = compute_dtype(table)
    grad_lines = grad.to(compute).reshape(-1, dim)
    line_of_bag = torch.arange(offsets.numel() - 1).view(-1, num_features).t().reshape(-1)
    bags = bag_of_each(offsets)
    lines = line_of_bag[bags]
    dots = torch.empty(rows.numel(), dtype=compute)
    block = max(64, _BLOCK_VALUES // dim)
    for begin in range(0, rows.numel(), block):
        values = table.index_select(0, rows[begin : begin + block]).to(compute)
        torch.linalg.vecdot(
            values, grad_lines.index_select(0, lines[begin : begin + block]), out=dots[begin : begin + block]
        )
    if pooling == "mean":
        scales = bag_scales(offsets, used_weights, compute)
        pooled = torch.zeros_like(scales).index_add_(0, bags, dots * used_weights.to(compute)) * scales
        dots = (dots - pooled[bags]) * scales[bags]
    dots = dots.to(weights.dtype)
    if positions is None:
        result[: dots.numel()] = dots
    else:
        result[positions] = dots
    return result


@embedding_bag_weights_grad.register_fake
def _(
    grad: Tensor,
    parts: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
) -> Tensor:
    check_inputs(parts, ids, offsets, weights, pooling, num_features)
    return torch.empty_like(weights)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.parts, ids, offsets, weights, *ctx.static = inputs
    if any(part.requires_grad for part in ctx.parts):
        raise ValueError(
            "tpurec::embedding_bag: the gradient of a table would be as large as the table; "
            "train it with tpurec.embeddings.FusedEmbeddingBagCollection, or detach it"
        )
    ctx.save_for_backward(ids, offsets, weights)


def _backward(ctx, grad: Tensor) -> tuple:
    ids, offsets, weights = ctx.saved_tensors
    weights_grad = None
    if ctx.needs_input_grad[3]:
        weights_grad = embedding_bag_weights_grad(grad.contiguous(), ctx.parts, ids, offsets, weights, *ctx.static)
    return [None] * len(ctx.parts), None, None, weights_grad, None, None, None, None


embedding_bag.register_autograd(_backward, setup_context=_setup_context)
