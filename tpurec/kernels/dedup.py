"""From ids in bags to sorted unique rows, each with the list of its occurrences; shapes do not depend on the values.

A gradient per occurrence (`[N, D]`) is never made here: an occurrence is the number of its bag and a factor, and the
kernel reads the bag's gradient. Sorting is what the TensorCore is good at (81,920 pairs: about 82,000 cycles).

Legend: N ids (capacity), B bags.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels.embedding_bag import bag_of_ids

# Counted at 81,920 ids in 4,096 bags by tests/kernels/test_embedding_update_sparsecore.py; v5p has the most.
SORT_BYTES_PER_ID, SORT_BYTES_PER_WEIGHTED_ID = 170, 194
UNUSED = 2**31 - 1  # sorts behind every row


def sort_hbm_bytes(num_ids: int, weighted: bool) -> int:
    """HBM traffic of `unique_rows`, as libtpu's `cost_analysis()` counts it for that program alone.

    Args:
        num_ids: capacity of the ids.
        weighted: occurrences have factors.

    Returns:
        Bytes, rounded up over the generations.
    """
    return num_ids * (SORT_BYTES_PER_WEIGHTED_ID if weighted else SORT_BYTES_PER_ID)


class UniqueRows(NamedTuple):
    """Sorted unique rows; entries behind `count` are fillers.

    Args:
        rows_N: int32 `[N]`, ascending; fillers are -1.
        starts_N: int32 `[N + 1]`: the occurrences of `rows_N[u]` are `starts_N[u]` to `starts_N[u + 1]`; fillers have
            none.
        bags_N: int32 `[N]`, the bag of each occurrence, in the order of the rows; any bag behind the last occurrence.
        factors_N: float32 `[N]`, by what the bag's gradient is multiplied for this occurrence; None for 1.
        count: int32 scalar, the number of unique rows.
    """

    rows_N: jax.Array
    starts_N: jax.Array
    bags_N: jax.Array
    factors_N: jax.Array | None
    count: jax.Array


def occurrence_factors(
    bags_N: jax.Array, used_N: jax.Array, weights_N: jax.Array | None, num_bags: int, pooling: str
) -> jax.Array | None:
    """What each id's row is multiplied by in its bag, which is what its gradient is multiplied by, too.

    Args:
        bags_N: int32 `[N]` of `bag_of_ids`.
        used_N: bool `[N]` of `bag_of_ids`: the id counts.
        weights_N: float32 `[N]` or None.
        num_bags: B.
        pooling: `sum` or `mean`.

    Returns:
        float32 `[N]`, or None if all are 1. Factors of ids that do not count mean nothing.
    """
    if pooling == "sum":
        return weights_N
    ones = jnp.where(used_N, 1.0 if weights_N is None else weights_N, 0.0).astype(jnp.float32)
    sums = jnp.zeros(num_bags + 1, jnp.float32).at[bags_N].add(ones)[bags_N]  # one more: behind the last bag
    return jnp.where(sums == 0, 0.0, ones / jnp.where(sums == 0, 1.0, sums))


class SortedOccurrences(NamedTuple):
    """The ids in order; what does not count lies at the end.

    Args:
        rows_N: int32 `[N]`, ascending; the largest int32 where an id does not count.
        bags_N: int32 `[N]` in [0, B).
        factors_N: float32 `[N]`, by what the bag's gradient is multiplied for this occurrence; None for 1.
        count: int32 scalar, the number of ids that count.
    """

    rows_N: jax.Array
    bags_N: jax.Array
    factors_N: jax.Array | None
    count: jax.Array


def sorted_occurrences(
    ids_N: jax.Array, offsets: jax.Array, weights_N: jax.Array | None, num_rows: int, pooling: str
) -> SortedOccurrences:
    """Sort the ids with their bags and factors.

    Args:
        ids_N: int32 `[N]`, N > 0.
        offsets: int32 `[B + 1]`, B > 0.
        weights_N: float32 `[N]` or None.
        num_rows: rows of the storage.
        pooling: `sum` or `mean`.

    Returns:
        The occurrences; those of one row are neighbours.
    """
    bags_N, used_N = bag_of_ids(ids_N, offsets, num_rows)
    factors_N = occurrence_factors(bags_N, used_N, weights_N, offsets.shape[0] - 1, pooling)
    keys = jnp.where(used_N, ids_N, UNUSED)
    bags_N = jnp.minimum(bags_N, offsets.shape[0] - 2)
    payload = (bags_N,) if factors_N is None else (bags_N, factors_N)
    keys, bags_N, *factors = lax.sort((keys, *payload), num_keys=1, is_stable=False)
    return SortedOccurrences(keys, bags_N, factors[0] if factors else None, jnp.sum(used_N, dtype=jnp.int32))


def unique_rows(
    ids_N: jax.Array, offsets: jax.Array, weights_N: jax.Array | None, num_rows: int, pooling: str
) -> UniqueRows:
    """Sort the ids, find the runs of equal ones, and compact the runs with a second sort.

    Args:
        ids_N: int32 `[N]`, N > 0.
        offsets: int32 `[B + 1]`, B > 0.
        weights_N: float32 `[N]` or None.
        num_rows: rows of the storage.
        pooling: `sum` or `mean`.

    Returns:
        The rows, with at most N entries.
    """
    keys, bags_N, factors_N, num_used = sorted_occurrences(ids_N, offsets, weights_N, num_rows, pooling)
    position = jnp.arange(ids_N.shape[0], dtype=jnp.int32)
    starts_run = (keys != jnp.concatenate([jnp.full(1, -1, jnp.int32), keys[:-1]])) & (keys != UNUSED)
    count = jnp.sum(starts_run, dtype=jnp.int32)
    # Runs' starts move to the front, in order; the rest gets the largest keys.
    starts, rows = lax.sort((jnp.where(starts_run, position, UNUSED), keys), num_keys=1, is_stable=False)
    filler = position >= count
    starts_N = jnp.append(jnp.where(filler, num_used, starts), num_used)
    return UniqueRows(jnp.where(filler, -1, rows), starts_N, bags_N, factors_N, count)
