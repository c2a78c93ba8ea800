"""Stochastic rounding of float32 to bfloat16 from a counter: no generator's state, the same bits on every backend.

A value between two neighbours of bfloat16 becomes the upper one with the probability of its place between them, so the
mean of many roundings is the value itself, where rounding to nearest would lose every step below half a unit. Which one
it becomes is a hash of (seed, step, row, column), so a run can be repeated and resumed to the bit.

The functions are written with operators only and take uint32 arrays of NumPy and of JAX alike (not scalars: NumPy warns
when a scalar wraps around).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _mixed(x: Any) -> Any:
    """A bijection of 32 bits in which every input bit flips about half of the output bits.

    Constants: "lowbias32", C. Wellons, https://nullprogram.com/blog/2018/07/31/.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise(seed_1: Any, step_1: Any, rows_U: Any, columns_D: Any) -> Any:
    """16 random bits for every element.

    Args:
        seed_1: uint32 `[1]`.
        step_1: uint32 `[1]`, the number of the update.
        rows_U: uint32 `[U]`, numbers of the rows in their storage.
        columns_D: uint32 `[D]`, numbers of the columns.

    Returns:
        uint32 `[U, D]`, uniform in 0 to 65535.
    """
    of_rows = _mixed(_mixed(_mixed(seed_1) ^ step_1) ^ rows_U)
    return _mixed(of_rows[:, None] ^ _mixed(columns_D ^ np.uint32(0x9E3779B9))[None, :]) >> np.uint32(16)


def truncated_to_bfloat16(bits: Any, noise: Any) -> Any:
    """Add noise below the last place of bfloat16 and cut off what lies there.

    Args:
        bits: uint32, of finite float32 values.
        noise: uint32, 0 to 65535, same shape.

    Returns:
        uint32, bits of float32 values that bfloat16 holds exactly.
    """
    return (bits + noise) & np.uint32(0xFFFF0000)
