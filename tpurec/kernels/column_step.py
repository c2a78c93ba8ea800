"""One optimizer step on some columns of rows whose other columns are elsewhere.

What a step takes from whole rows, the mean square of a gradient for accumulators per row, is an argument: the owners of
the columns have added it up. `reference` is the specification; `column_step` is plain JAX, for every shape and chip.

Legend: R rows, D dim (columns that are here), N rows to step (capacity).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpurec.errors import ConfigError
from tpurec.kernels.embedding_update_plain import step_rows
from tpurec.kernels.optimizers import RowOptimizer, State, round_rows, step
from tpurec.kernels.storage import Storage


def reference(
    table_RD: jax.Array,
    state: State,
    rows_N: jax.Array,
    grads_ND: jax.Array,
    mean_squares_N: jax.Array,
    lr: jax.Array,
    optimizer: RowOptimizer,
) -> tuple[jax.Array, State]:
    """Step the rows of a plain table.

    Args:
        table_RD: float32 or bfloat16 `[R, D]`.
        state: arrays of `optimizer.state_shapes(R, D)`.
        rows_N: int32 `[N]`, unique; -1 is no row.
        grads_ND: float32 `[N, D]`, duplicates combined and clipped; L2 decay comes here.
        mean_squares_N: float32 `[N]`, of the gradients of whole rows, after clipping and L2 decay.
        lr: float32 scalar.
        optimizer: the rule, without clipping.

    Returns:
        The new table and state; the step count grows whatever the rows are.
    """
    num_rows = table_RD.shape[0]
    targets_N = jnp.where(rows_N < 0, num_rows, rows_N)
    grads_RD = jnp.zeros(table_RD.shape, jnp.float32).at[targets_N].set(grads_ND, mode="drop")
    squares_R = jnp.zeros(num_rows, jnp.float32).at[targets_N].set(mean_squares_N, mode="drop")
    touched_R = jnp.zeros(num_rows, bool).at[targets_N].set(True, mode="drop")
    new_RD, new_state = step(optimizer, table_RD.astype(jnp.float32), grads_RD, state, lr, squares_R)
    new_RD = round_rows(optimizer, new_RD, jnp.arange(num_rows, dtype=jnp.int32), new_state, table_RD.dtype)

    def of_touched(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(touched_R.reshape(-1, *[1] * (old.ndim - 1)), new, old) if old.ndim else new

    return of_touched(new_RD, table_RD), jax.tree.map(of_touched, new_state, state)


def column_step(
    parts: Sequence[jax.Array],
    state: Sequence[jax.Array],
    rows_N: jax.Array,
    grads_ND: jax.Array,
    mean_squares_N: jax.Array,
    lr: jax.Array,
    *,
    storage: Storage,
    optimizer: RowOptimizer,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`reference` on packed storage, in place if `parts` and `state` are donated to the enclosing jit.

    Args:
        parts: the storage's parts.
        state: as of `optimizer_state.pack_state`.
        rows_N: as of `reference`.
        grads_ND: as of `reference`.
        mean_squares_N: as of `reference`.
        lr: float32 scalar.
        storage: shapes of the columns.
        optimizer: the rule.

    Returns:
        New parts and new state.

    Raises:
        ConfigError: a rule with clipping, which needs the norms of whole rows.
    """
    if optimizer.max_norm:
        raise ConfigError("column_step: max_norm is a norm of whole rows.", "Clip the gradients before.")
    if not rows_N.shape[0]:
        return tuple(parts), (*state[:-1], state[-1] + 1) if optimizer.counts_steps else tuple(state)
    return step_rows(parts, state, rows_N, grads_ND, lr, storage, optimizer, mean_squares_N)
