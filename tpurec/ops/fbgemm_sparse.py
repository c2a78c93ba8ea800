"""FBGEMM's names for offsets, permutations, buckets and bounds on `tpu` tensors; `fbgemm_names.py` says by which rules.

Arguments and results are those of the FBGEMM op of the same name (its schema says them all).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpurec.ops import jagged_offsets
from tpurec.ops.fbgemm_host import check, read_scalar
from tpurec.ops.jagged_bounds import fix_bounds
from tpurec.ops.jagged_bucketize import block_bucketize
from tpurec.ops.jagged_permute import expand_permute, invert_permute, permute_jagged
from tpurec.ops.jagged_segments import segment_sum

_FATAL, _WARNING = 0, 1  # FBGEMM's BoundsCheckMode


def complete_cumsum(t_in: Tensor) -> Tensor:
    """`fbgemm::asynchronous_complete_cumsum`."""
    check(t_in.dim() in (1, 2), f"asynchronous_complete_cumsum: {t_in.dim()} dimensions; 1 or 2 are expected")
    if t_in.dtype not in (torch.int32, torch.int64):
        return torch.nn.functional.pad(t_in.cumsum(-1, dtype=t_in.dtype), (1, 0))
    return jagged_offsets.complete_cumsum(t_in.contiguous())


def inclusive_cumsum(t_in: Tensor) -> Tensor:
    """`fbgemm::asynchronous_inclusive_cumsum`."""
    return complete_cumsum(t_in.reshape(-1))[1:].reshape(t_in.shape)


def exclusive_cumsum(t_in: Tensor) -> Tensor:
    """`fbgemm::asynchronous_exclusive_cumsum`."""
    return complete_cumsum(t_in.reshape(-1))[:-1].reshape(t_in.shape)


def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """`fbgemm::offsets_range`."""
    return jagged_offsets.offsets_range(offsets.contiguous(), range_size)


def lengths_range(t_in: Tensor, shape: list[int] | None = None) -> Tensor:
    """`fbgemm::lengths_range`; the shape, if it is given, says how many results there are, in one dimension."""
    ends = complete_cumsum(t_in.reshape(-1))
    size = read_scalar(ends[-1]) if shape is None else math.prod(shape)
    return offsets_range(ends, size)


def segment_sum_csr(batch_size: int, csr_seg: Tensor, values: Tensor) -> Tensor:
    """`fbgemm::segment_sum_csr`."""
    return segment_sum(values.contiguous(), csr_seg.contiguous() * batch_size)


# Permutations


def permute_1d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`fbgemm::permute_1D_sparse_data`."""
    check(lengths.dim() == 1, f"permute_1D_sparse_data: lengths {list(lengths.shape)}; one dimension is expected")
    return _permute(permute, lengths, values, weights, permuted_lengths_sum)


def permute_2d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`fbgemm::permute_2D_sparse_data`."""
    check(lengths.dim() == 2, f"permute_2D_sparse_data: lengths {list(lengths.shape)}; two dimensions are expected")
    return _permute(permute, lengths, values, weights, permuted_lengths_sum)


def permute_2d_input1d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    stride: int,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`fbgemm::permute_2D_sparse_data_input1D`."""
    new_lengths, *rest = _permute(permute, lengths.view(-1, stride), values, weights, permuted_lengths_sum)
    return new_lengths.view(-1), *rest


def _permute(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if capacity is None:
        sizes = lengths if lengths.dim() == 1 else lengths.sum(1)
        capacity = read_scalar(sizes.index_select(0, permute).sum()) if permute.numel() and lengths.numel() else 0
    weights = weights if weights is None else weights.contiguous()
    new = permute_jagged(permute.contiguous(), lengths.contiguous(), values.contiguous(), weights, capacity)
    return new[0], new[1], new[2] if weights is not None else None


def expand(permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: int) -> Tensor:
    """`fbgemm::expand_into_jagged_permute`."""
    return expand_permute(permute.contiguous(), input_offset.contiguous(), output_offset.contiguous(), output_size)


def invert(permute: Tensor) -> Tensor:
    """`fbgemm::invert_permute`."""
    return invert_permute(permute.contiguous())


# Row-wise buckets


def bucketize(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: list[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`fbgemm::block_bucketize_sparse_features`."""
    return bucketize_with_mapping(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights,
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        True,
        keep_orig_idx,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )[:5]


def bucketize_with_mapping(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: list[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`fbgemm::block_bucketize_sparse_features_inference`."""
    new_lengths, ids, places, went, buckets, *moved = block_bucketize(
        lengths.reshape(-1),
        indices.contiguous(),
        block_sizes,
        my_size,
        weights if weights is None else weights.contiguous(),
        batch_size_per_feature,
        block_bucketize_pos or [],
        total_num_blocks,
        keep_orig_idx_per_feature,
        keep_orig_idx,
    )
    return (
        new_lengths,
        ids,
        moved[0] if moved else None,
        places if bucketize_pos else None,
        went if sequence else None,
        buckets if sequence and return_bucket_mapping else None,
    )


def bucketize_2d_weights(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor,
    weights_dim: int = 1,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: list[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`fbgemm::block_bucketize_sparse_features_2d_weights`."""
    check(weights.shape == (indices.shape[0], weights_dim), f"weights: {list(weights.shape)} for {weights_dim} columns")
    return bucketize(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights,
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        keep_orig_idx,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )


def bounds_check(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    max_B: int = -1,
    b_t_map: Tensor | None = None,
    info_B_num_bits: int = -1,
    info_B_mask: int = -1,
    bounds_check_version: int = 1,
    prefetch_pipeline: bool = False,
) -> None:
    """`fbgemm::bounds_check_indices`."""
    new_indices, new_offsets, changed = fix_bounds(rows_per_table, indices, offsets, B_offsets)
    if bounds_check_mode == _FATAL:
        found = read_scalar(changed)
        check(not found, f"bounds_check_indices: {found} ids or offsets are out of bounds")
        return
    indices.copy_(new_indices)
    offsets.copy_(new_offsets)
    if bounds_check_mode == _WARNING:
        warning.add_(changed)
