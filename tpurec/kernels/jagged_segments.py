"""Sums and means of the segments of a jagged array. Plain JAX; the functions are the specification.

Legend: S segments, N values (capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpurec.kernels.jagged_positions import complete_cumsum, positions, segment_of_positions


def segment_sum(values: jax.Array, offsets: jax.Array) -> jax.Array:
    """Add up every segment.

    Integers are differences of one cumulative sum, exact also where that sum wraps. Floats are added segment by
    segment, as such a difference would lose the digits of small segments behind large ones; bfloat16 and float16 are
    added in float32.

    Args:
        values: `[N, ...]`.
        offsets: integers `[S + 1]`, ascending.

    Returns:
        `[S, ...]` of the values' dtype; 0 for empty segments.

    >>> segment_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2, 3])).tolist()
    [3.0, 0.0, 4.0]
    """
    num_segments, num_values = offsets.shape[0] - 1, values.shape[0]
    if num_segments == 0 or num_values == 0:
        return jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    if values.ndim == 1 and jnp.issubdtype(values.dtype, jnp.integer):
        return jnp.diff(complete_cumsum(values)[positions(offsets, num_values)])
    segment_N, used_N = segment_of_positions(offsets, num_values)
    wide = jnp.promote_types(values.dtype, jnp.float32) if values.dtype.itemsize < 4 else values.dtype
    # What lies before the first segment is added up before it, what lies behind the last one behind it: so targets
    # ascend, and XLA, told so, neither compiles nor runs a sort of them.
    target_N = jnp.where(used_N, segment_N + 1, jnp.where(jnp.arange(num_values) < offsets[0], 0, num_segments + 1))
    sums = jax.ops.segment_sum(values.astype(wide), target_N, num_segments + 2, indices_are_sorted=True)
    return sums[1:-1].astype(values.dtype)


def segment_mean(values: jax.Array, offsets: jax.Array) -> jax.Array:
    """Average every segment.

    Args:
        values: floats `[N, ...]`.
        offsets: integers `[S + 1]`, ascending.

    Returns:
        `[S, ...]` of the values' dtype; 0 for empty segments.
    """
    return _by_length(segment_sum(values, offsets), offsets, values.shape[0])


def segment_gradient(gradient: jax.Array, offsets: jax.Array, num_values: int, mean: bool) -> jax.Array:
    """The gradient of `segment_sum` and `segment_mean`: every value receives its segment's.

    Args:
        gradient: floats `[S, ...]`.
        offsets: integers `[S + 1]`, ascending.
        num_values: N.
        mean: of `segment_mean`.

    Returns:
        `[N, ...]` of the gradient's dtype; 0 for values in no segment.
    """
    if offsets.shape[0] == 1 or num_values == 0:
        return jnp.zeros((num_values, *gradient.shape[1:]), gradient.dtype)
    if mean:
        gradient = _by_length(gradient, offsets, num_values)
    segment_N, used_N = segment_of_positions(offsets, num_values)
    used_N = used_N.reshape(-1, *(1,) * (gradient.ndim - 1))
    return jnp.where(used_N, gradient[segment_N], jnp.zeros((), gradient.dtype))


def _by_length(values: jax.Array, offsets: jax.Array, num_values: int) -> jax.Array:
    lengths = jnp.maximum(jnp.diff(positions(offsets, num_values)), 1).astype(values.dtype)
    return values / lengths.reshape(-1, *(1,) * (values.ndim - 1))
