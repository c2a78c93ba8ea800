"""Copies of runs of neighbouring words, by whole lines of 128 words instead of word by word. Plain JAX.

A TensorCore gathers one row at a time, whether the row is a word or a line of 128 words: 8.7 bundles a word, 1.7 a line
(v5e). What jagged ops move are runs. A run is cut at the lines of the result; of each piece the two lines that hold its
words are fetched and shifted to their place, all pieces at once, by a barrel shifter: 7 selects between an array and
itself some words further on. That is at most N / 128 + 2 T pieces of T runs. It pays for runs that are long on average,
which `pays` decides by the shapes.

Legend: T runs, P pieces, N words given, C words of the result, W words of a window.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels.jagged_positions import complete_cumsum, of_segments

LANES = 128
_WORDS_PER_RUN = 64  # below, pieces take more memory than words: two lines each


def pays(num_runs: int, capacity: int, dtype: jnp.dtype) -> bool:
    """Whether runs of a result should be copied by lines.

    Args:
        num_runs: T.
        capacity: C.
        dtype: of the words.

    Returns:
        True for integers of 4 or 8 bytes and float32 in runs of at least 64 on average. float64 is not: its bits cannot
        be had on a TPU.
    """
    dtype = jnp.dtype(dtype)
    word = dtype == jnp.float32 or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4)
    return word and capacity >= LANES and num_runs * _WORDS_PER_RUN <= capacity


def windows(values: jax.Array, begins: jax.Array, width: int) -> jax.Array:
    """A slice of one width from each of many places.

    Args:
        values: `[N]`.
        begins: int32, any shape, in [-128, N].
        width: W.

    Returns:
        `[*begins.shape, W]`: `values[begins[i] + w]`, and anything where there is no such value.

    >>> windows(jnp.arange(300), jnp.array([5, 250]), 3).tolist()
    [[5, 6, 7], [250, 251, 252]]
    """
    num_values, lines_per_window = values.shape[0], (width + 2 * (LANES - 1)) // LANES
    # A line in front, as a run's first line may begin before the values do.
    padded = jnp.pad(values, (LANES, -num_values % LANES + lines_per_window * LANES))
    begin_P = begins.reshape(-1) + LANES
    line_P, shift_P = begin_P // LANES, begin_P % LANES
    line_PK = line_P[:, None] + jnp.arange(lines_per_window, dtype=jnp.int32)
    lines = jnp.take(padded.reshape(-1, LANES), line_PK.reshape(-1), axis=0, mode="clip")
    window = lines.reshape(-1, lines_per_window * LANES)
    for bit in (64, 32, 16, 8, 4, 2, 1):
        kept = width + bit - 1
        window = jnp.where((shift_P & bit)[:, None] != 0, window[:, bit : bit + kept], window[:, :kept])
    return window.reshape(*begins.shape, width)


def copy_runs(values: jax.Array, from_T: jax.Array, to_T: jax.Array, size_T: jax.Array, capacity: int) -> jax.Array:
    """Copy runs that do not overlap in the result.

    Args:
        values: `[N]`.
        from_T: int32 `[T]`: where each run lies, within [0, N).
        to_T: int32 `[T]`: where it goes, ascending.
        size_T: int32 `[T]`: its words, 0 or more; what reaches beyond C is dropped.
        capacity: C.

    Returns:
        `[C]`: 0 where no run went.

    >>> runs = (jnp.array([3, 0]), jnp.array([1, 4]), jnp.array([2, 1]))
    >>> copy_runs(jnp.array([7, 8, 9, 5, 6]), *runs, 6).tolist()
    [0, 5, 6, 0, 7, 0]
    """
    if values.dtype != jnp.float32:
        return _add_up(values, from_T, to_T, size_T, capacity, ascending=True)
    # Pieces of one line are added to one another, and -0.0 + 0.0 would be 0.0: add bits.
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return lax.bitcast_convert_type(_add_up(bits, from_T, to_T, size_T, capacity, ascending=True), values.dtype)


def add_runs(values: jax.Array, from_T: jax.Array, to_T: jax.Array, size_T: jax.Array, capacity: int) -> jax.Array:
    """Add runs up where they overlap in the result.

    Args:
        values: `[N]`.
        from_T: as of `copy_runs`.
        to_T: int32 `[T]` in [0, C], in any order.
        size_T: as of `copy_runs`.
        capacity: C.

    Returns:
        `[C]`: 0 where no run went.
    """
    return _add_up(values, from_T, to_T, size_T, capacity, ascending=False)


def _add_up(
    values: jax.Array, from_T: jax.Array, to_T: jax.Array, size_T: jax.Array, capacity: int, ascending: bool
) -> jax.Array:
    num_lines, num_runs = -(-capacity // LANES), from_T.shape[0]
    size_T = jnp.clip(size_T, 0, jnp.maximum(capacity - to_T, 0))
    first_T = to_T // LANES
    pieces_T = jnp.where(size_T > 0, (to_T + size_T - 1) // LANES - first_T + 1, 0)
    pieces = complete_cumsum(pieces_T)
    # Runs that do not overlap fill C words at most; others may be repeated up to the size of `values`.
    num_pieces = -(-max(capacity if ascending else values.shape[0], 1) // LANES) + 2 * num_runs

    def of_pieces(value_T: jax.Array) -> jax.Array:
        return of_segments(value_T, pieces, num_pieces)

    piece_P = jnp.arange(num_pieces, dtype=jnp.int32)
    line_P = of_pieces(first_T - pieces[:-1]) + piece_P
    begin_P, end_P, shift_P = of_pieces(to_T), of_pieces(to_T + size_T), of_pieces(from_T - to_T)
    there_P = piece_P < pieces[-1]
    word_PW = line_P[:, None] * LANES + jnp.arange(LANES, dtype=jnp.int32)
    mine_PW = there_P[:, None] & (word_PW >= begin_P[:, None]) & (word_PW < end_P[:, None])
    source_P = jnp.where(there_P, line_P * LANES + shift_P, 0)
    moved_PW = jnp.where(mine_PW, windows(values, source_P, LANES), jnp.zeros((), values.dtype))
    nowhere_P = jnp.where(there_P, line_P, num_lines)
    lines = jnp.zeros((num_lines, LANES), values.dtype)
    return lines.at[nowhere_P].add(moved_PW, mode="drop", indices_are_sorted=ascending).reshape(-1)[:capacity]
