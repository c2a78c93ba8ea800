"""Ids that have no row, on the device: the id policy and its counters. Plain JAX; the specification.

The host maps ids to rows when it packs a batch (`tpurec.features.id_policy`); this is for ids that come to the device
unmapped, as a user's KeyedJaggedTensor does. The rules are the same: an id outside of [0, num_embeddings) is counted,
and is skipped or hashed; it never becomes another id's row by wrapping or clipping. An error cannot be raised from a
program, so policy `error` skips and counts, and whoever reads the counters raises.

Legend: F features, B bags per feature, N ids (capacity).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.errors import ConfigError
from tpurec.kernels.jagged_positions import complete_cumsum, of_segments, positions

POLICIES = ("error", "skip", "hash")
_MASK_64 = 2**64 - 1


def check_ids(
    ids_N: jax.Array, offsets: jax.Array, num_rows_F: jax.Array, policy: str, salt: int = 0
) -> list[jax.Array]:
    """Apply the id policy.

    Args:
        ids_N: int32 or int64 `[N]`.
        offsets: integers `[F * B + 1]`, feature after feature, ascending; ids outside of them are capacity.
        num_rows_F: integers `[F]`: num_embeddings of each feature's table, below 2**31.
        policy: `error` or `skip`: -1 for an id without a row; `hash`: its row by `mix64`, which needs 64-bit arithmetic
            (`jax.enable_x64`).
        salt: of the hash, 0 to 2**64 - 1.

    Returns:
        int32 `[N]`: rows, -1 for what is skipped and for capacity; and int32 `[F]`: how many ids in bags had no row.

    Raises:
        ConfigError: an unknown policy, or `hash` without 64-bit arithmetic.
    """
    if policy not in POLICIES:
        raise ConfigError(f"id policy {policy!r} is not known.", f"Policies: {', '.join(POLICIES)}.")
    if policy == "hash":
        _check_64_bits()
    num_ids, num_features = ids_N.shape[0], num_rows_F.shape[0]
    if num_ids == 0 or num_features == 0 or offsets.shape[0] == 1:
        return [jnp.full(num_ids, -1, jnp.int32), jnp.zeros(num_features, jnp.int32)]
    feature_offsets = positions(offsets[:: (offsets.shape[0] - 1) // num_features], num_ids)
    size_N = of_segments(num_rows_F.astype(jnp.int32), feature_offsets, num_ids)
    position_N = jnp.arange(num_ids, dtype=jnp.int32)
    inside_N = (position_N >= feature_offsets[0]) & (position_N < feature_offsets[-1])
    has_row_N = (ids_N >= 0) & (ids_N < size_N)
    bad_N = (inside_N & ~has_row_N).astype(jnp.int32)
    counts_F = jnp.diff(complete_cumsum(bad_N)[feature_offsets])
    rows_N = jnp.where(inside_N & has_row_N, ids_N, -1).astype(jnp.int32)
    if policy == "hash":
        rows_N = jnp.where(bad_N == 1, hash_rows(ids_N, size_N, salt), rows_N)
    return [rows_N, counts_F]


def fix_bounds(
    num_rows_F: jax.Array, ids_N: jax.Array, offsets: jax.Array, feature_bags: jax.Array | None
) -> list[jax.Array]:
    """What FBGEMM 1.8's `bounds_check_indices` makes of ids and offsets, which is not what the id policies do.

    Args:
        num_rows_F: integers `[F]`.
        ids_N: integers `[N]`.
        offsets: integers `[S + 1]`, possibly not ascending or beyond the ids.
        feature_bags: integers `[F + 1]`: the bag that each feature begins with; None for S / F bags each.

    Returns:
        Ids `[N]`: 0 for ids outside of [-1, num_rows) in bags; offsets `[S + 1]`: cut to the ids, none below the one
        before, the last one N; and int64 `[]`: how many of both were changed.
    """
    num_ids, num_bags, num_features = ids_N.shape[0], offsets.shape[0] - 1, num_rows_F.shape[0]
    bounds = lax.cummax(positions(offsets, num_ids)).at[-1].set(num_ids)
    changed = jnp.sum(bounds != offsets, dtype=jnp.int32)
    if num_ids and num_bags and num_features:
        if feature_bags is None:
            feature_bags = jnp.arange(num_features + 1, dtype=jnp.int32) * (num_bags // num_features)
        feature_offsets = bounds[positions(feature_bags, num_bags)]
        size_N = of_segments(jnp.minimum(num_rows_F, 2**31 - 1).astype(jnp.int32), feature_offsets, num_ids)
        inside_N = jnp.arange(num_ids, dtype=jnp.int32) >= bounds[0]
        bad_N = inside_N & ((ids_N < -1) | (ids_N >= size_N))
        ids_N = jnp.where(bad_N, 0, ids_N)
        changed = changed + jnp.sum(bad_N, dtype=jnp.int32)
    return [ids_N, bounds.astype(offsets.dtype), changed.astype(jnp.int64)]


def hash_rows(ids_N: jax.Array, size_N: jax.Array, salt: int = 0) -> jax.Array:
    """The hash `mix64` of integers, bit by bit that of `tpurec.features.hashing`, whose text says where it comes from.

    Args:
        ids_N: int32 or int64 `[N]`.
        size_N: integers `[N]`, rows to choose from, below 2**31.
        salt: 0 to 2**64 - 1.

    Returns:
        int32 `[N]` in [0, size).

    Raises:
        ConfigError: 64-bit arithmetic is off.
    """
    _check_64_bits()
    low = jnp.uint64(0xFFFFFFFF)
    mixed = _mix(ids_N.astype(jnp.int64).astype(jnp.uint64) ^ _mix(jnp.uint64(salt & _MASK_64)))
    size_N = size_N.astype(jnp.uint64)
    rows_N = ((mixed >> jnp.uint64(32)) * size_N + ((mixed & low) * size_N >> jnp.uint64(32))) >> jnp.uint64(32)
    return rows_N.astype(jnp.int32)


def _check_64_bits() -> None:
    if not jax.config.jax_enable_x64:
        raise ConfigError("the hash needs 64-bit arithmetic.", "Call it under jax.enable_x64(True).")


def _mix(value: jax.Array) -> jax.Array:
    value = (value ^ (value >> jnp.uint64(30))) * jnp.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> jnp.uint64(27))) * jnp.uint64(0x94D049BB133111EB)
    return value ^ (value >> jnp.uint64(31))
