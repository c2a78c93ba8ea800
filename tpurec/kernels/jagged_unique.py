"""Each id of a table once, over all features that read the table. Plain JAX; the function is the specification.

Three sorts, as a TensorCore scatters word by word: by table and id, which makes equal ids neighbours; the first of each
run to the front; and back to the order of the ids. Ids of 64 bits are sorted as two words of 32.

Legend: T features, B examples, G groups of features that read one table, N ids (capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels.jagged_positions import of_segments, positions

_LAST = 2**31 - 1  # sorts behind every position


def unique_ids(
    hash_starts: jax.Array, group_offsets: jax.Array, offsets: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Make a jagged array of the distinct ids of every table.

    Args:
        hash_starts: integers `[T + 1]`, ascending: feature t reads the table that begins at `hash_starts[t]`; features
            with the same begin share a table.
        group_offsets: integers `[G + 1]`, ascending from 0 to T: group g is features `group_offsets[g]` to
            `group_offsets[g + 1]`.
        offsets: integers `[T * B + 1]`, feature-major.
        ids: integers `[N]`. What lies in no bag counts as one more id, -1, of a table behind all others.

    Returns:
        Lengths `[T * B]` of the offsets' dtype: a group's distinct ids in equal shares over all its bags, the first
        ones one more; distinct ids `[N]`, ascending within a table, -1 behind them; int64 `[N]`, where each id is among
        them; and how many there are, an int64 scalar.
    """
    num_features, num_ids = hash_starts.shape[0] - 1, ids.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    of_starts = jnp.cumsum(jnp.diff(hash_starts) != 0, dtype=jnp.int32)
    table_T = jnp.append(jnp.zeros(1, jnp.int32), of_starts)  # one more: what begins behind the last feature
    if num_ids == 0:
        return (
            _lengths_of(jnp.zeros(num_features + 2, jnp.int32), table_T, group_offsets, offsets, batch_size),
            ids,
            *(jnp.zeros(shape, jnp.int64) for shape in ((0,), ())),
        )
    bounds = positions(offsets[jnp.array([0, -1])], num_ids)
    position_N = jnp.arange(num_ids, dtype=jnp.int32)
    inside_N = (position_N >= bounds[0]) & (position_N < bounds[1])
    of_features = offsets[jnp.arange(num_features + 1) * batch_size]
    table_N = jnp.where(inside_N, of_segments(table_T[:-1], of_features, num_ids), num_features + 1)
    words = _words(jnp.where(inside_N, ids, -1))
    table_N, *words, order_N = lax.sort((table_N, *words, position_N), num_keys=1 + len(words), is_stable=False)
    differs_N = [jnp.append(jnp.ones(1, bool), jnp.diff(key) != 0) for key in (table_N, *words)]
    first_N = jnp.stack(differs_N).any(axis=0)
    place_N = jnp.cumsum(first_N, dtype=jnp.int32) - 1
    _, *words = lax.sort((jnp.where(first_N, position_N, _LAST), *words), num_keys=1, is_stable=False)
    _, reverse_N = lax.sort((order_N, place_N), num_keys=1, is_stable=False)
    count = place_N[-1] + 1
    # Distinct ids of the tables before each: those that begin before the table's first id.
    begin_N = jnp.searchsorted(table_N, jnp.arange(num_features + 2, dtype=jnp.int32))
    before = jnp.append(jnp.append(jnp.zeros(1, jnp.int32), place_N + 1), count)[begin_N]
    lengths = _lengths_of(before, table_T, group_offsets, offsets, batch_size)
    distinct_N = jnp.where(position_N < count, _joined(words, ids.dtype), jnp.array(-1, ids.dtype))
    return lengths, distinct_N, reverse_N.astype(jnp.int64), count.astype(jnp.int64)


def _words(ids: jax.Array) -> list[jax.Array]:
    """Keys of 32 bits that order as the ids do."""
    if ids.dtype.itemsize < 8:
        return [ids]
    return [(ids >> 32).astype(jnp.int32), ids.astype(jnp.uint32)]


def _joined(words: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    if len(words) == 1:
        return words[0]
    return (words[0].astype(dtype) << 32) | words[1].astype(dtype)


def _lengths_of(
    before: jax.Array, table_T: jax.Array, group_offsets: jax.Array, offsets: jax.Array, batch_size: int
) -> jax.Array:
    """Each group's distinct ids, spread over the bags of its features."""
    num_features = table_T.shape[0] - 1
    ends_G = positions(group_offsets, num_features)
    count_G = jnp.diff(before[table_T[ends_G]])
    slots_G = jnp.maximum(jnp.diff(ends_G) * batch_size, 1)
    of_features = [of_segments(value, ends_G, num_features) for value in (count_G, slots_G, ends_G[:-1])]
    count_T, slots_T, first_T = (jnp.repeat(value, batch_size) for value in of_features)
    slot = jnp.arange(num_features * batch_size, dtype=jnp.int32) - first_T * batch_size
    lengths = count_T // slots_T + (slot < count_T % slots_T)
    in_group = jnp.repeat(jnp.arange(num_features) < ends_G[-1], batch_size)
    return jnp.where(in_group, lengths, 0).astype(offsets.dtype)
