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
        self._state_layouts = [
            layout_for(device, stack.num_rows, stack.width, self.compute_dtype, what)
            if kind == "element"
            else OnePerRow(stack.num_rows, self.compute_dtype, packed=device.type == "tpu")
            for _, kind in stack.optimizer.states
        ]
        # As the ops take it: the accumulators, then the number of updates if the optimizer counts them. Replicated rows
        # take steps of their own, and count those.
        accumulators = [layout.allocate(device) for layout in self._state_layouts]
        for tensor in accumulators:
            tensor.fill_(stack.optimizer.initial_accumulator)
        counts = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(2) if stack.optimizer.counts_steps]
        self.state = [*accumulators, *counts[:1]]
        self.replicated_state = [*accumulators, *counts[1:]]
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

    def states(self, place: Place, rank: int, num_embeddings: int) -> dict[str, Tensor]:
        """The optimizer state of those rows, as views.

        Args:
            place: of the stack.
            rank: this rank.
            num_embeddings: rows of the whole table.

        Returns:
            For each of the optimizer's `state_names`: `[rows held, width]`, `[rows held]`, or `[]` for the number of
            updates.
        """
        start, stop = _rows(place, rank, num_embeddings)
        state = self.replicated_state if place.exchange == "local" else self.state
        views = [layout.rows(one, start, stop) for layout, one in zip(self._state_layouts, state, strict=False)]
        return dict(zip(self.stack.optimizer.state_names, [*views, *state[len(views) :]], strict=True))

    def all_rows(self) -> Tensor:
        """All rows, as a view `[num_rows, width]`."""
        return self._layout.rows(self.parts[0], 0, self.stack.num_rows)


def _rows(place: Place, rank: int, num_embeddings: int) -> tuple[int, int]:
    if rank not in place.shard.ranks:
        return 0, 0
    start = place.row_starts[place.shard.ranks.index(rank)]
    return start, start + place.shard.num_rows(rank, num_embeddings)
