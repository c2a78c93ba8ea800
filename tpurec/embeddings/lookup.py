"""The lookup whose backward pass is the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpurec.embeddings.device_checks import GRADIENT, POOLED, DeviceChecks
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
        frozen: Sequence[int],
        checks: tuple[DeviceChecks, int] | None,
    ) -> Tensor:
        ctx.stack, ctx.ids, ctx.lr, ctx.frozen, ctx.checks = stack, ids, lr, frozen, checks
        return embedding_bag(stack.parts, ids.rows, ids.offsets, weights, *_shape(stack))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        stack, ids, optimizer = ctx.stack, ctx.ids, ctx.stack.optimizer
        weights = None if ids.weights is None else ids.weights.detach()
        grad = grad.contiguous()
        weights_grad = None
        if ctx.needs_input_grad[1]:  # before the update: it reads the rows of the forward pass
            weights_grad = embedding_bag_weights_grad(grad, stack.parts, ids.rows, ids.offsets, weights, *_shape(stack))
        rows = ids.rows
        for table in ctx.frozen:
            first, last = stack.row_starts[table], stack.row_starts[table + 1]
            rows = torch.where((rows >= first) & (rows < last), -1, rows)
        if ctx.checks is not None:
            checks, number = ctx.checks
            checks.check_vectors(GRADIENT, grad, stack, number)
            rows = checks.allowed(rows)
        embedding_update_(
            stack.parts,
            stack.state,
            grad,
            rows,
            ids.offsets,
            weights,
            ctx.lr,
            optimizer.kind,
            optimizer.eps,
            optimizer.weight_decay,
            stack.pooling,
            stack.feature_tables,
            stack.num_rows,
            stack.dim,
            **optimizer.arguments(),
        )
        return None, weights_grad, None, None, None, None, None


def _shape(stack: TableStack) -> tuple[str, int, int, int]:
    return stack.pooling, stack.num_features, stack.num_rows, stack.dim


def fused_lookup(
    stack: TableStack,
    ids: StackedIds,
    hook: Tensor,
    lr: Tensor,
    frozen: Sequence[int] = (),
    checks: tuple[DeviceChecks, int] | None = None,
) -> Tensor:
    """Look up a batch; its backward pass updates the stack in place.

    Args:
        stack: tables and optimizer state.
        ids: the batch.
        hook: a tensor that requires a gradient if this stack is to be trained.
        lr: learning rate, float32 scalar.
        frozen: numbers of the tables that are not to change.
        checks: what checks the vectors and their gradients, and the number of the stack there; None for no checks.

    Returns:
        `[batch_size, num_features * dim]` float32 (float64 for float64 tables).
    """
    pooled = _FusedLookup.apply(hook, ids.weights, stack, ids, lr, frozen, checks)
    if checks is not None:
        checks[0].check_vectors(POOLED, pooled, stack, checks[1])
    return pooled
