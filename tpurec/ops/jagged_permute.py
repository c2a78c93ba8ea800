"""`tpurec::permute_jagged`, `tpurec::invert_permute` and `select_bags`: reordering the segments of a jagged tensor.

The specification is `tpurec/kernels/jagged_permute.py`. The size of the result depends on values that may lie on a
device, so the caller gives a capacity: at least the sum of the permuted lengths, which for a permutation of all rows is
the number of values. On the CPU a capacity that is too small is an error; on a device values that do not fit are
dropped, which shows as lengths that add up to more than the capacity.
"""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_integers, check_offsets, checked_bounds


@torch.library.custom_op("tpurec::permute_jagged", mutates_args=(), device_types="cpu")
def permute_jagged(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, capacity: int
) -> list[Tensor]:
    """Reorder the rows of a jagged tensor; rows may be left out or repeated.

    Args:
        permute: int32 or int64 `[T]`: row t of the result is row `permute[t]`.
        lengths: int32 or int64 `[S]` (one segment a row) or `[S, B]` (B bags a row, as a KeyedJaggedTensor's keys).
        values: `[N, ...]`; what lies behind the sum of the lengths is ignored. Differentiable if floating.
        weights: `[N, ...]` or None. Differentiable.
        capacity: C, first dimension of the results.

    Returns:
        Lengths `[T]` or `[T, B]`, values `[C, ...]` and, if there are any, weights `[C, ...]`, each of its dtype.
        Unused capacity is -1 in signed integers and 0 in anything else.

    Raises:
        ValueError: a shape or dtype that does not fit, or on the CPU a capacity that is too small.
        IndexError: on the CPU: a row that is not there, or lengths that add up to more than there are values. On a
            device the row is empty, and the lengths are cut.
    """
    _check(permute, lengths, values, weights, capacity)
    source, total = _source(permute, lengths, values.shape[0])
    if total > capacity:
        raise ValueError(f"capacity: {capacity}; the permuted lengths add up to {total}")
    results = [lengths.index_select(0, permute)]
    for given in [values] if weights is None else [values, weights]:
        padded = given.new_full((capacity, *given.shape[1:]), padding_of(given.dtype))
        torch.index_select(given, 0, source, out=padded[:total])
        results.append(padded)
    return results


@permute_jagged.register_fake
def _(permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, capacity: int) -> list[Tensor]:
    _check(permute, lengths, values, weights, capacity)
    given = [values] if weights is None else [values, weights]
    new_lengths = lengths.new_empty(permute.shape[0], *lengths.shape[1:])
    return [new_lengths, *(tensor.new_empty(capacity, *tensor.shape[1:]) for tensor in given)]


@torch.library.custom_op("tpurec::permute_jagged_grad", mutates_args=(), device_types="cpu")
def permute_jagged_grad(grad: Tensor, permute: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    """Gradient of `permute_jagged` with respect to values or weights.

    Args:
        grad: floats `[C, ...]`, the gradient of the result.
        permute: as of `permute_jagged`.
        lengths: as of `permute_jagged`.
        num_values: N.

    Returns:
        `[N, ...]`: what repeated rows receive is added up, what was left out receives 0.

    Raises:
        IndexError: as of `permute_jagged`.
    """
    source, total = _source(permute, lengths, num_values)
    return grad.new_zeros(num_values, *grad.shape[1:]).index_add_(0, source, grad[:total])


@permute_jagged_grad.register_fake
def _(grad: Tensor, permute: Tensor, lengths: Tensor, num_values: int) -> Tensor:
    return grad.new_empty(num_values, *grad.shape[1:])


def _setup_context(ctx, inputs: tuple, output: list[Tensor]) -> None:
    permute, lengths, values, weights, _ = inputs
    ctx.save_for_backward(permute, lengths)
    ctx.num_values = values.shape[0]
    ctx.weighted = weights is not None


def _backward(ctx, grads: list[Tensor | None]) -> tuple:
    permute, lengths = ctx.saved_tensors
    found = [None, None]
    for place, grad in enumerate(grads[1:]):
        if grad is not None and ctx.needs_input_grad[2 + place]:
            found[place] = permute_jagged_grad(grad.contiguous(), permute, lengths, ctx.num_values)
    return None, None, *found, None


permute_jagged.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("tpurec::expand_permute", mutates_args=(), device_types="cpu")
def expand_permute(permute: Tensor, in_offsets: Tensor, out_offsets: Tensor, capacity: int) -> Tensor:
    """The source position of every value of a permuted jagged tensor.

    Args:
        permute: int32 or int64 `[T]`.
        in_offsets: int32 or int64 `[S + 1]`, of the given tensor.
        out_offsets: int32 or int64 `[T + 1]`, of the permuted one.
        capacity: C, at least `out_offsets[-1]`.

    Returns:
        `[C]` of the permutation's dtype; what lies behind `out_offsets[-1]` means nothing.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: a row that is not there, or offsets that do not ascend.
    """
    _check_expand(permute, in_offsets, out_offsets)
    outwards = checked_bounds(out_offsets, capacity)
    inwards = checked_bounds(in_offsets, int(in_offsets[-1]))
    _check_rows(permute, in_offsets.shape[0] - 1)
    source = torch.arange(capacity)
    moved, first = source_positions(permute, inwards, outwards), int(outwards[0])
    source[first : first + len(moved)] = moved
    return source.to(permute.dtype)


@expand_permute.register_fake
def _(permute: Tensor, in_offsets: Tensor, out_offsets: Tensor, capacity: int) -> Tensor:
    _check_expand(permute, in_offsets, out_offsets)
    return permute.new_empty(capacity)


@torch.library.custom_op("tpurec::invert_permute", mutates_args=(), device_types="cpu")
def invert_permute(permute: Tensor) -> Tensor:
    """The permutation that undoes another.

    Args:
        permute: int32 or int64 `[T]`, each of 0 to T - 1 once.

    Returns:
        `[T]` of the same dtype.

    Raises:
        ValueError: another dtype or number of dimensions.
        IndexError: on the CPU: no permutation. On a device the result then means nothing.
    """
    check_integers("permute", permute)
    size = permute.shape[0]
    if size and not (int(permute.min()) >= 0 and int(permute.max()) < size and int(permute.bincount().max()) == 1):
        raise IndexError(f"permute: not each of 0 to {size - 1} once")
    return torch.ops.fbgemm.invert_permute(permute.contiguous())


@invert_permute.register_fake
def _(permute: Tensor) -> Tensor:
    check_integers("permute", permute)
    return torch.empty_like(permute)


def select_bags(
    values: Tensor, lengths: Tensor, chosen: Tensor, weights: Tensor | None, batch_size: int, capacity: int
) -> list[Tensor]:
    """Choose the same bags of every key of a feature-major jagged tensor.

    Args:
        values: `[N, ...]`. Differentiable if floating.
        lengths: int32 or int64 `[K * B]`, key after key.
        chosen: int32 or int64 `[I]`: bags of 0 to B - 1, in the order wanted, possibly repeated.
        weights: `[N, ...]` or None. Differentiable.
        batch_size: B.
        capacity: C, at least the sum of the chosen lengths.

    Returns:
        Values `[C, ...]`, lengths `[K * I]` and, if there are any, weights `[C, ...]`.

    Raises:
        ValueError: a shape or dtype that does not fit, or on the CPU a capacity that is too small.
        IndexError: on the CPU: a bag that is not there. On a device it is empty.
    """
    check_integers("chosen", chosen)
    check_integers("lengths", lengths)
    num_keys = lengths.shape[0] // batch_size if batch_size else 0
    if num_keys * batch_size != lengths.shape[0]:
        raise ValueError(f"lengths: {lengths.shape[0]} values are no multiple of batch_size {batch_size}")
    key = torch.arange(num_keys, device=chosen.device, dtype=torch.int64)[:, None] * batch_size
    chosen = chosen.to(torch.int64)
    rows = torch.where((chosen >= 0) & (chosen < batch_size), key + chosen, -1).reshape(-1)
    new_lengths, *rest = permute_jagged(rows, lengths, values, weights, capacity)
    return [rest[0], new_lengths, *rest[1:]]


def padding_of(dtype: torch.dtype) -> int:
    """What fills unused capacity.

    Args:
        dtype: of the values.

    Returns:
        -1 for signed integers, as an id that every lookup skips; 0 for anything else.
    """
    return -1 if dtype in (torch.int8, torch.int16, torch.int32, torch.int64) else 0


def _source(permute: Tensor, lengths: Tensor, num_values: int) -> tuple[Tensor, int]:
    """Source positions of the permuted values, int64, and their number."""
    num_rows = lengths.shape[0]
    _check_rows(permute, num_rows)
    sizes = (lengths if lengths.dim() == 1 else lengths.sum(1)).long()
    used = int(sizes.sum())
    if used > num_values or bool((lengths < 0).any()):
        raise IndexError(f"lengths: add up to {used} (none may be negative); there are {num_values} values")
    cumsum = torch.ops.fbgemm.asynchronous_complete_cumsum
    source = source_positions(permute, cumsum(sizes), cumsum(sizes[permute]))
    return source, len(source)


def source_positions(permute: Tensor, in_offsets: Tensor, out_offsets: Tensor) -> Tensor:
    """Where the values of permuted segments come from, on the CPU. FBGEMM's op for this takes no repeated segments.

    Args:
        permute: int32 or int64 `[T]`, all of them segments that are there.
        in_offsets: int64 `[S + 1]`.
        out_offsets: int64 `[T + 1]`.

    Returns:
        int64 `[out_offsets[-1] - out_offsets[0]]`.
    """
    first, last = int(out_offsets[0]), int(out_offsets[-1])
    shifts = in_offsets[permute.long()] - out_offsets[:-1]
    return torch.arange(first, last) + torch.repeat_interleave(shifts, out_offsets.diff(), output_size=last - first)


def _check_rows(permute: Tensor, num_rows: int) -> None:
    if permute.numel() and not (int(permute.min()) >= 0 and int(permute.max()) < num_rows):
        raise IndexError(f"permute: goes from {int(permute.min())} to {int(permute.max())}; there are {num_rows} rows")


def _check_expand(permute: Tensor, in_offsets: Tensor, out_offsets: Tensor) -> None:
    check_integers("permute", permute)
    check_offsets("in_offsets", in_offsets)
    check_offsets("out_offsets", out_offsets)
    if out_offsets.shape[0] != permute.shape[0] + 1:
        raise ValueError(f"out_offsets: {out_offsets.shape[0]} values; {permute.shape[0] + 1} are expected")


def _check(permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, capacity: int) -> None:
    check_integers("permute", permute)
    check_integers("lengths", lengths, (1, 2))
    if values.dim() < 1:
        raise ValueError(f"values: {values.dtype} []; at least one dimension is expected")
    if weights is not None and (weights.dim() < 1 or weights.shape[0] != values.shape[0]):
        raise ValueError(f"weights: {list(weights.shape)}; there are {values.shape[0]} values")
    if capacity < 0:
        raise ValueError(f"capacity: {capacity}; it cannot be negative")
