"""Reordering the segments of a jagged array: permute, invert, select. Plain JAX; the functions are the specification.

Segments are whole rows of `lengths`: permuting 26 keys of 4,096 bags each moves 26 segments, not 106,496. Few and long
ones are copied by lines (`jagged_runs.py`). Otherwise a permuted array is one gather of words: source position =
position + (where its segment was - where it now begins), and that shift is constant in a segment.

Legend: S rows of lengths, B bags per row, T rows of the result, N values, C capacity of the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels import jagged_runs
from tpurec.kernels.jagged_positions import complete_cumsum, of_segments, padding_of, positions, take_or

_MOST = 2.0**31 - 2.0**25  # int32 less what a sum of float32 may be wrong by


def permute_jagged(
    permute_T: jax.Array, lengths: jax.Array, values: jax.Array, weights: jax.Array | None, capacity: int
) -> list[jax.Array]:
    """Reorder the rows of a jagged array; rows may be left out or repeated.

    Args:
        permute_T: integers `[T]`: row t of the result is row `permute_T[t]`; what is no row gives an empty one.
        lengths: integers `[S]` (one segment a row) or `[S, B]` (B bags a row).
        values: `[N, ...]`; what lies behind the sum of the lengths is ignored.
        weights: `[N, ...]` or None.
        capacity: C; values that do not fit are dropped, which shows as lengths that add up to more than C.

    Returns:
        Lengths `[T]` or `[T, B]`, values `[C, ...]` and, if there are any, weights `[C, ...]`, each of its dtype;
        unused capacity is -1 in signed integers, 0 in anything else.
    """
    chosen_T, valid_T = _chosen(permute_T, lengths.shape[0])
    new_lengths = _rows(lengths, chosen_T, valid_T)
    num_values, given = values.shape[0], [values] if weights is None else [values, weights]
    if not all(_in_lines(array, permute_T.shape[0], capacity) for array in given):
        source_C, inside_C = source_positions(permute_T, lengths, num_values, capacity)
        return [new_lengths, *(take_or(array, source_C, inside_C, padding_of(array.dtype)) for array in given)]
    begin_T, offsets = _runs(permute_T, lengths, num_values, capacity)
    filled_C = jnp.arange(capacity, dtype=jnp.int32) < offsets[-1]
    moved = [jagged_runs.copy_runs(array, begin_T, offsets[:-1], jnp.diff(offsets), capacity) for array in given]
    paddings = [jnp.array(padding_of(array.dtype), array.dtype) for array in given]
    return [new_lengths, *(jnp.where(filled_C, *pair) for pair in zip(moved, paddings, strict=True))]


def _in_lines(array: jax.Array, num_runs: int, capacity: int) -> bool:
    return array.ndim == 1 and array.shape[0] > 0 and jagged_runs.pays(num_runs, capacity, array.dtype)


def source_positions(
    permute_T: jax.Array, lengths: jax.Array, num_values: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Where each value of a permuted jagged array comes from.

    Args:
        permute_T: as of `permute_jagged`.
        lengths: as of `permute_jagged`.
        num_values: N.
        capacity: C.

    Returns:
        int32 `[C]`, and bool `[C]`: whether there is a value.
    """
    begin_T, offsets = _runs(permute_T, lengths, num_values, capacity)
    position_C = jnp.arange(capacity, dtype=jnp.int32)
    source_C = position_C + of_segments(begin_T - offsets[:-1], offsets, capacity)
    return source_C, position_C < offsets[-1]


def _runs(permute_T: jax.Array, lengths: jax.Array, num_values: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Where each row of a permuted array comes from, int32 `[T]`, and its offsets, int32 `[T + 1]`, within C."""
    begins, sizes = _row_bounds(lengths, num_values)
    chosen_T, valid_T = _chosen(permute_T, lengths.shape[0])
    size_T = jnp.minimum(_rows(sizes, chosen_T, valid_T), capacity)
    # Repeated rows may add up to more than int32 holds: stop at the capacity instead of wrapping. Where that is so, a
    # sum of floats knows, good to a thousandth; it compiles in a tenth of the time of a scan that saturates.
    large_T = jnp.cumsum(size_T.astype(jnp.float32)) > _MOST
    end_T = jnp.where(large_T, capacity, jnp.minimum(jnp.cumsum(size_T, dtype=jnp.int32), capacity))
    offsets = jnp.append(jnp.zeros(1, jnp.int32), end_T)
    return _rows(begins, chosen_T, valid_T), offsets


def permute_jagged_gradient(
    gradient: jax.Array, permute_T: jax.Array, lengths: jax.Array, num_values: int
) -> jax.Array:
    """The gradient of `permute_jagged` with respect to values or weights: what repeated rows receive adds up.

    Args:
        gradient: floats `[C, ...]`.
        permute_T: as of `permute_jagged`.
        lengths: as of `permute_jagged`.
        num_values: N.

    Returns:
        `[N, ...]` of the gradient's dtype; 0 for what was left out.
    """
    if _in_lines(gradient, permute_T.shape[0], min(gradient.shape[0], num_values)):
        begin_T, offsets = _runs(permute_T, lengths, num_values, gradient.shape[0])
        return jagged_runs.add_runs(gradient, offsets[:-1], begin_T, jnp.diff(offsets), num_values)
    source_C, inside_C = source_positions(permute_T, lengths, num_values, gradient.shape[0])
    target_C = jnp.where(inside_C, source_C, num_values)
    zeros = jnp.zeros((num_values, *gradient.shape[1:]), gradient.dtype)
    return zeros.at[target_C].add(gradient, mode="drop")


def expand_permute(permute_T: jax.Array, in_offsets: jax.Array, out_offsets: jax.Array, capacity: int) -> jax.Array:
    """The source position of every value, of offsets that are there already.

    Args:
        permute_T: integers `[T]`.
        in_offsets: integers `[S + 1]` of the given array.
        out_offsets: integers `[T + 1]` of the permuted one.
        capacity: C.

    Returns:
        `[C]` of the permutation's dtype.
    """
    chosen_T, valid_T = _chosen(permute_T, in_offsets.shape[0] - 1)
    shift_T = _rows(in_offsets, chosen_T, valid_T).astype(jnp.int32) - out_offsets[:-1].astype(jnp.int32)
    source_C = jnp.arange(capacity, dtype=jnp.int32) + of_segments(shift_T, out_offsets, capacity)
    return source_C.astype(permute_T.dtype)


def invert_permute(permute_T: jax.Array) -> jax.Array:
    """The permutation that undoes another; sorted, as a TensorCore scatters word by word.

    Args:
        permute_T: integers `[T]`, each of 0 to T - 1 once.

    Returns:
        `[T]` of the same dtype.
    """
    place_T = jnp.arange(permute_T.shape[0], dtype=permute_T.dtype)
    return lax.sort((permute_T, place_T), num_keys=1, is_stable=False)[1]


def select_bags(
    values: jax.Array,
    lengths: jax.Array,
    chosen_I: jax.Array,
    weights: jax.Array | None,
    batch_size: int,
    capacity: int,
) -> list[jax.Array]:
    """Choose the same bags of every key of a feature-major jagged array.

    Args:
        values: `[N, ...]`.
        lengths: integers `[K * B]`, key after key.
        chosen_I: integers `[I]`: bags to take; repeated ones are, bags that are not there are empty.
        weights: `[N, ...]` or None.
        batch_size: B.
        capacity: C.

    Returns:
        Values `[C, ...]`, lengths `[K * I]` and, if there are any, weights `[C, ...]`.
    """
    rows_KI = bags_of_keys(chosen_I, lengths.shape[0], batch_size)
    new_lengths, new_values, *new_weights = permute_jagged(rows_KI, lengths, values, weights, capacity)
    return [new_values, new_lengths, *new_weights]


def bags_of_keys(chosen_I: jax.Array, num_bags: int, batch_size: int) -> jax.Array:
    """Bags within a key to bags of all keys.

    Args:
        chosen_I: integers `[I]`.
        num_bags: K * B.
        batch_size: B.

    Returns:
        int32 `[K * I]`; -1 for a bag that is not there.
    """
    num_keys = num_bags // batch_size if batch_size else 0
    key_K = jnp.arange(num_keys, dtype=jnp.int32)[:, None] * batch_size
    there_I = (chosen_I >= 0) & (chosen_I < batch_size)
    return jnp.where(there_I, key_K + jnp.where(there_I, chosen_I, 0).astype(jnp.int32), -1).reshape(-1)


def _row_bounds(lengths: jax.Array, num_values: int) -> tuple[jax.Array, jax.Array]:
    """Where each row begins and how long it is, int32 `[S]` each, within the N values."""
    # One sum over all bags, not one of sums: lengths that lie about the sizes are cut, not wrapped.
    row_lengths = lengths if lengths.ndim == 1 else lengths.sum(axis=1, dtype=lengths.dtype)
    ends = positions(complete_cumsum(row_lengths), num_values)
    return ends[:-1], ends[1:] - ends[:-1]


def _chosen(permute_T: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    valid_T = (permute_T >= 0) & (permute_T < num_rows)
    return jnp.where(valid_T, permute_T, 0).astype(jnp.int32), valid_T


def _rows(rows: jax.Array, chosen_T: jax.Array, valid_T: jax.Array) -> jax.Array:
    return take_or(rows, chosen_T, valid_T, 0)
