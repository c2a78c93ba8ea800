"""Distributing ids over buckets (the ranks of a row-wise table), each jagged again. Plain JAX: the specification.

The rule is FBGEMM 1.8's `block_bucketize_sparse_features`: with block size b and n blocks (n = number of buckets k
unless `total_blocks` says more), an id below b n goes to bucket id / (b n / k) as id % (b n / k); any other id, taken
as unsigned, to bucket (id % n) / (n / k) as id / n. With boundaries of its own (`block_positions`), a feature's id
goes where its upper bound is, less that boundary.

Values lie bucket after bucket, in a bucket bag after bag, in a bag in their order: one sort by bucket and position,
since bags are in order already. Both are one word of 32 bits where K * N allows it, which halves what the compiler
needs for the sort. All that an id takes along is sorted with it, and a second sort leads back, as a TensorCore gathers
and scatters word by word.

Legend: F features, S bags of all features, K buckets, N ids (capacity).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.kernels.jagged_positions import (
    complete_cumsum,
    of_segments,
    offsets_range,
    padding_of,
    positions,
    segment_of_positions,
)


def block_bucketize(
    lengths_S: jax.Array,
    ids_N: jax.Array,
    block_sizes_F: jax.Array,
    num_buckets: int,
    weights_N: jax.Array | None = None,
    batch_sizes_F: jax.Array | None = None,
    block_positions: Sequence[jax.Array] = (),
    total_blocks_F: jax.Array | None = None,
    keep_ids_F: jax.Array | None = None,
    keep_ids: bool = False,
) -> list[jax.Array]:
    """Distribute the ids of every bag over buckets.

    Args:
        lengths_S: integers `[S]`, feature after feature.
        ids_N: int32 or int64 `[N]`; those behind the sum of the lengths are capacity.
        block_sizes_F: integers `[F]`, F > 0.
        num_buckets: K > 0.
        weights_N: `[N, ...]` or None.
        batch_sizes_F: integers `[F]`, bags of each feature; None for S / F.
        block_positions: empty, or for each feature integers `[K + 1]` ascending from 0: bucket boundaries.
        total_blocks_F: integers `[F]`, multiples of K; None for K.
        keep_ids_F: bool `[F]`, in place of `keep_ids`; None for the same for all.
        keep_ids: leave ids as they are instead of numbering them from the bucket's first row.

    Returns:
        Lengths `[K * S]` of the lengths' dtype; ids `[N]`; the place that each had in its bag `[N]` of the ids' dtype;
        where each given id went `[N]` of the ids' dtype (capacity stays at its place); the bucket of each given id
        `[N]` of the ids' dtype (-1 for capacity); and, if there are any, weights `[N, ...]`. Capacity is -1 in signed
        integers, 0 in anything else.
    """
    num_ids, num_bags = ids_N.shape[0], lengths_S.shape[0]
    if num_ids == 0 or num_bags == 0:
        return _nothing(lengths_S, ids_N, num_buckets, weights_N)
    offsets = positions(complete_cumsum(lengths_S), num_ids)
    bag_N, used_N = segment_of_positions(offsets, num_ids)
    feature_bags = _feature_bags(batch_sizes_F, num_bags, block_sizes_F.shape[0])
    bucket_N, new_ids_N = _buckets(
        ids_N, offsets[feature_bags], block_sizes_F, num_buckets, block_positions, total_blocks_F, keep_ids_F, keep_ids
    )
    bucket_N = jnp.where(used_N, bucket_N, num_buckets)
    place_N = offsets_range(offsets, num_ids)
    words_N = [weights_N] if weights_N is not None and weights_N.ndim == 1 else []
    sorted_bucket_N, from_N, new_ids_N, place_N, bag_N, *words_N = _by_bucket(
        bucket_N, num_buckets, (new_ids_N, place_N, bag_N, *words_N)
    )
    filled_N = sorted_bucket_N < num_buckets
    target_N = jnp.where(filled_N, sorted_bucket_N * num_bags + bag_N, num_buckets * num_bags)
    new_lengths = jnp.zeros(num_buckets * num_bags, lengths_S.dtype)
    new_lengths = new_lengths.at[target_N].add(1, mode="drop", indices_are_sorted=True)
    went_N = lax.sort((from_N, jnp.arange(num_ids, dtype=jnp.int32)), num_keys=1, is_stable=False)[1]
    padding = padding_of(ids_N.dtype)
    results = [
        new_lengths,
        jnp.where(filled_N, new_ids_N, padding),
        jnp.where(filled_N, place_N, padding).astype(ids_N.dtype),
        went_N.astype(ids_N.dtype),
        jnp.where(used_N, bucket_N, -1).astype(ids_N.dtype),
    ]
    if weights_N is not None:
        filled = filled_N.reshape(-1, *(1,) * (weights_N.ndim - 1))
        moved = words_N[0] if words_N else weights_N[from_N]
        results.append(jnp.where(filled, moved, jnp.array(padding_of(weights_N.dtype), weights_N.dtype)))
    return results


def _by_bucket(bucket_N: jax.Array, num_buckets: int, payload: Sequence[jax.Array]) -> list[jax.Array]:
    """Buckets, where each id was, and what goes with it, by bucket and in their order."""
    num_ids = bucket_N.shape[0]
    from_N = jnp.arange(num_ids, dtype=jnp.int32)
    if (num_buckets + 1) * num_ids >= 2**31:
        return list(lax.sort((bucket_N, from_N, *payload), num_keys=2, is_stable=False))
    key_N, *payload = lax.sort((bucket_N * num_ids + from_N, *payload), num_keys=1, is_stable=False)
    bucket_N = key_N // num_ids
    return [bucket_N, key_N - bucket_N * num_ids, *payload]


def _nothing(lengths_S: jax.Array, ids_N: jax.Array, num_buckets: int, weights_N: jax.Array | None) -> list[jax.Array]:
    padding = jnp.full(ids_N.shape, padding_of(ids_N.dtype), ids_N.dtype)
    in_place = jnp.arange(ids_N.shape[0], dtype=ids_N.dtype)
    new_lengths = jnp.zeros(num_buckets * lengths_S.shape[0], lengths_S.dtype)
    results = [new_lengths, padding, padding, in_place, jnp.full(ids_N.shape, -1, ids_N.dtype)]
    return results if weights_N is None else [*results, jnp.full_like(weights_N, padding_of(weights_N.dtype))]


def _feature_bags(batch_sizes_F: jax.Array | None, num_bags: int, num_features: int) -> jax.Array:
    """The bag that each feature begins with, int32 `[F + 1]`; bags behind the last full feature belong to none."""
    if batch_sizes_F is None:
        return jnp.arange(num_features + 1, dtype=jnp.int32) * (num_bags // num_features)
    return positions(complete_cumsum(batch_sizes_F), num_bags)


def _buckets(
    ids_N: jax.Array,
    feature_offsets: jax.Array,
    block_sizes_F: jax.Array,
    num_buckets: int,
    block_positions: Sequence[jax.Array],
    total_blocks_F: jax.Array | None,
    keep_ids_F: jax.Array | None,
    keep_ids: bool,
) -> tuple[jax.Array, jax.Array]:
    """The bucket of every id, int32 `[N]`, and its number there, `[N]` of the ids' dtype."""
    num_ids = ids_N.shape[0]
    unsigned = jnp.uint64 if ids_N.dtype.itemsize == 8 else jnp.uint32
    id_N = ids_N.astype(unsigned)
    block_N = of_segments(block_sizes_F.astype(unsigned), feature_offsets, num_ids)
    if total_blocks_F is None:
        blocks_N, per_bucket_N = jnp.array(num_buckets, unsigned), jnp.array(1, unsigned)
    else:
        blocks_N = jnp.maximum(of_segments(total_blocks_F.astype(unsigned), feature_offsets, num_ids), 1)
        per_bucket_N = jnp.maximum(blocks_N // jnp.array(num_buckets, unsigned), 1)
    if block_positions:
        bucket_N, new_ids_N = _by_positions(id_N, feature_offsets, block_N, blocks_N, num_buckets, block_positions)
    else:
        # The product wraps in the ids' width, as FBGEMM's does.
        in_blocks_N = id_N < block_N * blocks_N
        rows_N = jnp.maximum(block_N * per_bucket_N, 1)
        bucket_N = jnp.where(in_blocks_N, id_N // rows_N, id_N % blocks_N // per_bucket_N)
        new_ids_N = jnp.where(in_blocks_N, id_N % rows_N, id_N // blocks_N)
    if keep_ids_F is not None:
        kept_N = of_segments(keep_ids_F.astype(jnp.int32), feature_offsets, num_ids) > 0
        new_ids_N = jnp.where(kept_N, id_N, new_ids_N)
    elif keep_ids:
        new_ids_N = id_N
    bucket_N = jnp.minimum(bucket_N, jnp.array(num_buckets - 1, unsigned)).astype(jnp.int32)
    return bucket_N, new_ids_N.astype(ids_N.dtype)


def _by_positions(
    id_N: jax.Array,
    feature_offsets: jax.Array,
    block_N: jax.Array,
    blocks_N: jax.Array,
    num_buckets: int,
    block_positions: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """By each feature's boundaries; a binary search in all features' boundaries, which lie behind one another."""
    num_ids, unsigned = id_N.shape[0], id_N.dtype
    sizes = [array.shape[0] for array in block_positions]
    flat = jnp.concatenate(block_positions).astype(unsigned)
    starts = jnp.array([sum(sizes[:feature]) for feature in range(len(sizes))], jnp.int32)
    start_N = of_segments(starts, feature_offsets, num_ids)
    size_N = of_segments(jnp.array(sizes, jnp.int32), feature_offsets, num_ids)
    last_N = flat[jnp.clip(start_N + size_N - 1, 0, flat.shape[0] - 1)]
    # A block size of 0: the table takes ids of any size, spread over its rows by their remainder.
    probe_N = jnp.where(block_N == 0, id_N % blocks_N * last_N // blocks_N, id_N)
    low_N, high_N = jnp.zeros(num_ids, jnp.int32), size_N
    for _ in range(max(sizes).bit_length()):
        middle_N = (low_N + high_N) // 2
        above_N = flat[jnp.clip(start_N + middle_N, 0, flat.shape[0] - 1)] > probe_N
        open_N = low_N < high_N
        high_N = jnp.where(open_N & above_N, middle_N, high_N)
        low_N = jnp.where(open_N & ~above_N, middle_N + 1, low_N)
    bound_N = jnp.maximum(low_N - 1, 0)
    within_N = bound_N < num_buckets
    buckets = jnp.array(num_buckets, unsigned)
    bucket_N = jnp.where(within_N, bound_N.astype(unsigned), id_N % buckets)
    begin_N = flat[jnp.clip(start_N + bound_N, 0, flat.shape[0] - 1)]
    new_ids_N = jnp.where(within_N, id_N - begin_N, id_N // buckets)
    return bucket_N, jnp.where(block_N == 0, id_N // blocks_N, new_ids_N)
