"""FBGEMM's names for jagged and dense and for pooled embeddings on `tpu` tensors; the rules are in `fbgemm_names.py`.

Arguments and results are those of the FBGEMM op of the same name (its schema says them all).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops import jagged_dense, pooled_permute
from tpurec.ops.fbgemm_host import check, read_scalar


def to_padded_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    """`fbgemm::jagged_to_padded_dense_forward`."""
    _check_nesting(offsets, len(max_lengths))
    # Inner bags first: each level's rows are the values of the level around it.
    for of_level, max_length in zip(reversed(offsets), reversed(max_lengths), strict=True):
        values = jagged_dense.jagged_to_padded_dense(
            values.contiguous(), of_level.contiguous(), max_length, padding_value
        )
    return values


def to_padded_dense_gradient(grad_output: Tensor, offsets: list[Tensor], total_L: int) -> Tensor:
    """`fbgemm::jagged_to_padded_dense_backward`."""
    return _unpad(grad_output, offsets, total_L)


def to_jagged(dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """`fbgemm::dense_to_jagged_forward`."""
    check(dense.dim() >= len(x_offsets) + 2, f"dense: {list(dense.shape)} for {len(x_offsets)} jagged dimensions")
    return _unpad(dense, x_offsets, read_scalar(x_offsets[-1][-1]) if total_L is None else total_L)


def _unpad(dense: Tensor, x_offsets: list[Tensor], total_L: int) -> Tensor:
    _check_nesting(x_offsets, len(x_offsets))
    sizes = [*(offsets.shape[0] - 1 for offsets in x_offsets[1:]), total_L]
    for offsets, size in zip(x_offsets, sizes, strict=True):
        dense = jagged_dense.dense_to_jagged(dense.contiguous(), offsets.contiguous(), size)
    return dense


def jagged_dense_add(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    """`fbgemm::jagged_dense_elementwise_add`."""
    lengths = list(y.shape[1 : 1 + len(x_offsets)])
    return torch.ops.fbgemm.jagged_to_padded_dense(x_values, x_offsets, lengths, 0.0) + y


def jagged_dense_dense_add(x_values: Tensor, x_offsets: list[Tensor], y_0: Tensor, y_1: Tensor) -> Tensor:
    """`fbgemm::jagged_dense_dense_elementwise_add_jagged_output_forward`."""
    if len(x_offsets) == 1:
        return jagged_dense.jagged_dense_add(x_values.contiguous(), x_offsets[0].contiguous(), y_0 + y_1)
    return x_values + _unpad(y_0 + y_1, x_offsets, x_values.shape[0])


def jagged_dense_add_jagged(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`fbgemm::jagged_dense_elementwise_add_jagged_output`."""
    if len(x_offsets) == 1:
        return jagged_dense.jagged_dense_add(
            x_values.contiguous(), x_offsets[0].contiguous(), y.contiguous()
        ), x_offsets
    return x_values + _unpad(y, x_offsets, x_values.shape[0]), x_offsets


def jagged_dense_multiply(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    """`fbgemm::jagged_dense_elementwise_mul_forward`."""
    if len(x_offsets) == 1:
        return jagged_dense.jagged_dense_multiply(x_values.contiguous(), x_offsets[0].contiguous(), y.contiguous())
    return x_values * _unpad(y, x_offsets, x_values.shape[0])


def jagged_dense_multiply_gradient(
    grad_output: Tensor, x_offsets: list[Tensor], y: Tensor, x_values: Tensor
) -> tuple[Tensor, Tensor]:
    """`fbgemm::jagged_dense_elementwise_mul_backward`."""
    lengths = list(y.shape[1 : 1 + len(x_offsets)])
    return jagged_dense_multiply(grad_output, x_offsets, y), to_padded_dense(grad_output * x_values, x_offsets, lengths)


def _check_nesting(offsets: list[Tensor], levels: int) -> None:
    check(0 < len(offsets) == levels, f"{len(offsets)} offsets for {levels} jagged dimensions")


# Pooled embeddings


def permute_pooled(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """`fbgemm::permute_pooled_embs`, `permute_pooled_embs_split` and `permute_pooled_embs_auto_grad_split`."""
    check(pooled_embs.dim() == 2, f"pooled_embs: {list(pooled_embs.shape)}; two dimensions are expected")
    if pooled_embs.numel() == 0:
        return pooled_embs.clone()
    return pooled_permute.permute_pooled(pooled_embs.contiguous(), offset_dim_list, permute_list, pooled_embs.shape[1])


def permute_duplicate_pooled(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """`fbgemm::permute_duplicate_pooled_embs` and its variants; how many columns there are is read from the device."""
    check(pooled_embs.dim() == 2, f"pooled_embs: {list(pooled_embs.shape)}; two dimensions are expected")
    columns = read_scalar(inv_offset_dim_list[-1])
    return pooled_permute.permute_pooled(pooled_embs.contiguous(), offset_dim_list, permute_list, columns)


def permute_multi(
    pooled_embs: list[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: list[int],
    reverse: bool = False,
) -> list[Tensor]:
    """`fbgemm::permute_multi_embedding_function`."""
    return pooled_permute.permute_multi(
        [tensor.contiguous() for tensor in pooled_embs], permutes, list(out_lengths), reverse
    )


def regroup_arguments(
    embs: Tensor, keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """`fbgemm::kt_regroup_arguments`."""
    _check_keys("kt_regroup_arguments", keys, groups)
    # Names and lengths are the host's; what is made of them goes to the device, a few words a key.
    moves, in_shape, out_shape, out_lengths = torch.ops.fbgemm.kt_regroup_arguments(
        torch.empty(0, 0), keys, lengths, groups
    )
    return moves.to(embs.device), in_shape.to(embs.device), out_shape.to(embs.device), out_lengths


def regroup(
    pooled_embs: list[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> list[Tensor]:
    """`fbgemm::regroup_keyed_tensor`."""
    _check_keys("regroup_keyed_tensor", keys, groups)
    names = [key for of_tensor in keys for key in of_tensor]
    place = {name: number for number, name in enumerate(names)}
    return pooled_permute.regroup(pooled_embs, lengths, [[place[name] for name in group] for group in groups])


def _check_keys(op: str, keys: list[list[str]], groups: list[list[str]]) -> None:
    unknown = sorted({name for group in groups for name in group}.difference(*keys))
    check(not unknown, f"{op}: no tensor has the keys {', '.join(unknown)}")
