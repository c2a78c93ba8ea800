"""The rows that one rank has of a stack, and their optimizer state."""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.embeddings.layout import OnePerRow, layout_for
from tpurec.sharding.placement import Place, Stack


class StackStorage:
    """One rank's part of a stack; values are not defined until they are loaded, accumulators have their initial value.

    Args:
        stack: the stack.
        device: where.
    """

    def __init__(self, stack: Stack, device: torch.device) -> None:
        self.stack = stack
        what = f"stack of width {stack.width}"
        self.compute_dtype = torch.promote_types(torch.float32, stack.dtype)
        layout = layout_for(device, stack.num_rows, stack.width, stack.dtype, what)
        self._layout = layout
        self.parts = [layout.allocate(device)]
        self._state_layout = None
        if stack.optimizer.kind == "adagrad":
            self._state_layout = layout_for(device, stack.num_rows, stack.width, self.compute_dtype, what)
        elif stack.optimizer.kind == "rowwise_adagrad":
            self._state_layout = OnePerRow(stack.num_rows, self.compute_dtype, packed=device.type == "tpu")
        self.state = [] if self._state_layout is None else [self._state_layout.allocate(device)]
        for tensor in self.state:
            tensor.fill_(stack.optimizer.initial_accumulator)
        # What the replicated rows get, summed over ranks before they take their step; the last line takes padding.
        num_lines = stack.num_replicated + 1 if stack.num_replicated else 0
        self.replicated_gradients = torch.zeros(num_lines, stack.width, dtype=self.compute_dtype, device=device)
        # How often each was touched, which only weight decay asks.
        self.replicated_uses = torch.zeros(num_lines, dtype=self.compute_dtype, device=device)

    def weight(self, place: Place, rank: int, num_embeddings: int) -> Tensor:
        """A rank's rows of a place, as a view.

        Args:
            place: of the stack.
            rank: this rank.
            num_embeddings: rows of the whole table.

        Returns:
            `[rows held, width]`; no rows if the rank is not an owner.
        """
        return self._layout.rows(self.parts[0], *_rows(place, rank, num_embeddings))

    def accumulator(self, place: Place, rank: int, num_embeddings: int) -> Tensor | None:
        """The optimizer state of those rows, as a view.

        Args:
            place: of the stack.
            rank: this rank.
            num_embeddings: rows of the whole table.

        Returns:
            `[rows held, width]` or `[rows held]`; None for SGD.
        """
        if self._state_layout is None:
            return None
        return self._state_layout.rows(self.state[0], *_rows(place, rank, num_embeddings))

    def all_rows(self) -> Tensor:
        """All rows, as a view `[num_rows, width]`."""
        return self._layout.rows(self.parts[0], 0, self.stack.num_rows)

    def all_accumulators(self) -> Tensor:
        """All optimizer state, as a view `[num_rows, width]` or `[num_rows]`."""
        return self._state_layout.rows(self.state[0], 0, self.stack.num_rows)


def _rows(place: Place, rank: int, num_embeddings: int) -> tuple[int, int]:
    if rank not in place.shard.ranks:
        return 0, 0
    start = place.row_starts[place.shard.ranks.index(rank)]
    return start, start + place.shard.num_rows(rank, num_embeddings)
