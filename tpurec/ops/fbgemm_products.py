"""FBGEMM's names for softmax and matrix products of jagged tensors on `tpu` tensors; the rules: `fbgemm_names.py`.

A TPU multiplies dense tiles, so a jagged tensor is padded to its longest bag, multiplied, and made jagged again.
FBGEMM's own autograd puts these together. Arguments and results are those of the FBGEMM op of the same name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.fbgemm_host import check
from tpurec.ops.jagged_dense import dense_to_jagged, jagged_to_padded_dense


def softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """`fbgemm::jagged_softmax_forward`; 0 for values behind `max_L` or in no bag."""
    # -inf, not the least finite number: that is what attention masks are made of, and a bag of nothing else would share
    # its sum with the padding. Bags without values are NaN, but only where nobody looks.
    dense = _padded(values, x_offsets, max_L, -torch.inf)
    return _jagged(dense.softmax(1) if max_L else dense, x_offsets, values.shape[0])


def softmax_gradient(grad_output: Tensor, output: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """`fbgemm::jagged_softmax_backward`."""
    grad, result = _padded(grad_output, x_offsets, max_L), _padded(output, x_offsets, max_L)
    return _jagged(result * (grad - (grad * result).sum(1, keepdim=True)), x_offsets, grad_output.shape[0])


def times_dense(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> Tensor:
    """`fbgemm::jagged_dense_bmm_forward`."""
    bags = x_offsets.shape[0] - 1
    check(
        y.dim() == 3 and y.shape[:2] == (bags, x_values.shape[1]),
        f"jagged_dense_bmm: y {list(y.shape)} for {bags} bags of vectors of {x_values.shape[1]}",
    )
    return _jagged(_padded(x_values, x_offsets, max_L) @ y, x_offsets, x_values.shape[0])


def times_jagged(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """`fbgemm::jagged_jagged_bmm_forward`."""
    check(
        x_values.shape[0] == y_values.shape[0],
        f"jagged_jagged_bmm: {x_values.shape[0]} and {y_values.shape[0]} vectors",
    )
    return _padded(x_values, x_offsets, max_L).transpose(1, 2) @ _padded(y_values, x_offsets, max_L)


def vector_times_jagged(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """`fbgemm::batched_dense_vec_jagged_2d_mul_forward`."""
    heads = _heads(v, a_values, a_offsets)
    if not heads:
        return v.new_zeros(0, a_values.shape[1])
    products = v.view(-1, heads, 1, v.shape[1]) @ _by_head(a_values, a_offsets, v.shape[1], heads)
    return products.view(v.shape[0], a_values.shape[1] // heads)


def vector_times_jagged_gradient(
    grad_output: Tensor, v: Tensor, a_values: Tensor, a_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """`fbgemm::batched_dense_vec_jagged_2d_mul_backward`."""
    heads = _heads(v, a_values, a_offsets)
    if not heads:
        return torch.zeros_like(v), torch.zeros_like(a_values)
    grad = grad_output.reshape(-1, heads, 1, grad_output.shape[1])
    of_v = grad @ _by_head(a_values, a_offsets, v.shape[1], heads).transpose(2, 3)
    of_a = (v.view(-1, heads, v.shape[1], 1) @ grad).transpose(1, 2)
    of_a = of_a.reshape(of_a.shape[0], v.shape[1], a_values.shape[1])
    return of_v.view(v.shape), _jagged(of_a, a_offsets, a_values.shape[0])


def _heads(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> int:
    bags = a_offsets.shape[0] - 1
    heads = v.shape[0] // bags if bags else 0
    check(
        heads * bags == v.shape[0] and (not heads or a_values.shape[1] % heads == 0),
        f"batched_dense_vec_jagged_2d_mul: {v.shape[0]} vectors and {a_values.shape[1]} columns for {bags} bags",
    )
    return heads


def _by_head(a_values: Tensor, a_offsets: Tensor, max_length: int, heads: int) -> Tensor:
    """`[B, heads, max_length, D]`."""
    dense = _padded(a_values, a_offsets, max_length)
    return dense.view(dense.shape[0], max_length, heads, a_values.shape[1] // heads).transpose(1, 2)


def _padded(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    return jagged_to_padded_dense(values.contiguous(), offsets.contiguous(), max_length, padding)


def _jagged(dense: Tensor, offsets: Tensor, num_values: int) -> Tensor:
    return dense_to_jagged(dense.contiguous(), offsets.contiguous(), num_values)
