"""`tpurec::select_rows`: rows of several matrices that lie one behind the other in one tensor.

TorchRec gives every example its pooled vector with this where features have batch sizes of their own. The specification
is `tpurec/kernels/row_blocks.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_integers


@torch.library.custom_op("tpurec::select_rows", mutates_args=(), device_types="cpu")
def select_rows(
    inputs: Tensor,
    indices: Tensor,
    num_indices: list[int],
    num_rows: list[int],
    num_columns: list[int],
    side_by_side: bool = False,
) -> Tensor:
    """Choose rows of each matrix.

    Args:
        inputs: `[sum of num_rows * num_columns]`, the matrices row by row, one behind the other. Differentiable if
            floating.
        indices: int32 or int64 `[sum of num_indices]`, within each matrix; rows may repeat.
        num_indices: of each matrix; they may be 0.
        num_rows: of each matrix.
        num_columns: of each matrix.
        side_by_side: the results are the columns of one matrix instead of one behind the other.

    Returns:
        `[sum of num_indices * num_columns]`, row by row.

    Raises:
        ValueError: sizes that do not fit, or with `side_by_side` different `num_indices`.
        IndexError: on the CPU: a row that is not there. On a device it is 0.
    """
    check_sizes(inputs, indices, num_indices, num_rows, num_columns, side_by_side)
    if not num_indices:
        return inputs.clone()
    _check_rows(indices, num_indices, num_rows)
    parts = [
        matrix.index_select(0, chosen)
        for matrix, chosen in zip(_matrices(inputs, num_rows, num_columns), indices.split(num_indices), strict=True)
    ]
    return torch.cat(parts, 1).view(-1) if side_by_side else torch.cat([part.view(-1) for part in parts])


@select_rows.register_fake
def _(
    inputs: Tensor,
    indices: Tensor,
    num_indices: list[int],
    num_rows: list[int],
    num_columns: list[int],
    side_by_side: bool = False,
) -> Tensor:
    check_sizes(inputs, indices, num_indices, num_rows, num_columns, side_by_side)
    return inputs.new_empty(_size(num_indices, num_columns))


@torch.library.custom_op("tpurec::select_rows_grad", mutates_args=(), device_types="cpu")
def select_rows_grad(
    grad: Tensor,
    indices: Tensor,
    num_indices: list[int],
    num_rows: list[int],
    num_columns: list[int],
    side_by_side: bool,
) -> Tensor:
    """Gradient of `select_rows` with respect to the matrices.

    Args:
        grad: `[sum of num_indices * num_columns]`.
        indices: as of `select_rows`.
        num_indices: as of `select_rows`.
        num_rows: as of `select_rows`.
        num_columns: as of `select_rows`.
        side_by_side: as of `select_rows`.

    Returns:
        `[sum of num_rows * num_columns]`: what a row receives several times adds up.

    Raises:
        IndexError: on the CPU: a row that is not there.
    """
    if not num_indices:
        return grad.clone()
    _check_rows(indices, num_indices, num_rows)
    if side_by_side:
        parts = grad.view(num_indices[0], sum(num_columns)).split(num_columns, 1)
    else:
        parts = _matrices(grad, num_indices, num_columns)
    result = grad.new_zeros(_size(num_rows, num_columns))
    for sums, part, chosen in zip(
        _matrices(result, num_rows, num_columns), parts, indices.split(num_indices), strict=True
    ):
        sums.index_add_(0, chosen, part)
    return result


@select_rows_grad.register_fake
def _(
    grad: Tensor,
    indices: Tensor,
    num_indices: list[int],
    num_rows: list[int],
    num_columns: list[int],
    side_by_side: bool,
) -> Tensor:
    return grad.new_empty(_size(num_rows, num_columns))


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    _, indices, *ctx.sizes = inputs
    ctx.save_for_backward(indices)


def _backward(ctx, grad: Tensor) -> tuple:
    return select_rows_grad(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes), None, None, None, None, None


select_rows.register_autograd(_backward, setup_context=_setup_context)


def check_sizes(
    inputs: Tensor,
    indices: Tensor,
    num_indices: list[int],
    num_rows: list[int],
    num_columns: list[int],
    side_by_side: bool,
) -> None:
    """Refuse sizes that do not fit each other; looks at no values.

    Args:
        inputs: as of `select_rows`.
        indices: as of `select_rows`.
        num_indices: as of `select_rows`.
        num_rows: as of `select_rows`.
        num_columns: as of `select_rows`.
        side_by_side: as of `select_rows`.

    Raises:
        ValueError: naming the argument, its size, and what is expected.
    """
    check_integers("indices", indices)
    if not len(num_indices) == len(num_rows) == len(num_columns):
        sizes = f"{len(num_indices)}, {len(num_rows)} and {len(num_columns)}"
        raise ValueError(f"num_indices, num_rows and num_columns: {sizes} numbers; one a matrix is expected")
    if indices.shape[0] != sum(num_indices):
        raise ValueError(f"indices: {indices.shape[0]}; num_indices add up to {sum(num_indices)}")
    if inputs.dim() != 1 or inputs.shape[0] != _size(num_rows, num_columns):
        raise ValueError(f"inputs: {list(inputs.shape)}; the matrices have [{_size(num_rows, num_columns)}] numbers")
    if side_by_side and len(set(num_indices)) > 1:
        raise ValueError(f"num_indices: {num_indices}; side by side all matrices give the same number of rows")


def _size(num_rows: list[int], num_columns: list[int]) -> int:
    return sum(rows * columns for rows, columns in zip(num_rows, num_columns, strict=True))


def _matrices(flat: Tensor, num_rows: list[int], num_columns: list[int]) -> list[Tensor]:
    shapes = list(zip(num_rows, num_columns, strict=True))
    return [part.view(shape) for part, shape in zip(flat.split([r * c for r, c in shapes]), shapes, strict=True)]


def _check_rows(indices: Tensor, num_indices: list[int], num_rows: list[int]) -> None:
    for place, (chosen, rows) in enumerate(zip(indices.split(num_indices), num_rows, strict=True)):
        if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < rows):
            found = f"from {int(chosen.min())} to {int(chosen.max())}"
            raise IndexError(f"indices: of matrix {place} go {found}; it has {rows} rows")
