"""The keys of pooled embeddings in another order: `tpurec::permute_pooled` by tensors, `regroup` by numbers.

The specification is `tpurec/kernels/pooled_permute.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_integers, check_offsets, checked_bounds, complete_cumsum
from tpurec.ops.jagged_permute import source_positions


@torch.library.custom_op("tpurec::permute_pooled", mutates_args=(), device_types="cpu")
def permute_pooled(pooled: Tensor, offsets: Tensor, permute: Tensor, num_columns: int) -> Tensor:
    """Reorder the keys of pooled embeddings.

    Args:
        pooled: `[B, D]`. Differentiable if floating.
        offsets: int32 or int64 `[K + 1]`: the columns of key k are `offsets[k]` to `offsets[k + 1]`.
        permute: int32 or int64 `[T]`: key t of the result is key `permute[t]`; keys may repeat.
        num_columns: columns of the result, D for a permutation of all keys.

    Returns:
        `[B, num_columns]`; 0 in columns that no key fills.

    Raises:
        ValueError: a shape or dtype that does not fit, or on the CPU a number of columns that is too small.
        IndexError: on the CPU: a key or a column that is not there.
    """
    _check(pooled, offsets, permute)
    source, total = _source(offsets, permute, pooled.shape[1])
    if total > num_columns:
        raise ValueError(f"num_columns: {num_columns}; the permuted keys have {total}")
    permuted = pooled.new_zeros(pooled.shape[0], num_columns)
    permuted[:, :total] = pooled.index_select(1, source)
    return permuted


@permute_pooled.register_fake
def _(pooled: Tensor, offsets: Tensor, permute: Tensor, num_columns: int) -> Tensor:
    _check(pooled, offsets, permute)
    return pooled.new_empty(pooled.shape[0], num_columns)


@torch.library.custom_op("tpurec::permute_pooled_grad", mutates_args=(), device_types="cpu")
def permute_pooled_grad(grad: Tensor, offsets: Tensor, permute: Tensor, num_columns: int) -> Tensor:
    """Gradient of `permute_pooled`; what repeated keys receive is added up.

    Args:
        grad: `[B, columns of the result]`.
        offsets: as of `permute_pooled`.
        permute: as of `permute_pooled`.
        num_columns: D, columns of what was permuted.

    Returns:
        `[B, D]`.

    Raises:
        IndexError: as of `permute_pooled`.
    """
    source, total = _source(offsets, permute, num_columns)
    return grad.new_zeros(grad.shape[0], num_columns).index_add_(1, source, grad[:, :total])


@permute_pooled_grad.register_fake
def _(grad: Tensor, offsets: Tensor, permute: Tensor, num_columns: int) -> Tensor:
    return grad.new_empty(grad.shape[0], num_columns)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    pooled, offsets, permute, _ = inputs
    ctx.save_for_backward(offsets, permute)
    ctx.num_columns = pooled.shape[1]


def _backward(ctx, grad: Tensor) -> tuple:
    return permute_pooled_grad(grad.contiguous(), *ctx.saved_tensors, ctx.num_columns), None, None, None


permute_pooled.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("tpurec::permute_multi", mutates_args=(), device_types="cpu")
def permute_multi(pooled: list[Tensor], permutes: Tensor, out_lengths: list[int], reverse: bool) -> list[Tensor]:
    """Move columns between several tensors by FBGEMM's list of moves, as `fbgemm::kt_regroup_arguments` makes it.

    Args:
        pooled: tensors `[B, D_i]`; with `reverse`, gradients of the results.
        permutes: int32 `[P, 6]`: input, output, first column in either, number of columns, link between duplicates.
        out_lengths: columns of each result.
        reverse: exchange input and output and add up what several moves bring: the gradient.

    Returns:
        Tensors `[B, out_lengths[i]]`.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    _check_multi(pooled, permutes)
    results = [pooled[0].new_zeros(pooled[0].shape[0], width) for width in out_lengths]
    for source, target, begin, to, size, _ in permutes.tolist():
        if reverse:
            results[source][:, begin : begin + size] += pooled[target][:, to : to + size]
        else:
            results[target][:, to : to + size] = pooled[source][:, begin : begin + size]
    return results


@permute_multi.register_fake
def _(pooled: list[Tensor], permutes: Tensor, out_lengths: list[int], reverse: bool) -> list[Tensor]:
    _check_multi(pooled, permutes)
    return [pooled[0].new_empty(pooled[0].shape[0], width) for width in out_lengths]


def _check_multi(pooled: list[Tensor], permutes: Tensor) -> None:
    check_integers("permutes", permutes, (2,))
    if not pooled or any(tensor.dim() != 2 or tensor.shape[0] != pooled[0].shape[0] for tensor in pooled):
        raise ValueError(f"pooled: {[list(tensor.shape) for tensor in pooled]}; [B, D_i] with one B is expected")
    if permutes.shape[1] != 6:
        raise ValueError(f"permutes: {list(permutes.shape)}; [P, 6] is expected")


def _setup_multi(ctx, inputs: tuple, output: list[Tensor]) -> None:
    pooled, permutes, _, ctx.reverse = inputs
    ctx.save_for_backward(permutes)
    ctx.widths = [tensor.shape[1] for tensor in pooled]
    ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in output]


def _backward_multi(ctx, grads: list[Tensor | None]) -> tuple:
    (permutes,) = ctx.saved_tensors
    given = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
        for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=True)
    ]
    return permute_multi(given, permutes, ctx.widths, not ctx.reverse), None, None, None


permute_multi.register_autograd(_backward_multi, setup_context=_setup_multi)


def regroup(pooled: Sequence[Tensor], dims: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """Put the keys of several pooled tensors side by side in groups; order and dims are known, so these are slices.

    Args:
        pooled: tensors `[B, D_i]`. Differentiable if floating.
        dims: of each tensor, columns of each of its keys.
        groups: of each result, its keys, counted through all tensors; keys may repeat and be left out.

    Returns:
        A tensor `[B, sum of its dims]` for each group.

    Raises:
        ValueError: dims that do not add up to a tensor's columns.
    """
    for place, (tensor, of_tensor) in enumerate(zip(pooled, dims, strict=True)):
        if tensor.dim() != 2 or tensor.shape[1] != sum(of_tensor):
            raise ValueError(f"pooled[{place}]: {list(tensor.shape)}; its dims add up to {sum(of_tensor)}")
    keys = [piece for tensor, of_tensor in zip(pooled, dims, strict=True) for piece in tensor.split(list(of_tensor), 1)]
    empty = pooled[0].new_zeros(pooled[0].shape[0], 0)
    return [torch.cat([keys[key] for key in group], 1) if group else empty for group in groups]


def _source(offsets: Tensor, permute: Tensor, num_columns: int) -> tuple[Tensor, int]:
    """The column that each column of the result comes from, int64, and their number."""
    bounds = checked_bounds(offsets, num_columns)
    num_keys = bounds.shape[0] - 1
    if permute.numel() and not (int(permute.min()) >= 0 and int(permute.max()) < num_keys):
        raise IndexError(f"permute: goes from {int(permute.min())} to {int(permute.max())}; there are {num_keys} keys")
    source = source_positions(permute, bounds, complete_cumsum(bounds.diff()[permute.long()]))
    return source, len(source)


def _check(pooled: Tensor, offsets: Tensor, permute: Tensor) -> None:
    check_offsets("offsets", offsets)
    check_integers("permute", permute)
    if pooled.dim() != 2:
        raise ValueError(f"pooled: {list(pooled.shape)}; [B, D] is expected")
