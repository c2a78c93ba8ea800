"""The lookup whose backward pass is the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.embeddings.stack import TableStack
from tpurec.ops import embedding_bag, embedding_bag_weights_grad, embedding_update_


@dataclass(frozen=True)
class StackedIds:
    """One batch's ids for one stack, as the ops take them.

    Args:
        rows: int32 `[num_ids]`, rows of the stack's storage; -1 is skipped.
        offsets: int32 `[num_features * batch_size + 1]`, feature-major.
        weights: float32 `[num_ids]` or None.
    """

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None


class _FusedLookup(torch.autograd.Function):
    """`hook` is any tensor that requires a gradient, so that backward runs; it gets none.

    Table and state stay on `ctx`, not in `save_for_backward`: they are meant to change in place between forward and
    backward when a step looks a table up twice, which the version check of saved tensors would refuse.
    """

    @staticmethod
    def forward(
        ctx,
        hook: Tensor,
        weights: Tensor | None,
        stack: TableStack,
        ids: StackedIds,
        lr: Tensor,
        optimizer: EmbeddingOptimizer,
    ) -> Tensor:
        ctx.stack, ctx.ids, ctx.lr, ctx.optimizer = stack, ids, lr, optimizer
        return embedding_bag(stack.weight, ids.rows, ids.offsets, weights, stack.pooling, stack.num_features)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        stack, ids, optimizer = ctx.stack, ctx.ids, ctx.optimizer
        weights = None if ids.weights is None else ids.weights.detach()
        grad = grad.contiguous()
        weights_grad = None
        if ctx.needs_input_grad[1]:  # before the update: it reads the rows of the forward pass
            weights_grad = embedding_bag_weights_grad(
                grad, stack.weight, ids.rows, ids.offsets, weights, stack.pooling, stack.num_features
            )
        embedding_update_(
            stack.weight,
            stack.state,
            grad,
            ids.rows,
            ids.offsets,
            weights,
            ctx.lr,
            optimizer.kind,
            optimizer.eps,
            optimizer.weight_decay,
            stack.pooling,
            stack.feature_tables,
        )
        return None, weights_grad, None, None, None, None


def fused_lookup(stack: TableStack, ids: StackedIds, hook: Tensor, lr: Tensor, optimizer: EmbeddingOptimizer) -> Tensor:
    """Look up a batch; its backward pass updates the stack in place.

    Args:
        stack: tables and optimizer state.
        ids: the batch.
        hook: a tensor that requires a gradient if this stack is to be trained.
        lr: learning rate, float32 scalar.
        optimizer: the optimizer's specification.

    Returns:
        `[batch_size, num_features * embedding_dim]` of the storage's dtype.
    """
    return _FusedLookup.apply(hook, ids.weights, stack, ids, lr, optimizer)
