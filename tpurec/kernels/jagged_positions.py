"""Offsets of jagged arrays, and what they say of each position: the ground that the other jagged functions stand on.

A jagged array is `values [N, ...]` with `offsets [S + 1]`: segment s is `values[offsets[s]:offsets[s + 1]]`. Shapes do
not depend on values, so N may be a capacity: what lies behind `offsets[-1]` belongs to no segment. Positions are int32;
lengths and offsets may be int64, whose sizes are cut to the arrays that there are instead of wrapping.

Plain JAX. A value per segment becomes a value per position by adding its changes where segments begin and one
cumulative sum: S scattered words and a pass over N, where a search would be log2(S) gathers of N. Any number of empty
segments may begin at one position, as changes add up.

Legend: S segments, N values (capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def complete_cumsum(lengths: jax.Array) -> jax.Array:
    """Offsets of lengths: the cumulative sum with a 0 in front.

    Args:
        lengths: `[S]`, or `[R, S]` for R arrays of their own.

    Returns:
        `[S + 1]` or `[R, S + 1]` of the same dtype.

    >>> complete_cumsum(jnp.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    zeros = jnp.zeros((*lengths.shape[:-1], 1), lengths.dtype)
    return jnp.concatenate([zeros, jnp.cumsum(lengths, axis=-1, dtype=lengths.dtype)], axis=-1)


def inclusive_cumsum(lengths: jax.Array) -> jax.Array:
    """The cumulative sum over all elements in order.

    Args:
        lengths: any shape.

    Returns:
        The same shape and dtype.
    """
    return jnp.cumsum(lengths.reshape(-1), dtype=lengths.dtype).reshape(lengths.shape)


def exclusive_cumsum(lengths: jax.Array) -> jax.Array:
    """The sum of all elements before each.

    Args:
        lengths: any shape.

    Returns:
        The same shape and dtype.
    """
    return inclusive_cumsum(lengths) - lengths


def positions(offsets: jax.Array, num_values: int) -> jax.Array:
    """Offsets as int32, none of them outside of the array that they point into.

    Args:
        offsets: integers of any shape.
        num_values: N.

    Returns:
        int32 of the same shape, in [0, N].
    """
    return jnp.clip(offsets, 0, num_values).astype(jnp.int32)


def of_segments(value_S: jax.Array, offsets: jax.Array, num_values: int) -> jax.Array:
    """Give every position its segment's value.

    Args:
        value_S: integers `[S]`; exact, as differences that wrap add up again.
        offsets: integers `[S + 1]`, ascending.
        num_values: N.

    Returns:
        `[N]` of the values' dtype: 0 before the first segment; behind the last one, its value.

    >>> of_segments(jnp.array([7, 8, 9]), jnp.array([0, 2, 2, 3]), 4).tolist()
    [7, 7, 9, 9]
    """
    if value_S.dtype.itemsize == 8:
        # Two sums of 32-bit words, each exact as it wraps: libtpu takes minutes to compile a long 64-bit one.
        low = of_segments(value_S.astype(jnp.uint32), offsets, num_values).astype(jnp.uint64)
        high = of_segments((value_S >> 32).astype(jnp.uint32), offsets, num_values).astype(jnp.uint64)
        return (high << jnp.uint64(32) | low).astype(value_S.dtype)
    change_S = jnp.diff(value_S, prepend=jnp.zeros(1, value_S.dtype))
    begin_S = positions(offsets[:-1], num_values)
    change_N = jnp.zeros(num_values, value_S.dtype).at[begin_S].add(change_S, mode="drop")
    return jnp.cumsum(change_N, dtype=value_S.dtype)


def segment_of_positions(offsets: jax.Array, num_values: int) -> tuple[jax.Array, jax.Array]:
    """Which segment each position is in, and whether it is in one.

    Args:
        offsets: integers `[S + 1]`, ascending, S > 0.
        num_values: N.

    Returns:
        int32 `[N]` in [0, S), and bool `[N]`.
    """
    num_segments = offsets.shape[0] - 1
    segment_N = of_segments(jnp.arange(num_segments, dtype=jnp.int32), offsets, num_values)
    position_N = jnp.arange(num_values, dtype=jnp.int32)
    bounds = positions(offsets[jnp.array([0, -1])], num_values)
    return segment_N, (position_N >= bounds[0]) & (position_N < bounds[1])


def offsets_range(offsets: jax.Array, range_size: int) -> jax.Array:
    """Number the values of every segment from 0.

    Args:
        offsets: integers `[S]`, where segments begin, ascending from 0 (an end offset may follow: it numbers what lies
            behind it anew).
        range_size: N.

    Returns:
        `[N]` of the offsets' dtype.

    >>> offsets_range(jnp.array([0, 1, 4]), 6).tolist()
    [0, 0, 1, 2, 0, 1]
    """
    position_N = jnp.arange(range_size, dtype=offsets.dtype)
    if offsets.shape[0] == 0:
        return position_N
    return position_N - of_segments(offsets, jnp.append(offsets, offsets[-1]), range_size)


def take_or(values: jax.Array, source: jax.Array, inside: jax.Array, padding: float) -> jax.Array:
    """Gather along the first dimension, with padding where there is nothing to take.

    Args:
        values: `[N, ...]`.
        source: int32 of any shape.
        inside: bool of the same shape; sources outside of the array are padding in any case.
        padding: for the rest.

    Returns:
        `[*source.shape, ...]` of the values' dtype.
    """
    num_values = values.shape[0]
    shape = (*source.shape, *values.shape[1:])
    if num_values == 0:
        return jnp.full(shape, padding, values.dtype)
    inside = inside & (source >= 0) & (source < num_values)
    # Flat: with indices of several dimensions libtpu fetches a tile for every word.
    taken = jnp.take(values, jnp.clip(source, 0, num_values - 1).reshape(-1), axis=0, mode="clip").reshape(shape)
    return jnp.where(inside.reshape(*source.shape, *(1,) * (values.ndim - 1)), taken, jnp.array(padding, values.dtype))


def padding_of(dtype: jnp.dtype) -> int:
    """What fills unused capacity.

    Args:
        dtype: of the values.

    Returns:
        -1 for signed integers, as an id that every lookup skips; 0 for anything else.
    """
    return -1 if jnp.issubdtype(dtype, jnp.signedinteger) else 0
