"""`tpurec::segment_sum` and `tpurec::segment_mean`; the specification is `tpurec/kernels/jagged_segments.py`."""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_offsets, checked_bounds


@torch.library.custom_op("tpurec::segment_sum", mutates_args=(), device_types="cpu")
def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Add up every segment.

    Args:
        values: `[N, ...]`; bfloat16 and float16 are added in float32. Differentiable if floating.
        offsets: int32 or int64 `[S + 1]`, ascending.

    Returns:
        `[S, ...]` of the values' dtype; 0 for empty segments.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the values. On a device they are cut.
    """
    _check(values, offsets)
    offsets = checked_bounds(offsets, values.shape[0])
    if values.dim() == 1 and values.dtype in (torch.float32, torch.int32, torch.int64):
        return torch.ops.fbgemm.segment_sum_csr(1, offsets, values.contiguous())
    first, last = int(offsets[0]), int(offsets[-1])
    wide = torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else values.dtype
    segments = torch.repeat_interleave(offsets.diff(), output_size=last - first)
    sums = values.new_zeros(offsets.shape[0] - 1, *values.shape[1:], dtype=wide)
    return sums.index_add_(0, segments, values[first:last].to(wide)).to(values.dtype)


@segment_sum.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    _check(values, offsets)
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:])


@torch.library.custom_op("tpurec::segment_mean", mutates_args=(), device_types="cpu")
def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Average every segment.

    Args:
        values: floats `[N, ...]`. Differentiable.
        offsets: int32 or int64 `[S + 1]`, ascending.

    Returns:
        `[S, ...]` of the values' dtype; 0 for empty segments.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the values. On a device they are cut.
    """
    _check_floats(values, offsets)
    return segment_sum(values, offsets) / _lengths(offsets, values)


@segment_mean.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    _check_floats(values, offsets)
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:])


@torch.library.custom_op("tpurec::segment_grad", mutates_args=(), device_types="cpu")
def segment_grad(grad: Tensor, offsets: Tensor, num_values: int, mean: bool) -> Tensor:
    """Gradient of `segment_sum` or `segment_mean`: every value receives its segment's.

    Args:
        grad: floats `[S, ...]`.
        offsets: int32 or int64 `[S + 1]`, as in the forward pass.
        num_values: N.
        mean: of `segment_mean`.

    Returns:
        `[N, ...]`; 0 for values in no segment.

    Raises:
        IndexError: on the CPU: offsets that do not ascend within the values.
    """
    bounds = checked_bounds(offsets, num_values)
    first, last = int(bounds[0]), int(bounds[-1])
    grad = grad / _lengths(offsets, grad) if mean else grad
    result = grad.new_zeros(num_values, *grad.shape[1:])
    result[first:last] = torch.repeat_interleave(grad, bounds.diff(), dim=0, output_size=last - first)
    return result


@segment_grad.register_fake
def _(grad: Tensor, offsets: Tensor, num_values: int, mean: bool) -> Tensor:
    return grad.new_empty(num_values, *grad.shape[1:])


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    values, offsets = inputs
    ctx.save_for_backward(offsets)
    ctx.num_values = values.shape[0]


def _backward_sum(ctx, grad: Tensor) -> tuple:
    return segment_grad(grad.contiguous(), *ctx.saved_tensors, ctx.num_values, False), None


def _backward_mean(ctx, grad: Tensor) -> tuple:
    return segment_grad(grad.contiguous(), *ctx.saved_tensors, ctx.num_values, True), None


segment_sum.register_autograd(_backward_sum, setup_context=_setup_context)
segment_mean.register_autograd(_backward_mean, setup_context=_setup_context)


def _lengths(offsets: Tensor, values: Tensor) -> Tensor:
    """Lengths of the segments, at least 1, in the dtype and number of dimensions of what they divide."""
    lengths = offsets.diff().clamp_min(1).to(values.dtype)
    return lengths.view(-1, *(1,) * (values.dim() - 1))


def _check(values: Tensor, offsets: Tensor) -> None:
    check_offsets("offsets", offsets)
    if values.dim() < 1:
        raise ValueError(f"values: {values.dtype} []; at least one dimension is expected")


def _check_floats(values: Tensor, offsets: Tensor) -> None:
    _check(values, offsets)
    if not values.dtype.is_floating_point:
        raise ValueError(f"values: {values.dtype}; a mean needs floats")
