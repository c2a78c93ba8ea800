"""Jagged to padded dense and back, and elementwise arithmetic of the two. Plain JAX; these are the specification.

To pad is one gather at `offsets[b] + m`. Back is one gather at `b * M + m`, b being the bag of each position. Where
values are words, a gather would be a step per word: both copy lines instead (`jagged_runs.py`).

Legend: B bags, M places per bag in the dense array, N values (capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels import jagged_runs
from tpurec.kernels.jagged_positions import of_segments, positions, segment_of_positions, take_or

_BAGS_AT_A_TIME = 8192


def jagged_to_padded_dense(values: jax.Array, offsets: jax.Array, max_length: int, padding: float = 0.0) -> jax.Array:
    """Put each bag into a row; what is longer than the row is cut, what is shorter is padded.

    Args:
        values: `[N, ...]`.
        offsets: integers `[B + 1]`, ascending.
        max_length: M.
        padding: value of the places that are left.

    Returns:
        `[B, M, ...]` of the values' dtype.

    >>> jagged_to_padded_dense(jnp.array([5, 3, 7, 1]), jnp.array([0, 1, 4]), 2, -1).tolist()
    [[5, -1], [3, 7]]
    """
    bounds = positions(offsets, values.shape[0])
    place_M = jnp.arange(max_length, dtype=jnp.int32)
    inside_BM = place_M < (bounds[1:] - bounds[:-1])[:, None]
    # A window is max_length / 128 + 2 lines at most, of whatever length the bags are.
    if values.ndim == 1 and values.shape[0] and jagged_runs.pays(1, values.shape[0], values.dtype) and max_length >= 8:
        found_BM = _windows_in_turn(values, bounds[:-1], max_length)
        return jnp.where(inside_BM, found_BM, jnp.array(padding, values.dtype))
    return take_or(values, bounds[:-1, None] + place_M, inside_BM, padding)


def _windows_in_turn(values: jax.Array, begin_B: jax.Array, width: int) -> jax.Array:
    """`jagged_runs.windows`, some bags at a time: the lines of a short window are several times its words."""
    num_bags = begin_B.shape[0]
    if num_bags <= _BAGS_AT_A_TIME:
        return jagged_runs.windows(values, begin_B, width)
    begins = jnp.pad(begin_B, (0, -num_bags % _BAGS_AT_A_TIME)).reshape(-1, _BAGS_AT_A_TIME)
    found = lax.map(lambda begin: jagged_runs.windows(values, begin, width), begins)
    return found.reshape(-1, width)[:num_bags]


def dense_to_jagged(dense: jax.Array, offsets: jax.Array, capacity: int) -> jax.Array:
    """Take the first places of each row as its bag: the inverse of `jagged_to_padded_dense`, and its gradient.

    Args:
        dense: `[B, M, ...]`.
        offsets: integers `[B + 1]`, ascending.
        capacity: N.

    Returns:
        `[N, ...]` of the same dtype: 0 where a bag is longer than M and behind the last bag.
    """
    num_bags, max_length = dense.shape[:2]
    if num_bags == 0 or max_length == 0:
        return jnp.zeros((capacity, *dense.shape[2:]), dense.dtype)
    if dense.ndim == 2 and jagged_runs.pays(num_bags, capacity, dense.dtype):
        bounds = positions(offsets, capacity)
        size_B = jnp.minimum(jnp.diff(bounds), max_length)
        from_B = jnp.arange(num_bags, dtype=jnp.int32) * max_length
        return jagged_runs.copy_runs(dense.reshape(-1), from_B, bounds[:-1], size_B, capacity)
    source_N, inside_N = _places(offsets, capacity, max_length)
    return take_or(dense.reshape(num_bags * max_length, *dense.shape[2:]), source_N, inside_N, 0)


def jagged_dense_add(values: jax.Array, offsets: jax.Array, dense: jax.Array) -> jax.Array:
    """Add to each value its place in a dense array.

    Args:
        values: `[N, ...]`.
        offsets: integers `[B + 1]`, ascending.
        dense: `[B, M, ...]`.

    Returns:
        `[N, ...]`: the value alone where its bag is longer than M and behind the last bag.
    """
    return values + dense_to_jagged(dense, offsets, values.shape[0])


def jagged_dense_multiply(values: jax.Array, offsets: jax.Array, dense: jax.Array) -> jax.Array:
    """Multiply each value by its place in a dense array.

    Args:
        values: `[N, ...]`.
        offsets: integers `[B + 1]`, ascending.
        dense: `[B, M, ...]`.

    Returns:
        `[N, ...]`: 0 where a bag is longer than M and behind the last bag, whatever the value is.
    """
    num_bags, max_length = dense.shape[:2]
    if num_bags == 0 or max_length == 0:
        return jnp.zeros_like(values)
    source_N, inside_N = _places(offsets, values.shape[0], max_length)
    factors = take_or(dense.reshape(num_bags * max_length, *dense.shape[2:]), source_N, inside_N, 0)
    inside = inside_N.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.where(inside, values * factors, jnp.zeros((), values.dtype))


def _places(offsets: jax.Array, num_values: int, max_length: int) -> tuple[jax.Array, jax.Array]:
    """The place of each value in the flat dense array, int32 `[N]`, and whether it has one, bool `[N]`."""
    bag_N, used_N = segment_of_positions(offsets, num_values)
    begin_N = of_segments(positions(offsets[:-1], num_values), offsets, num_values)
    place_N = jnp.arange(num_values, dtype=jnp.int32) - begin_N
    return bag_N * max_length + place_N, used_N & (place_N < max_length)
