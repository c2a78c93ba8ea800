"""Unpooled lookup: one row per id, in the order of the ids; skipped ids give zeros.

It is `embedding_bag` with a bag per id, and where a Pallas kernel serves that shape it runs as such: the offsets cost 4
bytes an id, beside `2 * row` bytes that any gather moves. In plain JAX it is one XLA gather of whole lines.

Ids are not made unique first. On one device that never moves fewer bytes: the unique rows would be read, written
compactly and gathered again, once per id, after a sort (`least_and_unique_bytes` counts both ways). It pays only where
the rows come over a network, and there the exchange of sharded tables does it.

Legend: N ids (capacity), D dim, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpurec.errors import ConfigError
from tpurec.kernels import dispatch
from tpurec.kernels.dedup import sort_hbm_bytes
from tpurec.kernels.embedding_bag import embedding_bag
from tpurec.kernels.storage import Storage, gather_rows
from tpurec.topology.chips import Chip


def reference(table_RD: jax.Array, ids_N: jax.Array) -> jax.Array:
    """The specification.

    Args:
        table_RD: float32 or bfloat16 `[R, D]`.
        ids_N: int32 `[N]`; ids outside of [0, R), such as the padding -1, give zeros.

    Returns:
        float32 `[N, D]`.

    >>> reference(jnp.ones((2, 8)), jnp.array([1, -1, 2]))[:, 0].tolist()
    [1.0, 0.0, 0.0]
    """
    is_row_N = (ids_N >= 0) & (ids_N < table_RD.shape[0])
    found_ND = table_RD[jnp.where(is_row_N, ids_N, 0)].astype(jnp.float32)
    return jnp.where(is_row_N[:, None], found_ND, 0.0)


def sequence_gather(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    *,
    storage: Storage,
    chip: Chip | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`reference` on packed storage.

    Args:
        parts: the table, as `storage.pack` lays it out.
        ids_N: int32 or int64 `[N]`.
        storage: shapes of the table.
        chip: the TPU that the program is compiled for; None for none.
        implementation: of `embedding_bag`; None to choose by chip and shape.

    Returns:
        float32 `[N, D]`.

    Raises:
        ConfigError: ids that are not one-dimensional integers.
        KernelLimit: the named implementation cannot take the shape.
    """
    ids_N = jnp.asarray(ids_N)
    if ids_N.ndim != 1 or not jnp.issubdtype(ids_N.dtype, jnp.integer):
        raise ConfigError(f"ids are {ids_N.dtype}{ids_N.shape}: expected int32 or int64 [N].")
    num_ids = ids_N.shape[0]
    if num_ids == 0:
        return jnp.zeros((0, storage.dim), jnp.float32)
    choice = dispatch.choose("embedding_bag", dispatch.Shape(storage, num_ids, num_ids), chip, implementation)
    is_row_N = (ids_N >= 0) & (ids_N < storage.num_rows)
    rows_N = jnp.where(is_row_N, ids_N, -1).astype(jnp.int32)
    if choice.implementation == "plain":
        found_ND = gather_rows(parts, jnp.maximum(rows_N, 0), storage)
        return jnp.where(is_row_N[:, None], found_ND, 0.0)
    offsets = jnp.arange(num_ids + 1, dtype=jnp.int32)
    return embedding_bag(parts, rows_N, offsets, None, storage=storage, chip=chip, implementation=choice.implementation)


def least_and_unique_bytes(storage: Storage, num_ids: int, num_unique: int) -> tuple[int, int]:
    """HBM traffic of gathering row by row, and of making the ids unique first, both at their least.

    Args:
        storage: the table.
        num_ids: ids.
        num_unique: different rows among them.

    Returns:
        Bytes of both ways. The second reads the unique rows, writes them as float32, and gathers those once per id.
    """
    result = num_ids * storage.dim * 4
    compact = num_unique * storage.dim * 4
    direct = num_ids * (4 + storage.row_bytes) + result
    unique = sort_hbm_bytes(num_ids, weighted=False) + num_unique * storage.row_bytes + compact + 2 * result
    return direct, unique
