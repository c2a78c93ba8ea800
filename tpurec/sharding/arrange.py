"""Where the vectors that come back lie, and where they belong in the collections' outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tpurec.sharding.placement import Stack


class Answers:
    """The bags of one stack that other ranks pool: `num_answers` from every rank, one or several of which make a slot.

    Args:
        stack: the stack.
        num_ranks: ranks of the exchange.
        device: of the vectors.
    """

    def __init__(self, stack: Stack, num_ranks: int, device: torch.device) -> None:
        self._width, self._num_slots, self._num_lines = stack.width, len(stack.bag_slots), num_ranks * stack.num_answers
        slot_of_line = [self._num_slots] * self._num_lines  # behind the last: lines that nobody wants
        line_of_slot = []
        for number, slot in enumerate(stack.bag_slots):
            for owner, answer in zip(slot.owners, slot.answers, strict=True):
                slot_of_line[owner * stack.num_answers + answer] = number
            line_of_slot.append(slot.owners[0] * stack.num_answers + slot.answers[0])
        self._slot_of_line = torch.tensor(slot_of_line, dtype=torch.int64, device=device)
        # What goes back for a line that nobody wants does not matter: its bags are empty.
        self._spread_from = self._slot_of_line.clamp(max=max(0, self._num_slots - 1))
        self._line_of_slot = None
        if all(len(slot.owners) == 1 for slot in stack.bag_slots):
            self._line_of_slot = torch.tensor(line_of_slot, dtype=torch.int64, device=device)

    def gather(self, vectors: Tensor, batch_size: int) -> Tensor:
        """Bring the vectors into the order of the slots; the parts of a split table are added up.

        Args:
            vectors: `[num_ranks, num_answers * batch_size * width]`.
            batch_size: examples.

        Returns:
            `[batch_size, num_slots, width]`.
        """
        lines = vectors.reshape(self._num_lines, batch_size, self._width)
        if self._line_of_slot is not None:
            return lines.transpose(0, 1).index_select(1, self._line_of_slot)
        sums = lines.new_zeros(self._num_slots + 1, batch_size, self._width)
        return sums.index_add_(0, self._slot_of_line, lines)[: self._num_slots].transpose(0, 1)

    def spread(self, gradients: Tensor) -> Tensor:
        """Give every owner the gradients of the slots that it answered for.

        Args:
            gradients: `[batch_size, num_slots, width]`.

        Returns:
            `[num_ranks * num_answers, batch_size, width]`.
        """
        return gradients.transpose(0, 1).index_select(0, self._spread_from)


class Arrangement:
    """The columns of every pooled collection's output, taken from the stacks' slots.

    Each stack has two sources of columns: the slots that owners pool, and those that are pooled here. Sequences are
    arranged elsewhere (`tpurec.sharding.sequences`).

    Args:
        stacks: of the model.
        num_collections: collections of the model.
    """

    def __init__(self, stacks: Sequence[Stack], num_collections: int) -> None:
        self._collections: list[int] = []
        self._shapes: list[tuple[int, int]] = []
        self._columns: list[list[tuple[int, int]]] = []
        parts: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_collections)]
        for stack in stacks:
            for slots in ((), ()) if stack.unpooled else (stack.bag_slots, stack.local_slots):
                source = len(self._shapes)
                self._collections.append(stack.collection)
                self._shapes.append((len(slots), stack.width))
                self._columns.append(_runs([(slot.column, stack.width) for slot in slots]))
                for number, slot in enumerate(slots):
                    parts[stack.collection].append((slot.column, source, number * stack.width, stack.width))
        self._outputs = [_output_runs(sorted(found)) for found in parts]

    def outputs(self, sources: Sequence[Tensor | None], batch_size: int) -> list[Tensor | None]:
        """Put the outputs together.

        Args:
            sources: for each stack its two, `[padded batch size, num_slots, width]`; None where there is no slot.
            batch_size: examples to return.

        Returns:
            For each collection `[batch_size, columns]`; None for those that are not pooled.
        """
        flat = [
            source[:batch_size].flatten(1) if num_slots else None
            for source, (num_slots, _) in zip(sources, self._shapes, strict=True)
        ]
        found: list[Tensor | None] = []
        for runs in self._outputs:
            pieces = [flat[source].narrow(1, start, length) for source, start, length in runs]
            if len(pieces) > 1:
                found.append(torch.cat(pieces, dim=1))
            else:
                found.append(pieces[0].contiguous() if pieces else None)
        return found

    def gradients(
        self,
        grads: Sequence[Tensor | None],
        padded: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[Tensor | None]:
        """Take the outputs' gradients apart.

        Args:
            grads: for each collection `[batch_size, columns]`, or None for zeros.
            padded: examples to return.
            dtypes: of each stack's gradients.
            device: of the gradients.

        Returns:
            For each stack two, `[padded, num_slots, width]`; None where there is no slot.
        """
        found: list[Tensor | None] = []
        for source, (num_slots, width) in enumerate(self._shapes):
            dtype, grad = dtypes[source // 2], grads[self._collections[source]]
            if not num_slots:
                found.append(None)
                continue
            if grad is None:
                found.append(torch.zeros(padded, num_slots, width, dtype=dtype, device=device))
                continue
            pieces = [grad.narrow(1, start, length) for start, length in self._columns[source]]
            joined = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).to(dtype)
            if joined.shape[0] < padded:
                joined = F.pad(joined, (0, 0, 0, padded - joined.shape[0]))
            found.append(joined.reshape(padded, num_slots, width))
        return found


def _runs(columns: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours: (first column, number of columns)."""
    runs: list[tuple[int, int]] = []
    for start, length in columns:
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return runs


def _output_runs(parts: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbours of one source: (source, first column there, number of columns)."""
    runs: list[tuple[int, int, int]] = []
    for _, source, start, length in parts:
        if runs and runs[-1][0] == source and runs[-1][1] + runs[-1][2] == start:
            runs[-1] = (source, runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((source, start, length))
    return runs
