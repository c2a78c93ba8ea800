"""`embedding_bag` in plain JAX: every backend, static shapes only.

This is what runs off TPU, and through torch_tpu on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpurec.kernels.dispatch import Shape
from tpurec.kernels.embedding_bag import bag_of_ids, divide_by_weight
from tpurec.kernels.storage import gather_rows
from tpurec.topology.chips import Chip


@dataclass(frozen=True)
class Config:
    """There is nothing to tune."""


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """Any shape is taken.

    Args:
        shape: not looked at.
        chip: not looked at.
        config: not looked at.

    Returns:
        None.
    """
    return None


def run(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    *,
    shape: Shape,
    chip: Chip | None = None,
    config: Config = Config(),
    interpret: Any = False,
) -> jax.Array:
    """Gather a row per id, then add them up by bag; needs a temporary of `[N, dim]` float32.

    Args:
        parts: the storage's parts.
        ids_N: int32 `[N]`.
        offsets: int32 `[num_bags + 1]`.
        weights_N: float32 `[N]` or None.
        shape: storage, sizes and pooling.
        chip: not used.
        config: not used.
        interpret: not used; there is no kernel.

    Returns:
        float32 `[num_bags, dim]`.
    """
    storage = shape.storage
    bag_N, counts_N = bag_of_ids(ids_N, offsets, storage.num_rows)
    rows_ND = gather_rows(parts, jnp.where(counts_N, ids_N, 0), storage)
    weight_N = jnp.where(counts_N, 1.0 if weights_N is None else weights_N, 0.0)
    rows_ND = jnp.where(counts_N[:, None], rows_ND * weight_N[:, None], 0.0)
    pooled_BD = jax.ops.segment_sum(rows_ND, bag_N, shape.num_bags)
    if shape.pooling == "mean":
        pooled_BD = divide_by_weight(pooled_BD, jax.ops.segment_sum(weight_N, bag_N, shape.num_bags))
    return pooled_BD
