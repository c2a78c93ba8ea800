"""Embedding bags: the rows of each bag's ids, added up or averaged. `reference` is the specification.

Ids are jagged: the ids of bag b are `ids[offsets[b]:offsets[b + 1]]`. Ids outside of the table (-1 is the one to use)
are skipped with their weight, wherever they stand; ids behind `offsets[-1]` are capacity and are not looked at.
Legend: R rows, D dim, N ids (capacity), B bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpurec.errors import ConfigError
from tpurec.kernels import dispatch
from tpurec.kernels.storage import Storage, gather_rows
from tpurec.topology.chips import Chip


def reference(
    table_RD: jax.Array,
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None = None,
    *,
    pooling: str = "sum",
) -> jax.Array:
    """Pool each bag's rows, accumulating in float32. This function is the specification.

    Args:
        table_RD: `[num_rows, dim]`, float32 or bfloat16.
        ids_N: integers `[N]`.
        offsets: integers `[num_bags + 1]`, ascending.
        weights_N: float32 `[N]` or None for all 1.
        pooling: `sum`, or `mean`: the sum divided by the sum of the weights that count.

    Returns:
        float32 `[num_bags, dim]`; a bag without ids, and a mean whose weights add up to 0, is zeros.
    """
    bag_N, counts_N = bag_of_ids(ids_N, offsets, table_RD.shape[0])
    weight_N = jnp.where(counts_N, 1.0 if weights_N is None else weights_N, 0.0)
    rows_ND = table_RD[jnp.where(counts_N, ids_N, 0)].astype(jnp.float32)
    rows_ND = jnp.where(counts_N[:, None], rows_ND * weight_N[:, None], 0.0)
    num_bags = offsets.shape[0] - 1
    pooled_BD = jax.ops.segment_sum(rows_ND, bag_N, num_bags)
    if pooling == "mean":
        pooled_BD = divide_by_weight(pooled_BD, jax.ops.segment_sum(weight_N, bag_N, num_bags))
    return pooled_BD


def bag_of_ids(ids_N: jax.Array, offsets: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Which bag each id is in, and whether it counts.

    Args:
        ids_N: integers `[N]`.
        offsets: integers `[num_bags + 1]`, ascending.
        num_rows: rows of the table.

    Returns:
        int32 `[N]` bags (`num_bags` behind the last offset), and bool `[N]`: inside of a bag and of the table.
    """
    position_N = jnp.arange(ids_N.shape[0], dtype=jnp.int32)
    # The bags that end at or before a position; a binary search would be a dozen gathers of N on a TensorCore.
    ends_N = jnp.zeros(ids_N.shape[0], jnp.int32).at[offsets[1:]].add(1, mode="drop")
    bag_N = jnp.cumsum(ends_N)
    inside_N = (position_N >= offsets[0]) & (position_N < offsets[-1])
    return bag_N, inside_N & (ids_N >= 0) & (ids_N < num_rows)


def divide_by_weight(pooled_BD: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Make means of weighted sums.

    Args:
        pooled_BD: float32 `[B, D]`.
        weight_B: float32 `[B]`, the sum of each bag's weights.

    Returns:
        float32 `[B, D]`, zeros where the weights add up to 0.
    """
    inverse_B = jnp.where(weight_B == 0, 0.0, 1.0 / jnp.where(weight_B == 0, 1.0, weight_B))
    return pooled_BD * inverse_B[:, None]


def embedding_bag(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None = None,
    *,
    storage: Storage,
    pooling: str = "sum",
    chip: Chip | None = None,
    implementation: str | None = None,
    config: Any = None,
    interpret: Any = False,
) -> jax.Array:
    """Pool each bag's rows out of a packed storage; equals `reference` on the unpacked table.

    Args:
        parts: the storage's parts, as of `Storage.part_shape` and `word_dtype`.
        ids_N: integers `[N]`, rows of the storage (a feature of a stacked table adds its table's row offset).
        offsets: integers `[num_bags + 1]`, ascending, starting at 0; several features lie behind one another.
        weights_N: float32 `[N]` or None.
        storage: the shapes of the tables.
        pooling: `sum` or `mean`.
        chip: the TPU that this is compiled for; None off TPU.
        implementation: `plain`, `sparsecore` or `tensorcore`; None lets the tuning table choose.
        config: the implementation's `Config`; None for the tuning table's.
        interpret: for tests: interpreter parameters of the Pallas kernels.

    Returns:
        float32 `[num_bags, dim]`.

    Raises:
        ConfigError: arguments that do not fit one another, with the sizes.
        KernelLimit: the implementation asked for cannot take the shape.

    >>> from tpurec.kernels.storage import pack
    >>> storage = Storage(num_rows=4, dim=8)
    >>> parts = pack(jnp.ones((4, 8)), storage)
    >>> embedding_bag(parts, jnp.array([0, 3, -1]), jnp.array([0, 3, 3]), storage=storage)[:, 0].tolist()
    [2.0, 0.0]
    """
    ids_N, offsets = check_arguments(parts, ids_N, offsets, weights_N, storage)
    num_bags, num_ids = offsets.shape[0] - 1, ids_N.shape[0]
    shape = dispatch.Shape(storage, num_bags, num_ids, weights_N is not None, pooling)
    choice = dispatch.choose("embedding_bag", shape, chip, implementation, config)
    if num_bags == 0 or num_ids == 0:
        return jnp.zeros((num_bags, storage.dim), jnp.float32)
    return choice.module.run(
        parts, ids_N, offsets, weights_N, shape=shape, chip=chip, config=choice.config, interpret=interpret
    )


def check_arguments(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    storage: Storage,
) -> tuple[jax.Array, jax.Array]:
    """Refuse arguments whose shapes or dtypes do not fit one another.

    Args:
        parts: as of `embedding_bag`.
        ids_N: as of `embedding_bag`.
        offsets: as of `embedding_bag`.
        weights_N: as of `embedding_bag`.
        storage: as of `embedding_bag`.

    Returns:
        Ids and offsets as int32.

    Raises:
        ConfigError: naming the argument, its shape and the one expected.
    """
    expected = [(storage.part_shape, jnp.dtype(storage.word_dtype))] * storage.num_parts
    found = [(tuple(part.shape), part.dtype) for part in parts]
    if found != expected:
        raise ConfigError(f"parts are {found}, the storage has {expected}.", "Make them with storage.pack.")
    if ids_N.ndim != 1 or not jnp.issubdtype(ids_N.dtype, jnp.integer):
        raise ConfigError(f"ids are {ids_N.dtype}{ids_N.shape}: expected integers [N].")
    if offsets.ndim != 1 or offsets.shape[0] < 1 or not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise ConfigError(f"offsets are {offsets.dtype}{offsets.shape}: expected integers [num_bags + 1].")
    if weights_N is not None and (weights_N.shape != ids_N.shape or weights_N.dtype != jnp.float32):
        raise ConfigError(f"weights are {weights_N.dtype}{weights_N.shape}: expected float32 {ids_N.shape}.")
    if ids_N.dtype.itemsize > 4:  # a plain cast would wrap 2**32 to row 0
        where = np.where if isinstance(ids_N, np.ndarray) else jnp.where
        ids_N = where((ids_N < 0) | (ids_N >= storage.num_rows), -1, ids_N)
    return jnp.asarray(ids_N, jnp.int32), jnp.asarray(offsets, jnp.int32)


def weights_gradient(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array,
    gradient_BD: jax.Array,
    *,
    storage: Storage,
    pooling: str = "sum",
) -> jax.Array:
    """The gradient with respect to the per-id weights, in plain JAX.

    Sum: d/dw_n is the dot product of the bag's gradient and the id's row. Mean (`out = sum(w E) / sum(w)`):
    `(E_n - out) . gradient / sum(w)`.

    Args:
        parts: the storage's parts before the update of the same step.
        ids_N: as of `embedding_bag`.
        offsets: as of `embedding_bag`.
        weights_N: float32 `[N]`.
        gradient_BD: float32 `[num_bags, dim]`, with respect to the pooled bags.
        storage: the shapes of the tables.
        pooling: `sum` or `mean`.

    Returns:
        float32 `[N]`; 0 for ids that are skipped, and in means whose weights add up to 0.

    Raises:
        ConfigError: arguments that do not fit one another.
    """
    ids_N, offsets = check_arguments(parts, ids_N, offsets, weights_N, storage)
    num_bags = offsets.shape[0] - 1
    if gradient_BD.shape != (num_bags, storage.dim):
        raise ConfigError(f"gradient is {gradient_BD.shape}: expected {(num_bags, storage.dim)}.")
    if num_bags == 0 or ids_N.shape[0] == 0:
        return jnp.zeros(ids_N.shape, jnp.float32)
    bag_N, counts_N = bag_of_ids(ids_N, offsets, storage.num_rows)
    rows_ND = gather_rows(parts, jnp.where(counts_N, ids_N, 0), storage)
    dots_N = jnp.where(counts_N, (rows_ND * gradient_BD[jnp.minimum(bag_N, num_bags - 1)]).sum(1), 0.0)
    if pooling == "sum":
        return dots_N
    weight_N = jnp.where(counts_N, weights_N, 0.0)
    total_B = jax.ops.segment_sum(weight_N, bag_N, num_bags)
    inverse_B = jnp.where(total_B == 0, 0.0, 1.0 / jnp.where(total_B == 0, 1.0, total_B))
    mean_dot_B = jax.ops.segment_sum(weight_N * dots_N, bag_N, num_bags) * inverse_B  # out . gradient
    bag_N = jnp.minimum(bag_N, num_bags - 1)
    return jnp.where(counts_N, (dots_N - mean_dot_B[bag_N]) * inverse_B[bag_N], 0.0)
