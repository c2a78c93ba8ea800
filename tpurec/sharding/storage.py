"""The rows that one rank has of a stack, and their optimizer state."""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.embeddings.layout import OnePerRow
from tpurec.kernels.limits import MAX_TENSOR_BYTES
from tpurec.sharding.cut_rows import CutRows
from tpurec.sharding.placement import Place, Stack


class StackStorage:
    """One rank's part of a stack; values are not defined until they are loaded, accumulators have their initial value.

    Args:
        stack: the stack.
        device: where.
        max_tensor_bytes: on a TPU the rows are cut into tensors of at most this size.

    Raises:
        ConfigError: a width or dtype that a TPU does not take.
    """

    def __init__(self, stack: Stack, device: torch.device, max_tensor_bytes: int = MAX_TENSOR_BYTES) -> None:
        self.stack = stack
        what = f"stack of width {stack.width}"
        self.compute_dtype = torch.promote_types(torch.float32, stack.dtype)
        limit = max_tensor_bytes
        self._cut = CutRows(device, stack.num_rows, stack.width, stack.dtype, limit, what)
        self.parts = self._cut.allocate(device)
        self._state_layouts = [
            CutRows(device, stack.num_rows, stack.width, self.compute_dtype, limit, what)
            if kind == "element"
            else OnePerRow(stack.num_rows, self.compute_dtype, packed=device.type == "tpu")
            for _, kind in stack.optimizer.states
        ]
        # As the ops take it: the accumulators, then the number of updates if the optimizer counts them. Replicated rows
        # take steps of their own, and count those.
        accumulators: list[Tensor] = []
        for layout in self._state_layouts:
            made = layout.allocate(device)
            accumulators += made if isinstance(made, list) else [made]
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

    def weight(self, place: Place, rank: int, num_embeddings: int) -> list[Tensor]:
        """A rank's rows of a place, as views.

        Args:
            place: of the stack.
            rank: this rank.
            num_embeddings: rows of the whole table.

        Returns:
            `[rows, width]`, in order, one for each tensor that they lie in; together the rows held. A rank that is not
            an owner has one view of no rows.
        """
        return self._cut.views(self.parts, *_rows(place, rank, num_embeddings))

    def states(self, place: Place, rank: int, num_embeddings: int) -> dict[str, list[Tensor]]:
        """The optimizer state of those rows, as views.

        Args:
            place: of the stack.
            rank: this rank.
            num_embeddings: rows of the whole table.

        Returns:
            For each of the optimizer's `state_names`, in order: `[rows, width]`, one `[rows held]`, or one `[]` for the
            number of updates.
        """
        start, stop = _rows(place, rank, num_embeddings)
        state = self.replicated_state if place.exchange == "local" else self.state
        found: list[list[Tensor]] = []
        at = 0
        for layout in self._state_layouts:
            if isinstance(layout, CutRows):
                found.append(layout.views(state[at : at + layout.num_tensors], start, stop))
                at += layout.num_tensors
            else:
                found.append([layout.rows(state[at], start, stop)])
                at += 1
        found += [[count] for count in state[at:]]
        return dict(zip(self.stack.optimizer.state_names, found, strict=True))


def _rows(place: Place, rank: int, num_embeddings: int) -> tuple[int, int]:
    if rank not in place.shard.ranks:
        return 0, 0
    start = place.row_starts[place.shard.ranks.index(rank)]
    return start, start + place.shard.num_rows(rank, num_embeddings)
