"""Rows of several matrices that lie one behind the other in one array, as TorchRec's batches of a size per feature do.

Plain JAX; the functions are the specification. Sizes are known when the program is traced, so a matrix is a slice and
the rows of each are one gather.

Legend: F matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

from tpurec.kernels.jagged_positions import take_or


def select_rows(
    inputs: jax.Array,
    indices: jax.Array,
    num_indices: Sequence[int],
    num_rows: Sequence[int],
    num_columns: Sequence[int],
    side_by_side: bool,
) -> jax.Array:
    """Choose rows of each matrix.

    Args:
        inputs: `[sum of num_rows * num_columns]`, the matrices row by row, one behind the other.
        indices: integers `[sum of num_indices]`, within each matrix; a row that is not there gives 0.
        num_indices: of each matrix, F numbers.
        num_rows: of each matrix.
        num_columns: of each matrix.
        side_by_side: the results are the columns of one matrix instead of one behind the other; each has the same
            number of rows then.

    Returns:
        `[sum of num_indices * num_columns]`, row by row.
    """
    taken = []
    for matrix, chosen in zip(_matrices(inputs, num_rows, num_columns), _parts(indices, num_indices), strict=True):
        there = (chosen >= 0) & (chosen < matrix.shape[0])
        taken.append(take_or(matrix, jnp.where(there, chosen, 0).astype(jnp.int32), there, 0))
    if not taken:
        return inputs[:0]
    if side_by_side:
        return jnp.concatenate(taken, axis=1).reshape(-1)
    return jnp.concatenate([rows.reshape(-1) for rows in taken])


def select_rows_gradient(
    gradient: jax.Array,
    indices: jax.Array,
    num_indices: Sequence[int],
    num_rows: Sequence[int],
    num_columns: Sequence[int],
    side_by_side: bool,
) -> jax.Array:
    """The gradient of `select_rows` with respect to the matrices: what a row receives several times adds up.

    Args:
        gradient: as the result of `select_rows`.
        indices: as of `select_rows`.
        num_indices: as of `select_rows`.
        num_rows: as of `select_rows`.
        num_columns: as of `select_rows`.
        side_by_side: as of `select_rows`.

    Returns:
        `[sum of num_rows * num_columns]` of the gradient's dtype.
    """
    if not num_indices:
        return gradient
    if side_by_side:
        ends = list(accumulate(num_columns))
        rows = gradient.reshape(num_indices[0], ends[-1])
        parts = [rows[:, end - columns : end] for end, columns in zip(ends, num_columns, strict=True)]
    else:
        parts = _matrices(gradient, num_indices, num_columns)
    sums = []
    for part, chosen, rows, columns in zip(parts, _parts(indices, num_indices), num_rows, num_columns, strict=True):
        target = jnp.where((chosen >= 0) & (chosen < rows), chosen, rows).astype(jnp.int32)
        sums.append(jnp.zeros((rows, columns), gradient.dtype).at[target].add(part, mode="drop").reshape(-1))
    return jnp.concatenate(sums)


def _parts(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    return [array[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _matrices(array: jax.Array, num_rows: Sequence[int], num_columns: Sequence[int]) -> list[jax.Array]:
    shapes = list(zip(num_rows, num_columns, strict=True))
    parts = _parts(array, [rows * columns for rows, columns in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
