"""Sequence collections on the device: a vector for every id, out of the distinct rows that came, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tpurec.sharding.placement import Stack
from tpurec.sharding.routing import Sizes


def sequence_vectors(rows: Tensor, replicated: Tensor, index: Tensor) -> Tensor:
    """Give every place of a stack's sequences its row.

    Args:
        rows: `[num_ranks * rows, width]`, the distinct rows that came.
        replicated: `[num_replicated_asked, width]`, rows that are here.
        index: int32 `[num_places]`, line of the two together; the line behind the last is zeros.

    Returns:
        `[num_places, width]`.
    """
    lines = torch.cat([rows, replicated.to(rows.dtype), rows.new_zeros(1, rows.shape[1])])
    return lines.index_select(0, index)


class SequenceArrangement:
    """The output of one sequence collection: features one below the other, each with the places that were agreed.

    Tables whose columns are spread come from several stacks, side by side.

    Args:
        stacks: of the model.
        collection: number of the collection.
        dim: columns of its tables.
    """

    def __init__(self, stacks: Sequence[Stack], collection: int, dim: int) -> None:
        self._dim = dim
        parts: dict[int, list[tuple[int, int, int]]] = {}
        self._stacks = [number for number, stack in enumerate(stacks) if stack.collection == collection]
        for number in self._stacks:
            for slot, one in enumerate(stacks[number].local_slots):
                output, column = divmod(one.column, dim)
                parts.setdefault(output, []).append((column, number, slot))
        # For each output its parts from left to right: number of the stack, and of the slot there.
        self._parts = [[(number, slot) for _, number, slot in sorted(parts[output])] for output in sorted(parts)]
        self._widths = [stack.width for stack in stacks]
        # One stack of whole rows has its slots in the order of the outputs.
        self._is_one = len(self._stacks) == 1 and self._widths[self._stacks[0]] == dim

    def capacities(self, sizes: Sequence[Sizes]) -> list[int]:
        """Places of each output.

        Args:
            sizes: of all stacks.

        Returns:
            One number an output; all parts of an output have as many, because they have the same ids.
        """
        return [sizes[number].sequences[slot] for number, slot in (parts[0] for parts in self._parts)]

    def output(self, vectors: Sequence[Tensor | None], sizes: Sequence[Sizes]) -> Tensor:
        """Put the output together.

        Args:
            vectors: of all stacks, `[num_places, width]` of those of the collection.
            sizes: of all stacks.

        Returns:
            `[sum of capacities, dim]`.
        """
        if self._is_one:
            return vectors[self._stacks[0]]
        slots = {number: vectors[number].split_with_sizes(list(sizes[number].sequences)) for number in self._stacks}
        return torch.cat([torch.cat([slots[number][slot] for number, slot in parts], 1) for parts in self._parts])

    def gradients(
        self, grad: Tensor | None, sizes: Sequence[Sizes], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> dict[int, Tensor]:
        """Take the output's gradient apart.

        Args:
            grad: `[sum of capacities, dim]`, or None for zeros.
            sizes: of all stacks.
            dtypes: of all stacks' gradients.
            device: of the gradients.

        Returns:
            For the number of each stack of the collection `[num_places, width]`.
        """
        if grad is None:
            shapes = {number: (sum(sizes[number].sequences), self._widths[number]) for number in self._stacks}
            return {number: torch.zeros(shape, dtype=dtypes[number], device=device) for number, shape in shapes.items()}
        if self._is_one:
            (number,) = self._stacks
            return {number: grad.to(dtypes[number])}
        starts = accumulate(self.capacities(sizes), initial=0)
        found: dict[int, dict[int, Tensor]] = {number: {} for number in self._stacks}
        for start, parts in zip(starts, self._parts, strict=False):
            column = 0
            for number, slot in parts:
                width = self._widths[number]
                block = grad.narrow(0, start, sizes[number].sequences[slot]).narrow(1, column, width)
                found[number][slot] = block
                column += width
        return {
            number: torch.cat([slots[slot] for slot in sorted(slots)]).to(dtypes[number])
            for number, slots in found.items()
        }
