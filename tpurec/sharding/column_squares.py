"""Optimizers that need whole rows, on tables whose columns are spread over ranks: accumulators per row, and clipping.

Every owner of a column shard gets the same ids, so the distinct rows of a table are the same, in the same order, on all
of its owners. Each adds the squares of its columns into the table's *area* of one array; the array is summed over the
ranks in one all-reduce; then every owner takes the same step of the accumulator. Shapes depend on rungs only.

With clipping and L2 decay a row's gradient becomes `s g + d w`, where s depends on |g|; its square is
`s^2 g.g + 2 s d g.w + d^2 w.w`, so three sums are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpurec.ops import sequence_gather
from tpurec.ops.column_step import column_step_
from tpurec.sharding.placement import ShardedTable, Stack
from tpurec.sharding.storage import StackStorage

_NO_ROW = 2**31 - 1


@dataclass(frozen=True)
class RowGradients:
    """Gradients of a stack's rows, duplicates combined.

    Args:
        rows: int32 `[num_ids]`, storage rows; -1 where there is none.
        gradients: `[num_ids, width]`, 0 where there is none; before clipping and weight decay.
        places: int64 `[num_ids]`, where each row's sum of squares is in the array; the last place where there is none.
        dims: `[num_ids]`, columns of each row's whole table.
    """

    rows: Tensor
    gradients: Tensor
    places: Tensor
    dims: Tensor


class ColumnSquares:
    """One stack of column shards on one rank.

    Args:
        stack: with `squares`.
        storage: this rank's rows.
        tables: of the model.
        area_tables: numbers of all tables that have areas, over all stacks.
        rank: this rank.
        num_ranks: of the group.
    """

    def __init__(
        self,
        stack: Stack,
        storage: StackStorage,
        tables: Sequence[ShardedTable],
        area_tables: Sequence[int],
        rank: int,
        num_ranks: int,
    ) -> None:
        self._stack, self._storage = stack, storage
        owned = [
            (place.row_starts[place.shard.ranks.index(rank)], area_tables.index(place.table))
            for place in stack.places
            if rank in place.shard.ranks
        ]
        per_rank = [sum(other in place.shard.ranks for place in stack.places) for other in range(num_ranks)]
        device = storage.parts[0].device
        # Every rank looks up in a list of the same length; padding lies behind all rows.
        owned = sorted(owned) + [(_NO_ROW, 0)] * (max(per_rank) - len(owned))
        self._first_rows = torch.tensor([first for first, _ in owned], dtype=torch.int32, device=device)
        self._tables = torch.tensor([table for _, table in owned], dtype=torch.int64, device=device)
        more = stack.optimizer.arguments()
        del more["max_gradient_norm"]  # clipped here, by the norm of whole rows
        self._more = more
        dims = torch.tensor([tables[number].config.embedding_dim for number in area_tables], device=device)
        self._dims = dims[self._tables].to(storage.compute_dtype)

    def combine(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, grad: Tensor, areas: Tensor, squares: Tensor
    ) -> RowGradients:
        """Combine the gradients of every row, and add their squares to the areas.

        Args:
            rows: int32 `[num_ids]`, -1 pads.
            offsets: int32 `[num_bags + 1]`.
            weights: `[num_ids]` or None.
            grad: `[num_bags, width]`.
            areas: int64 `[num_areas]`, where each begins.
            squares: `[all areas + 1, num_sums(stacks)]`, added to; the last line takes what is padding.

        Returns:
            The rows and their gradients, for `step`.
        """
        stack, num_ids = self._stack, rows.shape[0]
        positions = torch.arange(num_ids, device=rows.device, dtype=offsets.dtype)
        bags = torch.searchsorted(offsets, positions, right=True) - 1
        ordered, order = torch.sort(rows, stable=True)
        found = grad.index_select(0, bags.index_select(0, order))
        if weights is not None:
            found = found * weights.index_select(0, order)[:, None]
        is_first = torch.ones_like(ordered)
        is_first[1:] = (ordered[1:] != ordered[:-1]).to(is_first.dtype)
        segment = is_first.cumsum(0) - 1
        combined = torch.zeros_like(found).index_add_(0, segment, found)
        segment_rows = torch.full_like(ordered, _NO_ROW).index_copy_(0, segment, ordered)
        is_row = (segment_rows >= 0) & (segment_rows < _NO_ROW)
        targets = torch.where(is_row, segment_rows, -1)
        combined = torch.where(is_row[:, None], combined, 0)
        place = (torch.searchsorted(self._first_rows, segment_rows, right=True) - 1).clamp(min=0)
        first_segment = torch.searchsorted(segment_rows, self._first_rows)
        numbers = torch.arange(num_ids, device=rows.device)
        area = areas.index_select(0, self._tables)
        places = area.index_select(0, place) + numbers - first_segment.index_select(0, place)
        places = torch.where(is_row, places, squares.shape[0] - 1)
        sums = [combined.square().sum(1)]
        if squares.shape[1] > 1:
            values = sequence_gather(self._storage.parts, targets, stack.num_rows, stack.width).to(combined.dtype)
            sums += [(combined * values).sum(1), values.square().sum(1)]
        squares.index_add_(0, places, torch.stack(sums, dim=1).to(squares.dtype))
        return RowGradients(targets, combined, places, self._dims.index_select(0, place))

    def step(self, found: RowGradients, squares: Tensor, lr: Tensor) -> None:
        """Take one optimizer step, in place.

        Args:
            found: of `combine`.
            squares: summed over all ranks.
            lr: scalar.
        """
        optimizer, gradients = self._stack.optimizer, found.gradients
        total = squares.index_select(0, found.places).to(gradients.dtype)
        square = total[:, 0]
        scale = torch.ones_like(square)
        if optimizer.max_gradient_norm is not None:
            scale = optimizer.max_gradient_norm / square.sqrt().clamp(min=optimizer.max_gradient_norm)
            gradients, square = gradients * scale[:, None], square * scale.square()
        if total.shape[1] > 1 and optimizer.weight_decay and not optimizer.decoupled_weight_decay:
            decay = optimizer.weight_decay
            square = square + 2 * decay * scale * total[:, 1] + decay**2 * total[:, 2]
        column_step_(
            self._storage.parts,
            self._storage.state,
            found.rows,
            gradients,
            (square / found.dims).to(self._storage.compute_dtype),
            lr,
            optimizer.kind,
            optimizer.eps,
            optimizer.weight_decay,
            self._stack.num_rows,
            self._stack.width,
            **self._more,
        )


def num_sums(stacks: Sequence[Stack]) -> int:
    """How many sums a row needs.

    Args:
        stacks: all of the model.

    Returns:
        3 if a stack of column shards has L2 weight decay, else 1.
    """
    decayed = (
        stack.optimizer.weight_decay and not stack.optimizer.decoupled_weight_decay for stack in stacks if stack.squares
    )
    return 3 if any(decayed) else 1
