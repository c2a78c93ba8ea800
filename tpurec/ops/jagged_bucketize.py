"""`tpurec::block_bucketize`: ids of row-wise tables, bucket after bucket (one bucket per rank).

The specification is `tpurec/kernels/jagged_bucketize.py`, whose rule is FBGEMM's. The results are as long as the ids:
no capacity is needed.
"""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_integers
from tpurec.ops.jagged_permute import padding_of


@torch.library.custom_op("tpurec::block_bucketize", mutates_args=(), device_types="cpu")
def block_bucketize(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    weights: Tensor | None,
    batch_sizes: Tensor | None,
    block_positions: list[Tensor],
    total_blocks: Tensor | None,
    keep_ids_of: Tensor | None,
    keep_ids: bool,
) -> list[Tensor]:
    """Distribute the ids of every bag over buckets.

    Args:
        lengths: int32 or int64 `[S]`, feature after feature.
        ids: int32 or int64 `[N]`; those behind the sum of the lengths are capacity.
        block_sizes: int32 or int64 `[F]`: rows of a bucket.
        num_buckets: K.
        weights: floats `[N, ...]` or None. Differentiable.
        batch_sizes: int32 or int64 `[F]`: bags of each feature, adding up to S; None for S / F each.
        block_positions: empty, or for each feature int32 or int64 `[K + 1]`, ascending from 0: bucket boundaries.
        total_blocks: int32 or int64 `[F]`, multiples of K; None for K.
        keep_ids_of: bool `[F]`, in place of `keep_ids`; None for the same for all.
        keep_ids: leave ids as they are instead of numbering them from the bucket's first row.

    Returns:
        Lengths `[K * S]` of the lengths' dtype; of the ids' dtype ids `[N]`, the place that each had in its bag `[N]`,
        where each given id went `[N]` (what undoes the distribution; capacity stays at its place) and the bucket of
        each given id `[N]`; and, if there are any, weights `[N, ...]`. Capacity is -1.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: lengths that add up to more than there are ids. On a device they are cut.
    """
    _check(lengths, ids, block_sizes, num_buckets, weights, batch_sizes, block_positions, total_blocks, keep_ids_of)
    used = int(lengths.sum())
    if used > ids.shape[0] or bool((lengths < 0).any()):
        raise IndexError(f"lengths: add up to {used} (none may be negative); there are {ids.shape[0]} ids")
    if batch_sizes is not None and int(batch_sizes.sum()) != lengths.shape[0]:
        raise ValueError(f"batch_sizes: add up to {int(batch_sizes.sum())}; there are {lengths.shape[0]} lengths")
    for positions in block_positions:
        if int(positions[0]) != 0 or bool((positions.diff() < 0).any()):
            raise ValueError(f"block_positions: {positions.tolist()}; ascending from 0 is expected")
    # FBGEMM takes weights of one dimension, and moves nothing but them: here their places are moved instead.
    new_lengths, new_ids, _, places, went, buckets = torch.ops.fbgemm.block_bucketize_sparse_features_inference(
        lengths.contiguous(),
        ids[:used].contiguous(),
        True,
        True,
        block_sizes.to(ids.dtype),
        num_buckets,
        None,
        None if batch_sizes is None else batch_sizes.to(lengths.dtype),
        -1 if batch_sizes is None else int(batch_sizes.max()),
        [positions.to(ids.dtype) for positions in block_positions] or None,
        True,
        keep_ids,
        None if total_blocks is None else total_blocks.to(ids.dtype),
        keep_ids_of,
    )
    capacity = ids.new_full((ids.shape[0] - used,), padding_of(ids.dtype))
    stays = torch.arange(used, ids.shape[0], dtype=ids.dtype)
    behind = (capacity, capacity, stays, torch.full_like(stays, -1))
    found = (new_ids, places, went, buckets)
    results = [new_lengths, *(torch.cat(pair) for pair in zip(found, behind, strict=True))]
    if weights is not None:
        moved = torch.full_like(weights, padding_of(weights.dtype))
        moved[went.long()] = weights[:used]
        results.append(moved)
    return results


@block_bucketize.register_fake
def _(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    weights: Tensor | None,
    batch_sizes: Tensor | None,
    block_positions: list[Tensor],
    total_blocks: Tensor | None,
    keep_ids_of: Tensor | None,
    keep_ids: bool,
) -> list[Tensor]:
    _check(lengths, ids, block_sizes, num_buckets, weights, batch_sizes, block_positions, total_blocks, keep_ids_of)
    results = [lengths.new_empty(num_buckets * lengths.shape[0]), *(torch.empty_like(ids) for _ in range(4))]
    return results if weights is None else [*results, torch.empty_like(weights)]


def _check(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    weights: Tensor | None,
    batch_sizes: Tensor | None,
    block_positions: list[Tensor] | None,
    total_blocks: Tensor | None,
    keep_ids_of: Tensor | None,
) -> None:
    for name, value in (("lengths", lengths), ("ids", ids), ("block_sizes", block_sizes)):
        check_integers(name, value)
    num_features = block_sizes.shape[0]
    for name, value in (("batch_sizes", batch_sizes), ("total_blocks", total_blocks)):
        if value is not None:
            check_integers(name, value)
            if value.shape[0] != num_features:
                raise ValueError(f"{name}: {value.shape[0]} values; there are {num_features} block_sizes")
    if num_buckets < 1 or num_features < 1:
        raise ValueError(f"num_buckets: {num_buckets}, block_sizes: {num_features}; at least one of each is expected")
    if batch_sizes is None and lengths.shape[0] % num_features:
        raise ValueError(f"lengths: {lengths.shape[0]} values are no multiple of the {num_features} features")
    if weights is not None and (weights.dim() < 1 or weights.shape[0] != ids.shape[0]):
        raise ValueError(f"weights: {list(weights.shape)}; there are {ids.shape[0]} ids")
    if keep_ids_of is not None and (keep_ids_of.dtype != torch.bool or keep_ids_of.shape != block_sizes.shape):
        raise ValueError(
            f"keep_ids_of: {keep_ids_of.dtype} {list(keep_ids_of.shape)}; bool [{num_features}] is expected"
        )
    if block_positions:
        sizes = [position.shape[0] for position in block_positions]
        if sizes != [num_buckets + 1] * num_features:
            raise ValueError(f"block_positions: {sizes} values; {num_buckets + 1} for each of {num_features} features")


def _setup_context(ctx, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[3])
    ctx.num_positions = len(inputs[6])


def _backward(ctx, grads: list[Tensor | None]) -> tuple:
    lengths, went = ctx.saved_tensors
    no_positions = [None] * ctx.num_positions
    weights_grad = None
    if ctx.needs_input_grad[4] and grads[5] is not None:
        used = torch.arange(went.shape[0], device=went.device) < lengths.sum()
        taken = grads[5].index_select(0, went)
        weights_grad = torch.where(used.view(-1, *(1,) * (taken.dim() - 1)), taken, 0)
    return None, None, None, None, weights_grad, None, no_positions, None, None, None


block_bucketize.register_autograd(_backward, setup_context=_setup_context)
