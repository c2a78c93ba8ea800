"""`tpurec::embedding_bag`: pooled lookup in stacked tables, and `tpurec::embedding_bag_weights_grad`.

The specification is `tpurec/kernels/embedding_bag.py`. Bags are feature-major, as in a KeyedJaggedTensor; the output
has one line per example with the features side by side, as in a KeyedTensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpurec.ops.jagged_rows import bag_of_each, bag_scales, check_inputs, mean_weights, used_rows


@torch.library.custom_op("tpurec::embedding_bag", mutates_args=(), device_types="cpu")
def embedding_bag(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    pooling: str = "sum",
    num_features: int = 1,
) -> Tensor:
    """Pool the rows of every bag.

    Args:
        table: `[num_rows, dim]`, float32 or bfloat16; several tables may be stacked in it. It takes no gradient here:
            that would be `[num_rows, dim]`; see `tpurec.embeddings.FusedEmbeddingBagCollection`.
        ids: `[num_ids]` int32 or int64 rows of `table`; negative ids are skipped, with their weights.
        offsets: `[num_features * batch_size + 1]` int32 or int64, ascending; ids behind the last are ignored.
        weights: `[num_ids]` float32, one per id, or None. Differentiable.
        pooling: `sum`, or `mean`: `sum(w E) / sum(w)`, zeros where the weights of a bag sum to 0.
        num_features: how many features the bags belong to, feature after feature.

    Returns:
        `[batch_size, num_features * dim]` of the table's dtype, accumulated in float32; zeros for empty bags.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: an id >= num_rows.
    """
    check_inputs(table, ids, offsets, weights, pooling)
    dim = table.shape[1]
    batch_size = (offsets.numel() - 1) // num_features
    ids, offsets, weights, _ = used_rows(ids, offsets, weights)
    if ids.numel() == 0:
        return table.new_zeros(batch_size, num_features * dim)
    if int(ids.max()) >= table.shape[0]:
        raise IndexError(f"id {int(ids.max())} is outside of the table's {table.shape[0]} rows")
    if weights is not None:
        weights = mean_weights(offsets, weights, table.dtype) if pooling == "mean" else weights.to(table.dtype)
        pooling = "sum"
    out = F.embedding_bag(ids, table, offsets, mode=pooling, per_sample_weights=weights, include_last_offset=True)
    return out.view(num_features, batch_size, dim).transpose(0, 1).reshape(batch_size, num_features * dim)


@embedding_bag.register_fake
def _(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    pooling: str = "sum",
    num_features: int = 1,
) -> Tensor:
    check_inputs(table, ids, offsets, weights, pooling)
    return table.new_empty((offsets.shape[0] - 1) // num_features, num_features * table.shape[1])


@torch.library.custom_op("tpurec::embedding_bag_weights_grad", mutates_args=(), device_types="cpu")
def embedding_bag_weights_grad(
    grad: Tensor,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    pooling: str = "sum",
    num_features: int = 1,
) -> Tensor:
    """Gradient of `embedding_bag` with respect to the weights.

    Args:
        grad: `[batch_size, num_features * dim]`, the gradient of the output.
        table: `[num_rows, dim]`.
        ids: `[num_ids]` int32 or int64, as in the lookup.
        offsets: `[num_features * batch_size + 1]`, as in the lookup.
        weights: `[num_ids]`, as in the lookup.
        pooling: `sum`, or `mean`: then the gradient is `g (E_i - out) / sum(w)`, 0 where the weights sum to 0.
        num_features: as in the lookup.

    Returns:
        `[num_ids]` of the weights' dtype; 0 for skipped ids and unused capacity.
    """
    check_inputs(table, ids, offsets, weights, pooling)
    result = torch.zeros_like(weights)
    rows, offsets, used_weights, positions = used_rows(ids, offsets, weights)
    if rows.numel() == 0:
        return result
    dim = table.shape[1]
    batch_size = (offsets.numel() - 1) // num_features
    grad_bags = grad.view(batch_size, num_features, dim).transpose(0, 1).reshape(-1, dim)
    bags = bag_of_each(offsets)
    dots = (grad_bags[bags] * table[rows]).sum(1)
    if pooling == "mean":
        scales = bag_scales(offsets, used_weights, dots.dtype)
        pooled = torch.zeros_like(scales).index_add_(0, bags, dots * used_weights.to(dots.dtype)) * scales
        dots = (dots - pooled[bags]) * scales[bags]
    result[positions] = dots.to(weights.dtype)
    return result


@embedding_bag_weights_grad.register_fake
def _(
    grad: Tensor,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    pooling: str = "sum",
    num_features: int = 1,
) -> Tensor:
    check_inputs(table, ids, offsets, weights, pooling)
    return torch.empty_like(weights)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    table, ids, offsets, weights, ctx.pooling, ctx.num_features = inputs
    if ctx.needs_input_grad[0]:
        raise ValueError(
            "tpurec::embedding_bag: the gradient of a table would be as large as the table; "
            "train it with tpurec.embeddings.FusedEmbeddingBagCollection, or pass table.detach()"
        )
    ctx.save_for_backward(table, ids, offsets, weights)


def _backward(ctx, grad: Tensor) -> tuple:
    table, ids, offsets, weights = ctx.saved_tensors
    weights_grad = None
    if ctx.needs_input_grad[3]:
        weights_grad = embedding_bag_weights_grad(
            grad.contiguous(), table, ids, offsets, weights, ctx.pooling, ctx.num_features
        )
    return None, None, None, weights_grad, None, None


embedding_bag.register_autograd(_backward, setup_context=_setup_context)
