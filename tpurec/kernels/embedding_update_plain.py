"""`embedding_update` in plain JAX: any shape, any backend, no Pallas.

It makes a combined gradient per unique row (`[N, dim]`), never one per table row. Rows are written back word by word
where several share a line, because XLA has no narrower write that leaves a packed table where it is.

Legend: N ids (capacity), U = N unique rows (capacity), D dim, W words per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpurec.kernels.dedup import UniqueRows, unique_rows
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.optimizer_state import by_array
from tpurec.kernels.optimizers import RowOptimizer, round_rows, step
from tpurec.kernels.storage import LANES, Storage, gather_rows, line_window, to_words
from tpurec.topology.chips import Chip


@dataclass(frozen=True)
class Config:
    """There is nothing to tune."""


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """Nothing is beyond it."""
    return None


def run(
    parts: Sequence[jax.Array],
    state: Sequence[jax.Array],
    grads_BD: jax.Array,
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    lr: jax.Array,
    *,
    shape: Shape,
    optimizer: RowOptimizer,
    chip: Chip | None = None,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Combine gradients per unique row, gather these rows, step, scatter them.

    Args:
        parts: the storage's parts.
        state: as of `optimizers.pack_state`.
        grads_BD: float32 `[B, D]`.
        ids_N: int32 `[N]`.
        offsets: int32 `[B + 1]`.
        weights_N: float32 `[N]` or None.
        lr: float32 scalar.
        shape: storage, sizes and pooling.
        optimizer: the rule.
        chip: not used.
        config: not used.
        interpret: not used; there is no kernel.

    Returns:
        New parts and new state.
    """
    unique = unique_rows(ids_N, offsets, weights_N, shape.storage.num_rows, shape.pooling)
    grads_UD = combined_gradients(unique, grads_BD)
    return step_rows(parts, state, unique.rows_N, grads_UD, lr, shape.storage, optimizer)


def step_rows(
    parts: Sequence[jax.Array],
    state: Sequence[jax.Array],
    numbers_U: jax.Array,
    grads_UD: jax.Array,
    lr: jax.Array,
    storage: Storage,
    optimizer: RowOptimizer,
    mean_squares_U: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Gather rows, step, scatter them.

    Args:
        parts: the storage's parts.
        state: as of `optimizers.pack_state`.
        numbers_U: int32 `[U]`, unique rows; fillers are negative.
        grads_UD: float32 `[U, D]`, duplicates combined.
        lr: float32 scalar.
        storage: shapes of the table.
        optimizer: the rule.
        mean_squares_U: as of `optimizers.step`.

    Returns:
        New parts and new state.
    """
    rows_U = jnp.maximum(numbers_U, 0)
    values_UD = gather_rows(parts, rows_U, storage)
    of_state = optimizer.state_storage(storage)
    groups = by_array(optimizer, tuple(state), storage)
    shapes = optimizer.state_shapes(storage.num_rows, storage.dim)
    found = tuple(
        gather_rows(group, rows_U, of_state) if len(shape) == 2 else group[0][rows_U] if shape else group[0]
        for group, shape in zip(groups, shapes, strict=True)
    )
    new_UD, new_state = step(optimizer, values_UD, grads_UD, found, lr, mean_squares_U)
    new_UD = round_rows(optimizer, new_UD, rows_U, new_state, storage.dtype)
    written: list[jax.Array] = []
    for group, shape, new in zip(groups, shapes, jax.tree.leaves(new_state), strict=True):
        if len(shape) == 2:
            written += _scatter_rows(group, numbers_U, new, of_state)
        elif shape:
            nowhere = jnp.where(numbers_U < 0, len(group[0]), numbers_U)
            written.append(group[0].at[nowhere].set(new, mode="drop", unique_indices=True))
        else:
            written.append(new)
    return _scatter_rows(parts, numbers_U, new_UD, storage), tuple(written)


def combined_gradients(unique: UniqueRows, grads_BD: jax.Array) -> jax.Array:
    """The gradient of each unique row.

    Args:
        unique: the rows and their occurrences.
        grads_BD: float32 `[B, D]`.

    Returns:
        float32 `[N, D]`; fillers are zero.
    """
    num_ids = unique.bags_N.shape[0]
    position = jnp.arange(num_ids, dtype=jnp.int32)
    # Each occurrence counts the rows that start at or before it; what lies behind the last occurrence has none.
    starts = jnp.where(unique.rows_N < 0, num_ids, unique.starts_N[:-1])
    slot = jnp.cumsum(jnp.zeros(num_ids, jnp.int32).at[starts].add(1, mode="drop")) - 1
    slot = jnp.where(position < unique.starts_N[-1], slot, num_ids)
    grads_ND = grads_BD[unique.bags_N]
    if unique.factors_N is not None:
        grads_ND = grads_ND * unique.factors_N[:, None]
    return (
        jnp.zeros((num_ids, grads_BD.shape[1]), jnp.float32)
        .at[slot]
        .add(grads_ND, mode="drop", indices_are_sorted=True)
    )


def _scatter_rows(
    parts: Sequence[jax.Array], rows_U: jax.Array, values_UD: jax.Array, storage: Storage
) -> tuple[jax.Array, ...]:
    """Write unique rows (fillers are negative) into the parts they lie in; nothing else changes a bit."""
    columns = storage.row_words * storage.columns_per_word
    words_UW = to_words(
        jnp.pad(values_UD.astype(storage.dtype), ((0, 0), (0, columns - storage.dim))),
        storage,
    )
    written = []
    for index, part in enumerate(parts):
        local = rows_U - index * storage.rows_per_part
        here = (rows_U >= 0) & (local >= 0) & (local < storage.rows_per_part)
        lines_UK, start_U = line_window(jnp.where(here, local, 0), storage)
        nowhere = storage.part_shape[0]
        if storage.row_words % LANES == 0:
            lines_UK = jnp.where(here[:, None], lines_UK, nowhere)
            values = words_UW.reshape(*lines_UK.shape, LANES)
            written.append(part.at[lines_UK].set(values, mode="drop", unique_indices=True))
        else:
            word = start_U[:, None] + jnp.arange(storage.row_words, dtype=jnp.int32)
            line = jnp.where(here[:, None], lines_UK[:, :1] + word // LANES, nowhere)
            written.append(part.at[line, word % LANES].set(words_UW, mode="drop", unique_indices=True))
    return tuple(written)
