"""The fused backward of `embedding_bag`, specified: one optimizer step on the rows that a batch used.

`reference` says what every implementation does; it is dense and short, and nothing else. The implementations are
`embedding_update_plain`, `embedding_update_sparsecore` and `embedding_update_tensorcore`; `update` picks one.

Legend: R rows, D dim, B bags, N ids (capacity).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpurec.errors import ConfigError
from tpurec.kernels import dispatch
from tpurec.kernels.dedup import occurrence_factors
from tpurec.kernels.embedding_bag import bag_of_ids, check_arguments
from tpurec.kernels.optimizers import ACCUMULATORS, RowOptimizer, State, round_rows, step
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import Chip


def reference(
    table_RD: jax.Array,
    state: State,
    grads_BD: jax.Array,
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    lr: jax.Array,
    optimizer: RowOptimizer,
    pooling: str = "sum",
) -> tuple[jax.Array, State]:
    """Add the gradients of every row that occurs, then take exactly one step on each of these rows.

    Args:
        table_RD: float32 or bfloat16 `[R, D]`; the maths is float32, and the new row is rounded once.
        state: arrays of `optimizer.state_shapes(R, D)`, float32 and at the end the int32 step count where the rule has
            one; a single one may stand for itself, and None for none.
        grads_BD: float32 `[B, D]`, the gradient of the bags.
        ids_N: int32 `[N]`, rows of the table; ids outside of [0, R), such as the padding -1, are skipped.
        offsets: int32 `[B + 1]`, ascending from 0; ids from `offsets[-1]` on are capacity and ignored.
        weights_N: float32 `[N]` per-id weights, or None.
        lr: float32 scalar.
        optimizer: the rule, in `tpurec/kernels/optimizers.py`.
        pooling: `sum`, or `mean`, which divides by the number of ids that are not skipped, or by the sum of their
            weights (a sum of 0 gives 0).

    Returns:
        New table and new state. Rows that do not occur keep their bits, whatever the optimizer.

    >>> table, grads, one = jnp.ones((4, 8)), jnp.ones((1, 8)), jnp.float32(1)
    >>> ids, offsets = jnp.array([2, 2, -1]), jnp.array([0, 3])
    >>> reference(table, None, grads, ids, offsets, None, one, RowOptimizer("sgd"))[0][:, 0].tolist()
    [1.0, 1.0, -1.0, 1.0]
    """
    num_rows = table_RD.shape[0]
    bags_N, used_N = bag_of_ids(ids_N, offsets, num_rows)
    factors_N = occurrence_factors(bags_N, used_N, weights_N, offsets.shape[0] - 1, pooling)
    grads_ND = jnp.pad(grads_BD, ((0, 1), (0, 0)))[bags_N]  # ids behind the last bag have no gradient
    if factors_N is not None:
        grads_ND = grads_ND * factors_N[:, None]
    rows_N = jnp.where(used_N, ids_N, num_rows)
    grads_RD = jnp.zeros(table_RD.shape, jnp.float32).at[rows_N].add(grads_ND, mode="drop")
    touched_R = jnp.zeros(num_rows, bool).at[rows_N].set(True, mode="drop")
    new_RD, new_state = step(optimizer, table_RD.astype(jnp.float32), grads_RD, state, lr)
    new_RD = round_rows(optimizer, new_RD, jnp.arange(num_rows, dtype=jnp.int32), new_state, table_RD.dtype)
    table_RD = jnp.where(touched_R[:, None], new_RD, table_RD)

    def of_touched(new: jax.Array, old: jax.Array) -> jax.Array:
        # The step count has no rows: it grows in every update.
        return jnp.where(touched_R.reshape(-1, *[1] * (old.ndim - 1)), new, old) if old.ndim else new

    return table_RD, jax.tree.map(of_touched, new_state, state)


def update(
    parts: Sequence[jax.Array],
    state: Sequence[jax.Array],
    grads_BD: jax.Array,
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    lr: jax.Array,
    *,
    storage: Storage,
    optimizer: RowOptimizer,
    pooling: str = "sum",
    chip: Chip | None = None,
    implementation: str | None = None,
    config: Any = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`reference` on packed storage, in place if `parts` and `state` are donated to the enclosing jit.

    Args:
        parts: the table, as `storage.pack` lays it out. Donate it: without that the compiler copies it.
        state: as `optimizers.pack_state` lays it out. Donate it.
        grads_BD: float32 `[B, D]`.
        ids_N: int32 `[N]`, rows of the storage; ids outside of [0, R) are skipped.
        offsets: int32 `[B + 1]`.
        weights_N: float32 `[N]` or None.
        lr: float32 scalar array; another value compiles nothing.
        storage: shapes of the table.
        optimizer: the rule.
        pooling: `sum` or `mean`, as in the lookup.
        chip: the TPU that the program is compiled for; None for none.
        implementation: `plain`, `sparsecore` or `tensorcore`; None to choose by chip and shape.
        config: the implementation's `Config`; None for the tuning table's.
        interpret: Pallas's interpreter parameters, in tests.

    Returns:
        New parts and new state.

    Raises:
        ConfigError: shapes or dtypes that do not belong together.
        KernelLimit: the named implementation cannot take the shape.
    """
    ids_N, offsets = check_arguments(parts, ids_N, offsets, weights_N, storage)
    grads_BD, lr = jnp.asarray(grads_BD), jnp.asarray(lr)  # a NumPy array cannot be indexed by traced ids
    _check_update(state, grads_BD, offsets, lr, storage, optimizer)
    num_bags, num_ids = offsets.shape[0] - 1, ids_N.shape[0]
    shape = dispatch.Shape(
        storage, num_bags, num_ids, weights_N is not None, pooling, optimizer.name, optimizer.beyond_kernels or ""
    )
    choice = dispatch.choose("embedding_update", shape, chip, implementation, config)
    if num_bags == 0 or num_ids == 0:
        return tuple(parts), (*state[:-1], state[-1] + 1) if optimizer.counts_steps else tuple(state)
    return choice.module.run(
        parts,
        state,
        grads_BD,
        ids_N,
        offsets,
        weights_N,
        lr,
        shape=shape,
        optimizer=optimizer,
        chip=chip,
        config=choice.config,
        interpret=interpret,
    )


def _check_update(
    state: Sequence[jax.Array],
    grads_BD: jax.Array,
    offsets: jax.Array,
    lr: jax.Array,
    storage: Storage,
    optimizer: RowOptimizer,
) -> None:
    expected = (offsets.shape[0] - 1, storage.dim)
    if grads_BD.shape != expected or grads_BD.dtype != jnp.float32:
        raise ConfigError(f"grads are {grads_BD.dtype}{grads_BD.shape}: expected float32 {expected}, one row per bag.")
    if jnp.shape(lr) != () or jnp.result_type(lr) != jnp.float32:
        raise ConfigError(f"lr is {jnp.result_type(lr)}{jnp.shape(lr)}: expected a float32 scalar.")
    expected = [(shape, "float32" if shape else "int32") for shape in optimizer.packed_shapes(storage)]
    found = [(tuple(array.shape), str(array.dtype)) for array in state]
    if found != expected:
        raise ConfigError(f"state of {optimizer.name} is {found}: expected {expected}.", "Make it with pack_state.")


def least_hbm_bytes(
    storage: Storage, optimizer: RowOptimizer, num_bags: int, num_ids: int, num_unique: int, weighted: bool
) -> dict[str, int]:
    """The HBM traffic that no implementation of lookup plus update can avoid, if a row is fetched once per pass.

    Lookup: ids, offsets and weights in, every unique row in once, bags out. Update: the gradient of the bags in, ids,
    offsets and weights in once more, every unique row and its accumulators in and out once. Rows of one pass cannot
    wait on the chip for the other, as the dense model runs in between.

    Args:
        storage: the table.
        optimizer: what the update steps with.
        num_bags: bags.
        num_ids: ids that are not padding.
        num_unique: different rows among them.
        weighted: there are per-id weights.

    Returns:
        Bytes of `lookup` and of `update`.
    """
    row = storage.dim * (4 // storage.columns_per_word)
    per_row_state = sum({"element": storage.dim * 4, "row": 4}[kind] for kind in ACCUMULATORS[optimizer.name])
    bags = num_bags * storage.dim * 4
    index = num_ids * 4 * (2 if weighted else 1) + (num_bags + 1) * 4
    return {
        "lookup": index + num_unique * row + bags,
        "update": index + bags + 2 * num_unique * (row + per_row_state),
    }
