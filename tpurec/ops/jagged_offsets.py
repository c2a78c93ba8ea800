"""`tpurec::complete_cumsum`: offsets of lengths, and `tpurec::offsets_range`: places in bags.

The specification is `tpurec/kernels/jagged_positions.py`.
"""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)


@torch.library.custom_op("tpurec::complete_cumsum", mutates_args=(), device_types="cpu")
def complete_cumsum(lengths: Tensor) -> Tensor:
    """Offsets of lengths: the cumulative sum with a 0 in front.

    Args:
        lengths: int32 or int64 `[S]`, or `[R, S]` for R arrays of their own.

    Returns:
        `[S + 1]` or `[R, S + 1]` of the same dtype.

    Raises:
        ValueError: another dtype or number of dimensions.
    """
    _check(lengths)
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.contiguous())


@complete_cumsum.register_fake
def _(lengths: Tensor) -> Tensor:
    _check(lengths)
    return lengths.new_empty(*lengths.shape[:-1], lengths.shape[-1] + 1)


@torch.library.custom_op("tpurec::offsets_range", mutates_args=(), device_types="cpu")
def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """Number the values of every bag from 0.

    Args:
        offsets: int32 or int64 `[B]`, where bags begin, ascending from 0; or `[B + 1]` with the end.
        range_size: N, values of all bags.

    Returns:
        `[N]` of the same dtype.

    Raises:
        ValueError: another dtype or number of dimensions.
        IndexError: on the CPU: offsets that do not ascend from 0 within N.
    """
    check_offsets("offsets", offsets)
    if int(checked_bounds(offsets, range_size)[0]) != 0:
        raise IndexError(f"offsets begin with {int(offsets[0])}; 0 is expected")
    return torch.ops.fbgemm.offsets_range(offsets.contiguous(), range_size)


@offsets_range.register_fake
def _(offsets: Tensor, range_size: int) -> Tensor:
    check_offsets("offsets", offsets)
    return offsets.new_empty(range_size)


def _check(lengths: Tensor) -> None:
    if lengths.dim() not in (1, 2) or lengths.dtype not in INTEGERS:
        found = f"{lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"lengths: {found}; one or two dimensions of int32 or int64 are expected")


def check_integers(name: str, value: Tensor, dims: tuple[int, ...] = (1,)) -> None:
    """Refuse a tensor that is no array of indices; looks at no values.

    Args:
        name: of the argument, for the error.
        value: the tensor.
        dims: numbers of dimensions that are allowed.

    Raises:
        ValueError: naming the argument, its dtype and shape, and what is expected.
    """
    if value.dim() not in dims or value.dtype not in INTEGERS:
        expected = " or ".join(str(dim) for dim in dims)
        raise ValueError(f"{name}: {value.dtype} {list(value.shape)}; {expected} dimension(s) of int32 or int64")


def check_offsets(name: str, offsets: Tensor) -> None:
    """Refuse offsets that are no array of indices, or have no entry; looks at no values.

    Args:
        name: of the argument, for the error.
        offsets: `[S + 1]`.

    Raises:
        ValueError: as of `check_integers`.
    """
    check_integers(name, offsets)
    if offsets.shape[0] == 0:
        raise ValueError(f"{name}: 0 values; segments + 1 are expected")


def checked_bounds(offsets: Tensor, num_values: int) -> Tensor:
    """Offsets on the CPU, whose values can be looked at.

    Args:
        offsets: int32 or int64 `[S + 1]`.
        num_values: of the array that they point into.

    Returns:
        int64 `[S + 1]`.

    Raises:
        IndexError: they do not ascend, or do not lie within the values.
    """
    offsets = offsets.long()
    first, last = int(offsets[0]), int(offsets[-1])
    if not 0 <= first <= last <= num_values or bool((offsets.diff() < 0).any()):
        raise IndexError(f"offsets go from {first} to {last} and must ascend within the {num_values} values")
    return offsets
