"""Rows that are cut into several tensors, as many as a TPU needs: one operand of a SparseCore kernel is limited.

The ops take all tensors of a storage together and count its rows through (`tpurec.kernels.storage`), so neither ids nor
places change. What is cut are the views: rows of one table may lie in several tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.embeddings.layout import layout_for
from tpurec.kernels.limits import rows_per_tensor


class CutRows:
    """How the rows of a stack, or an accumulator for each of their elements, become tensors.

    Args:
        device: where; only a TPU's are cut.
        num_rows: rows of the stack.
        width: columns.
        dtype: of the values.
        max_tensor_bytes: largest tensor.
        what: names the stack in errors.

    Raises:
        ConfigError: a width or dtype that the kernels do not take.
    """

    def __init__(
        self, device: torch.device, num_rows: int, width: int, dtype: torch.dtype, max_tensor_bytes: int, what: str
    ) -> None:
        self._num_rows, self._rows = num_rows, num_rows
        if device.type == "tpu":
            layout_for(device, 1, width, dtype, what)  # refuses what the kernels do not take
            self._rows = rows_per_tensor(num_rows, width * dtype.itemsize, max_tensor_bytes)
        self._layout = layout_for(device, self._rows, width, dtype, what)

    @property
    def num_tensors(self) -> int:
        """How many tensors, all of one shape."""
        return -(-self._num_rows // self._rows)

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Make them; their values are not defined.

        Args:
            device: where.

        Returns:
            `num_tensors` tensors.
        """
        return [self._layout.allocate(device) for _ in range(self.num_tensors)]

    def views(self, tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
        """Some rows, in order.

        Args:
            tensors: as of `allocate`.
            start: first row.
            stop: the row behind the last.

        Returns:
            Views `[rows, width]`, one for each tensor that has some of the rows; of no rows one without any.
        """
        if start == stop:
            return [self._layout.rows(tensors[0], 0, 0)]
        found = []
        for number in range(start // self._rows, -(-stop // self._rows)):
            first = number * self._rows
            begin, end = max(start, first) - first, min(stop, first + self._rows) - first
            found.append(self._layout.rows(tensors[number], begin, end))
        return found
