"""Where the rows of a stack lie in memory: plain `[num_rows, dim]`, or packed as the TPU kernels want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tpurec.errors import ConfigError
from tpurec.kernels.limits import problem_of_rows


class Layout(Protocol):
    """How the rows of a stack, or one number for each of them, become a tensor."""

    num_rows: int
    dtype: torch.dtype
    packed: bool  # as a TPU has it

    def allocate(self, device: torch.device) -> Tensor:
        """A tensor for all rows; their values are not defined.

        Args:
            device: where.
        """

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Some rows as a view `[stop - start, dim]`, or `[stop - start]`.

        Args:
            tensor: as of `allocate`.
            start: first row.
            stop: the row behind the last.
        """


class Plain:
    """`[num_rows, dim]` as it is; for every device but a TPU.

    Args:
        num_rows: rows of the stack.
        dim: columns.
        dtype: of the values.
    """

    packed = False

    def __init__(self, num_rows: int, dim: int, dtype: torch.dtype) -> None:
        self.num_rows, self.dim, self.dtype = num_rows, dim, dtype

    def allocate(self, device: torch.device) -> Tensor:
        """As `Layout.allocate`."""
        return torch.empty(self.num_rows, self.dim, dtype=self.dtype, device=device)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """As `Layout.rows`."""
        return tensor[start:stop]


class Packed:
    """Lines of 128 words, as `tpurec.kernels.storage.Storage` lays rows out; for TPUs.

    Args:
        num_rows: rows of the stack.
        dim: columns.
        dtype: float32, or bfloat16, which is held as pairs in int32 words.
        what: names the stack in errors.

    Raises:
        ConfigError: a dim, dtype or size that the kernels, or one tensor of a TPU, cannot take.
    """

    packed = True

    def __init__(self, num_rows: int, dim: int, dtype: torch.dtype, what: str) -> None:
        from tpurec.kernels.storage import Storage

        self.num_rows, self.dim, self.dtype = num_rows, dim, dtype
        name = str(dtype).removeprefix("torch.")
        refused = problem_of_rows(dim, name)
        if refused is not None:
            raise ConfigError(f"{what}: {refused[0]}", refused[1])
        self.storage = Storage(num_rows, dim, name)
        if self.storage.num_parts > 1:
            raise ConfigError(
                f"{what}: {self.storage.num_bytes / 2**30:.1f} GiB; one tensor of a TPU takes "
                f"{self.storage.max_part_bytes / 2**30:.0f} GiB, and a table that is whole is one tensor.",
                "Spread the table over workers (--workers), or use bfloat16 or an optimizer with less state.",
            )

    def allocate(self, device: torch.device) -> Tensor:
        """As `Layout.allocate`."""
        dtype = torch.float32 if self.dtype == torch.float32 else torch.int32
        return torch.zeros(self.storage.part_shape, dtype=dtype, device=device)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """As `Layout.rows`."""
        values = tensor if tensor.dtype == self.dtype else tensor.view(self.dtype)
        return values.view(-1)[start * self.dim : stop * self.dim].view(stop - start, self.dim)


class OnePerRow:
    """One number per row, `[num_rows]`; for TPUs with room behind the last, as the kernels want it.

    Args:
        num_rows: rows of the stack.
        dtype: of the numbers.
        packed: with that room.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype, packed: bool) -> None:
        self.num_rows, self.dtype, self.packed = num_rows, dtype, packed
        self._entries = num_rows
        if packed:
            from tpurec.kernels.optimizers import rowwise_entries

            self._entries = rowwise_entries(num_rows)

    def allocate(self, device: torch.device) -> Tensor:
        """As `Layout.allocate`."""
        return torch.zeros(self._entries, dtype=self.dtype, device=device)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """As `Layout.rows`."""
        return tensor[start:stop]


def layout_for(device: torch.device, num_rows: int, dim: int, dtype: torch.dtype, what: str) -> Layout:
    """The layout of a stack on a device.

    Args:
        device: where the stack is.
        num_rows: its rows.
        dim: its columns.
        dtype: of its values.
        what: names the stack in errors.

    Returns:
        The layout.

    Raises:
        ConfigError: the device cannot hold such a stack.
    """
    if device.type == "tpu":
        return Packed(num_rows, dim, dtype, what)
    return Plain(num_rows, dim, dtype)


def convert(tensor: Tensor, before: Layout, after: Layout, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Move or convert the rows of a stack from one layout to another.

    Args:
        tensor: in the layout `before`.
        before: the layout that the tensor has.
        after: the layout that the result is to have.
        function: moves a tensor to the other device, or converts it there, as `Module.to` does.

    Returns:
        The tensor in the layout `after`; repacking happens on the side that is not a TPU.
    """
    if after.packed and not before.packed:
        return function(_repacked(tensor, before, after))
    if before.packed and not after.packed:
        return _repacked(function(tensor), before, after)
    return function(tensor)


def _repacked(tensor: Tensor, before: Layout, after: Layout) -> Tensor:
    result = after.allocate(tensor.device)
    after.rows(result, 0, after.num_rows).copy_(before.rows(tensor, 0, before.num_rows))
    return result
