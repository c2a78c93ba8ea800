"""FBGEMM's names for choosing rows and bags, and for distinct ids, on `tpu` tensors; the rules: `fbgemm_names.py`.

Arguments and results are those of the FBGEMM op of the same name (its schema says them all).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.fbgemm_host import check, read_scalar
from tpurec.ops.jagged_offsets import complete_cumsum
from tpurec.ops.jagged_permute import permute_jagged, permute_jagged_grad, select_bags
from tpurec.ops.jagged_unique import unique_ids
from tpurec.ops.row_blocks import check_sizes, select_rows


def keyed_index_select(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
    selected_lengths_sum: int | None = None,
) -> list[Tensor]:
    """`fbgemm::keyed_jagged_index_select_dim1`."""
    if selected_lengths_sum is None:
        chosen = lengths.view(-1, batch_size).index_select(1, indices) if batch_size else lengths
        selected_lengths_sum = read_scalar(chosen.sum()) if chosen.numel() else 0
    return select_bags(values, lengths, indices, weights, batch_size, selected_lengths_sum)


def jagged_index_select_2d(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_output_rows: int | None = None,
) -> Tensor:
    """`fbgemm::jagged_index_select_2d_forward_v2`."""
    if num_dense_output_rows is None:
        num_dense_output_rows = read_scalar(output_offsets[-1]) if output_offsets.numel() else 0
    return permute_jagged(indices, _lengths(input_offsets), values.contiguous(), None, num_dense_output_rows)[1]


def jagged_index_add_2d(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_output_rows: int,
    num_dense_input_rows: int,
) -> Tensor:
    """`fbgemm::jagged_index_add_2d_forward_v2`: the gradient of `jagged_index_select`."""
    return permute_jagged_grad(values.contiguous(), indices, _lengths(output_offsets), num_output_rows)


def _lengths(ends: Tensor) -> Tensor:
    """FBGEMM's offsets of rows here have no 0 in front."""
    return torch.diff(ends, prepend=ends.new_zeros(1))


def group_index_select(input_group: list[Tensor], indices_group: list[Tensor]) -> list[Tensor]:
    """`fbgemm::group_index_select_dim0`."""
    pairs = zip(input_group, indices_group, strict=True)
    return [tensor.index_select(0, indices) for tensor, indices in pairs]


def batch_index_select(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: list[int],
    input_rows: list[int],
    input_columns: list[int],
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """`fbgemm::batch_index_select_dim0`."""
    sizes = [list(given) for given in (input_num_indices, input_rows, input_columns)]
    check_sizes(inputs, indices, *sizes, permute_output_dim_0_1)
    return select_rows(inputs.contiguous(), indices.contiguous(), *sizes, permute_output_dim_0_1)


def jagged_unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fbgemm::jagged_unique_indices`."""
    check(hash_size_cumsum.numel() > 1, f"jagged_unique_indices: hash_size_cumsum {list(hash_size_cumsum.shape)}")
    lengths, distinct, reverse, count = unique_ids(
        hash_size_cumsum.contiguous(), hash_size_offsets.contiguous(), offsets.contiguous(), indices.contiguous()
    )
    # The result has as many ids as there are distinct ones, which the device knows alone.
    size = read_scalar(count) if indices.numel() else 0
    return lengths, complete_cumsum(lengths), distinct[:size], reverse
