"""Jagged to padded dense and back, and elementwise arithmetic of the two, as `tpurec::` ops.

The specification is `tpurec/kernels/jagged_dense.py`. Offsets are those of one jagged dimension; on the CPU offsets
that do not ascend within the values are an error, on a device they are cut.
"""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_offsets, checked_bounds


@torch.library.custom_op("tpurec::jagged_to_padded_dense", mutates_args=(), device_types="cpu")
def jagged_to_padded_dense(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """Put each bag into a row; what is longer than the row is cut, what is shorter is padded.

    Args:
        values: `[N, ...]`. Differentiable if floating: what is cut receives 0.
        offsets: int32 or int64 `[B + 1]`, ascending.
        max_length: M.
        padding: value of the places that are left.

    Returns:
        `[B, M, ...]` of the values' dtype.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the values.
    """
    _check_padded(values, offsets, max_length)
    offsets = checked_bounds(offsets, values.shape[0])
    num_bags, trailing = offsets.shape[0] - 1, values.shape[1:]
    flat = values.reshape(values.shape[0], trailing.numel()).contiguous()
    if values.dtype != torch.float64:
        dense = torch.ops.fbgemm.jagged_to_padded_dense_forward(flat, [offsets], [max_length], padding)
    else:  # FBGEMM's CPU kernels have no float64
        dense = flat.new_full((num_bags * max_length, flat.shape[1]), padding)
        positions, places = _places(offsets, max_length)
        dense[places] = flat[positions]
    return dense.reshape(num_bags, max_length, *trailing)


@jagged_to_padded_dense.register_fake
def _(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    _check_padded(values, offsets, max_length)
    return values.new_empty(offsets.shape[0] - 1, max_length, *values.shape[1:])


@torch.library.custom_op("tpurec::dense_to_jagged", mutates_args=(), device_types="cpu")
def dense_to_jagged(dense: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Take the first places of each row as its bag.

    Args:
        dense: `[B, M, ...]`. Differentiable if floating.
        offsets: int32 or int64 `[B + 1]`, ascending.
        capacity: N, at least `offsets[-1]`.

    Returns:
        `[N, ...]` of the same dtype: 0 where a bag is longer than M and behind the last bag.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the capacity.
    """
    _check_dense(dense, offsets)
    offsets = checked_bounds(offsets, capacity)
    num_bags, max_length, *trailing = dense.shape
    flat = dense.reshape(num_bags, max_length, dense.shape[2:].numel()).contiguous()
    jagged = flat.new_zeros(capacity, flat.shape[2])
    if num_bags == 0 or max_length == 0:
        return jagged.reshape(capacity, *trailing)
    if dense.dtype != torch.float64 and int(offsets[0]) == 0:
        used = int(offsets[-1])
        jagged[:used] = torch.ops.fbgemm.dense_to_jagged_forward(flat, [offsets], used)
    else:  # FBGEMM's CPU kernels have no float64
        positions, places = _places(offsets, max_length)
        jagged[positions] = flat.view(num_bags * max_length, flat.shape[2])[places]
    return jagged.reshape(capacity, *trailing)


@dense_to_jagged.register_fake
def _(dense: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    _check_dense(dense, offsets)
    return dense.new_empty(capacity, *dense.shape[2:])


@torch.library.custom_op("tpurec::jagged_dense_add", mutates_args=(), device_types="cpu")
def jagged_dense_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Add to each value its place in a dense tensor.

    Args:
        values: `[N, ...]`. Differentiable if floating.
        offsets: int32 or int64 `[B + 1]`, ascending.
        dense: `[B, M, ...]` of the same dtype. Differentiable if floating.

    Returns:
        `[N, ...]`: the value alone where its bag is longer than M and behind the last bag.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the values.
    """
    _check_both(values, offsets, dense)
    return values + dense_to_jagged(dense, offsets, values.shape[0])


@torch.library.custom_op("tpurec::jagged_dense_multiply", mutates_args=(), device_types="cpu")
def jagged_dense_multiply(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Multiply each value by its place in a dense tensor.

    Args:
        values: `[N, ...]`. Differentiable if floating.
        offsets: int32 or int64 `[B + 1]`, ascending.
        dense: `[B, M, ...]` of the same dtype. Differentiable if floating.

    Returns:
        `[N, ...]`: 0 where a bag is longer than M and behind the last bag, whatever the value is.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the values.
    """
    _check_both(values, offsets, dense)
    bounds = checked_bounds(offsets, values.shape[0])
    product = torch.zeros_like(values, memory_format=torch.contiguous_format)
    positions, places = _places(bounds, dense.shape[1])
    product[positions] = values[positions] * dense.reshape(-1, *dense.shape[2:])[places]
    return product


@jagged_dense_add.register_fake
def _(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    _check_both(values, offsets, dense)
    return torch.empty_like(values, memory_format=torch.contiguous_format)


@jagged_dense_multiply.register_fake
def _(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    _check_both(values, offsets, dense)
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _setup_padded(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_values = inputs[0].shape[0]


def _backward_padded(ctx, grad: Tensor) -> tuple:
    (offsets,) = ctx.saved_tensors
    return dense_to_jagged(grad.contiguous(), offsets, ctx.num_values), None, None, None


def _setup_jagged(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.max_length = inputs[0].shape[1]


def _backward_jagged(ctx, grad: Tensor) -> tuple:
    (offsets,) = ctx.saved_tensors
    return jagged_to_padded_dense(grad.contiguous(), offsets, ctx.max_length), None, None


def _backward_add(ctx, grad: Tensor) -> tuple:
    (offsets,) = ctx.saved_tensors
    dense_grad = None
    if ctx.needs_input_grad[2]:
        dense_grad = jagged_to_padded_dense(grad.contiguous(), offsets, ctx.max_length)
    return grad, None, dense_grad


def _setup_add(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.max_length = inputs[2].shape[1]


def _setup_multiply(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_multiply(ctx, grad: Tensor) -> tuple:
    values, offsets, dense = ctx.saved_tensors
    values_grad = dense_grad = None
    if ctx.needs_input_grad[0]:
        values_grad = jagged_dense_multiply(grad.contiguous(), offsets, dense)
    if ctx.needs_input_grad[2]:
        dense_grad = jagged_to_padded_dense((grad * values).contiguous(), offsets, dense.shape[1])
    return values_grad, None, dense_grad


jagged_to_padded_dense.register_autograd(_backward_padded, setup_context=_setup_padded)
dense_to_jagged.register_autograd(_backward_jagged, setup_context=_setup_jagged)
jagged_dense_add.register_autograd(_backward_add, setup_context=_setup_add)
jagged_dense_multiply.register_autograd(_backward_multiply, setup_context=_setup_multiply)


def _places(offsets: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Positions of the values that have a place in a dense tensor `[B, M]`, and those places, counted through it."""
    first, last = int(offsets[0]), int(offsets[-1])
    bags = torch.repeat_interleave(offsets.diff(), output_size=last - first)
    places = torch.arange(first, last) - offsets[bags]
    fits = (places < max_length).nonzero().squeeze(1)
    return fits + first, bags[fits] * max_length + places[fits]


def _check_padded(values: Tensor, offsets: Tensor, max_length: int) -> None:
    check_offsets("offsets", offsets)
    if values.dim() < 1 or max_length < 0:
        raise ValueError(
            f"values: {list(values.shape)}, max_length: {max_length}; [N, ...] and at least 0 are expected"
        )


def _check_dense(dense: Tensor, offsets: Tensor) -> None:
    check_offsets("offsets", offsets)
    if dense.dim() < 2 or dense.shape[0] != offsets.shape[0] - 1:
        raise ValueError(f"dense: {list(dense.shape)}; [{offsets.shape[0] - 1}, M, ...] is expected")


def _check_both(values: Tensor, offsets: Tensor, dense: Tensor) -> None:
    _check_dense(dense, offsets)
    if values.dim() < 1 or values.dtype != dense.dtype or values.shape[1:] != dense.shape[2:]:
        found = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"values: {found}; {dense.dtype} [N, {list(dense.shape[2:])}] is expected, as dense has")
