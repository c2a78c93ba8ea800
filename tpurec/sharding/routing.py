"""The host's part of the exchange, in NumPy: which id goes to which rank, and where the answers will lie.

Everything that depends on the values of a batch is settled here, one batch ahead; the device then only moves and adds
arrays whose shapes were agreed by all ranks. Nothing is dropped: more ids than fit mean a larger rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpurec.sharding.host_batch import HostBatch
from tpurec.sharding.local_layout import bag_layout, sequence_layout
from tpurec.sharding.lookups import Lookups
from tpurec.sharding.placement import ShardedTable, Slot, Stack

_NEEDS = 4  # sizes of every stack; unpooled ones have one more a slot


@dataclass(frozen=True)
class Sizes:
    """A stack's share of the static shapes of a step, the same on all ranks.

    Args:
        rows: distinct rows that a pair of ranks asks for.
        bag_ids: ids of bags that a pair sends.
        replicated: distinct rows of replicated tables.
        local_ids: ids that a rank looks up itself, to pool them or as sequences.
        sequences: places of each slot of an unpooled stack.
    """

    rows: int
    bag_ids: int
    replicated: int
    local_ids: int
    sequences: tuple[int, ...] = ()


@dataclass(frozen=True)
class StackRoute:
    """What a device needs to pool, and to spread gradients, of one stack.

    Args:
        message: int32 `[num_ranks, message_size]`, to each rank: distinct rows, lengths, ids, bits of weights.
        index: int32 `[local_ids]`, for every id pooled here the line of its row among the lines received; of sequences
            `[places of all slots]`, where an empty place has the line behind the last.
        offsets: int32 `[num_local_slots * batch_size + 1]`, slot after slot; None for sequences.
        weights: float32 `[local_ids]` or None.
        lines: int32 `[local_ids]`, the same ids by row: which line of the gradients each adds.
        line_offsets: int32 `[num_ranks * rows + replicated + 1]`, where each row's ids begin in `lines`.
        line_weights: float32 `[local_ids]` or None.
        replicated: int32 `[replicated]`, storage rows of replicated tables, -1 pads.
        bag_scales: float `[batch_size, num_bag_slots]`, 1 / length where a slot is a mean; None if none is.
        local_scales: the same for the slots pooled here.
    """

    message: np.ndarray
    index: np.ndarray
    offsets: np.ndarray | None
    weights: np.ndarray | None
    lines: np.ndarray
    line_offsets: np.ndarray
    line_weights: np.ndarray | None
    replicated: np.ndarray
    bag_scales: np.ndarray | None
    local_scales: np.ndarray | None


def rung(count: int) -> int:
    """The padded size for a count: at most 1/16 more, so that few sizes ever occur.

    Args:
        count: >= 0.

    Returns:
        0 for 0; else a multiple of 8 >= count, of which there are 16 per doubling.

    >>> [rung(count) for count in (0, 1, 100, 1000, 5000)]
    [0, 8, 104, 1024, 5120]
    """
    step = max(8, 1 << max(0, (count - 1).bit_length() - 5)) if count else 1
    return -(-count // step) * step


def raise_to_rungs(sizes: np.ndarray, needs: np.ndarray) -> None:
    """Raise the sizes that no longer suffice to a rung that does; none ever shrinks, so that few programs occur.

    Args:
        sizes: int64, of any shape; changed in place.
        needs: int64, of the same shape.
    """
    for place in zip(*np.nonzero(needs > sizes), strict=True):
        sizes[place] = rung(int(needs[place]))


def sizes_of(routers: Sequence[StackRouter], needs: np.ndarray) -> list[Sizes]:
    """Give each stack its own of the numbers of all.

    Args:
        routers: of all stacks.
        needs: int64, `num_needs` numbers for each stack.

    Returns:
        The sizes of each stack.
    """
    found, at = [], 0
    for router in routers:
        own = [int(size) for size in needs[at : at + router.num_needs]]
        found.append(Sizes(*own[:_NEEDS], tuple(own[_NEEDS:])))
        at += router.num_needs
    return found


class StackRouter:
    """Routes the ids of one stack.

    Args:
        stack: the stack.
        tables: of the model.
        num_ranks: ranks of the exchange.
        weighted: whether its collection is.
    """

    def __init__(self, stack: Stack, tables: Sequence[ShardedTable], num_ranks: int, weighted: bool) -> None:
        self.stack, self.num_ranks, self.weighted = stack, num_ranks, weighted
        fixed = [slot for slot in stack.bag_slots if len(slot.owners) == 1]
        fixed.sort(key=lambda slot: (slot.owners[0], slot.answers[0]))
        split = [slot for slot in stack.bag_slots if len(slot.owners) > 1]
        self._fixed = Lookups(fixed, stack, tables, num_ranks)
        self._split = Lookups(split, stack, tables, num_ranks)
        self._local = Lookups(stack.local_slots, stack, tables, num_ranks)
        self.dtype = np.float64 if "64" in str(stack.dtype) else np.float32
        self.num_needs = _NEEDS + (len(stack.local_slots) if stack.unpooled else 0)

    def message_size(self, sizes: Sizes, batch_size: int) -> int:
        """Elements that go to each rank.

        Args:
            sizes: agreed.
            batch_size: agreed.

        Returns:
            How many int32.
        """
        bag_ids = sizes.bag_ids * (2 if self.weighted else 1)
        return sizes.rows + self.stack.num_answers * batch_size + bag_ids

    def check(self, batch: HostBatch) -> None:
        """Refuse an id that is not a row.

        Args:
            batch: this rank's ids.

        Raises:
            DataError: naming feature, table, id and position.
        """
        for lookups in (self._fixed, self._split, self._local):
            lookups.check(batch)

    def route(self, batch: HostBatch) -> StackRouting:
        """Find owners and distinct rows.

        Args:
            batch: this rank's ids.

        Returns:
            What has to be agreed and then filled in.
        """
        return StackRouting(self, batch)


class StackRouting:
    """One batch of one stack on the way.

    Args:
        router: the stack's.
        batch: this rank's ids.
    """

    def __init__(self, router: StackRouter, batch: HostBatch) -> None:
        self._router, self._batch = router, batch
        self._route_bags(router._fixed, router._split)
        self._route_local(router._local)
        self.needs = (
            int(self._rows_per_owner[:-1].max(initial=0)),
            int((self._fixed_per_owner + self._split_per_owner).max(initial=0)),
            int(self._rows_per_owner[-1]),
            len(self._place_of),
            *(len(batch.sequence(name)[0]) for name in router._local.features if router.stack.unpooled),
        )

    def _route_bags(self, fixed: Lookups, split: Lookups) -> None:
        ranks, weighted = self._router.num_ranks, self._router.weighted
        values, per_slot = fixed.values(self._batch)
        _, self._fixed_rows = fixed.locate(values, per_slot)
        self._fixed_per_owner = np.bincount(fixed.owners, per_slot, ranks).astype(np.int64)
        self._fixed_weights = fixed.weights(self._batch) if weighted else None
        values, per_slot = split.values(self._batch)
        at, rows = split.locate(values, per_slot)
        owners = split.owners[at]
        order = np.argsort(owners.astype(np.uint16), kind="stable")  # 16 bits: NumPy sorts them by radix
        self._split_at, self._split_rows = at, rows[order]
        self._split_per_owner = np.bincount(owners, minlength=ranks)
        self._split_weights = split.weights(self._batch)[order] if weighted else None

    def _route_local(self, local: Lookups) -> None:
        values, per_slot = local.values(self._batch)
        at, rows = local.locate(values, per_slot)
        owners = local.owners[at]
        # One key of owner, row and place: sorting it groups equal rows, keeps their ids in the order of the batch, and
        # NumPy sorts int64 with SIMD.
        num_ids = len(values)
        row_bits, place_bits = self._router.stack.num_rows.bit_length(), num_ids.bit_length()
        keys = owners << row_bits | rows
        if row_bits + place_bits + (self._router.num_ranks + 1).bit_length() < 64:
            keys = keys << place_bits | np.arange(num_ids)
            keys.sort()
            self._place_of = keys & ((1 << place_bits) - 1)
            keys >>= place_bits
        else:
            self._place_of = np.argsort(keys, kind="stable")
            keys = keys[self._place_of]
        is_first = np.empty(num_ids, dtype=np.bool_)
        is_first[:1] = True
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        self._begins = np.flatnonzero(is_first)
        self._number_of = np.cumsum(is_first) - 1
        unique = keys[self._begins]
        self._unique_owner, self._unique_row = unique >> row_bits, unique & ((1 << row_bits) - 1)
        self._rows_per_owner = np.bincount(self._unique_owner, minlength=self._router.num_ranks + 1)

    @property
    def num_unique(self) -> tuple[int, int]:
        """Distinct rows asked for, and the ids that ask for them."""
        return len(self._begins), len(self._place_of)

    def used(self, batch_size: int) -> tuple[int, int]:
        """What of the exchange is no padding.

        Args:
            batch_size: this rank's examples.

        Returns:
            Elements of the messages, and lines that come back.
        """
        answers = sum(len(slot.owners) for slot in self._router.stack.bag_slots) * batch_size
        rows = int(self._rows_per_owner[:-1].sum())
        bag_ids = int(self._fixed_per_owner.sum() + self._split_per_owner.sum())
        return rows + answers + bag_ids * (2 if self._router.weighted else 1), rows + answers

    def fill(self, sizes: Sizes, batch_size: int) -> StackRoute:
        """Lay everything out in the agreed sizes.

        Args:
            sizes: at least what this rank needs.
            batch_size: at least this rank's.

        Returns:
            The route.
        """
        stack, local = self._router.stack, self._router._local
        message = np.full((self._router.num_ranks, self._router.message_size(sizes, batch_size)), -1, dtype=np.int32)
        first_of_owner = np.cumsum(self._rows_per_owner) - self._rows_per_owner
        in_owner = np.arange(len(self._unique_owner)) - first_of_owner[self._unique_owner]
        remote = int(self._rows_per_owner[:-1].sum())
        message[self._unique_owner[:remote], in_owner[:remote]] = self._unique_row[:remote]
        self._fill_bags(message[:, sizes.rows :], sizes, batch_size)

        replicated = np.full(sizes.replicated, -1, dtype=np.int32)
        replicated[: len(self._unique_row) - remote] = self._unique_row[remote:]
        num_lines = self._router.num_ranks * sizes.rows + sizes.replicated
        line_of_unique = self._unique_owner * sizes.rows + in_owner
        if stack.unpooled:
            layout = sequence_layout(self._batch, local.features, sizes.sequences, num_lines)
        else:
            layout = bag_layout(self._lengths(local.features, batch_size), sizes.local_ids)
        places = self._place_of if layout.places is None else layout.places[self._place_of]
        index = np.full(layout.size, layout.spare, dtype=np.int32)
        index[places] = line_of_unique[self._number_of]
        lines = np.zeros(sizes.local_ids, dtype=np.int32)
        lines[: len(places)] = layout.gradients[self._place_of]
        per_line = np.zeros(num_lines, dtype=np.int64)
        per_line[line_of_unique] = np.diff(self._begins, append=len(self._place_of))
        weights = line_weights = None
        if self._router.weighted:
            weights, line_weights = np.zeros((2, sizes.local_ids), dtype=np.float32)
            given = local.weights(self._batch)
            weights[: len(given)], line_weights[: len(given)] = given, given[self._place_of]
        return StackRoute(
            message,
            index,
            layout.offsets,
            weights,
            lines,
            _offsets(per_line),
            line_weights,
            replicated,
            self._scales(stack.bag_slots, batch_size),
            self._scales(stack.local_slots, batch_size),
        )

    def _fill_bags(self, message: np.ndarray, sizes: Sizes, batch_size: int) -> None:
        """Lengths, ids and weights of the bags that others pool; `message` is what follows the distinct rows."""
        ranks, answers = self._router.num_ranks, self._router.stack.num_answers
        fixed, split = self._router._fixed, self._router._split
        lengths = np.zeros((ranks, answers, batch_size), dtype=np.int32)
        lengths[fixed.owners, fixed.answers] = self._lengths(fixed.features, batch_size)
        if split.features:
            examples = self._lengths(split.features, batch_size).reshape(-1)
            example_of_id = np.repeat(np.tile(np.arange(batch_size), len(split.features)), examples)
            bags = split.owners[self._split_at] * answers + split.answers[self._split_at]
            lengths += np.bincount(bags * batch_size + example_of_id, minlength=lengths.size).reshape(lengths.shape)
        begin = answers * batch_size
        message[:, :begin] = lengths.reshape(ranks, begin)
        ids, bits = message[:, begin : begin + sizes.bag_ids], message[:, begin + sizes.bag_ids :]
        done_fixed = done_split = 0
        for rank, (num_fixed, num_split) in enumerate(zip(self._fixed_per_owner, self._split_per_owner, strict=True)):
            of_fixed = slice(done_fixed, done_fixed + num_fixed)
            of_split = slice(done_split, done_split + num_split)
            ids[rank, :num_fixed] = self._fixed_rows[of_fixed]
            ids[rank, num_fixed : num_fixed + num_split] = self._split_rows[of_split]
            if self._router.weighted:
                bits[rank, :num_fixed] = self._fixed_weights[of_fixed].view(np.int32)
                bits[rank, num_fixed : num_fixed + num_split] = self._split_weights[of_split].view(np.int32)
                bits[rank, num_fixed + num_split :] = 0
            done_fixed, done_split = done_fixed + num_fixed, done_split + num_split

    def _lengths(self, features: Sequence[str], batch_size: int) -> np.ndarray:
        lengths = np.zeros((len(features), batch_size), dtype=np.int32)
        for number, name in enumerate(features):
            lengths[number, : self._batch.num_examples] = self._batch.lengths[name]
        return lengths

    def _scales(self, slots: Sequence[Slot], batch_size: int) -> np.ndarray | None:
        """1 / length, or 1 / sum of weights, of the bags of means; the owners only add."""
        if not any(slot.is_mean for slot in slots):
            return None
        scales = np.ones((batch_size, len(slots)), dtype=self._router.dtype)
        for number, slot in enumerate(slots):
            if slot.is_mean:
                sums = self._batch.lengths[slot.feature].astype(self._router.dtype)
                if self._router.weighted:
                    example_of_id = np.repeat(np.arange(len(sums)), self._batch.lengths[slot.feature])
                    sums = np.bincount(example_of_id, self._batch.weights[slot.feature], len(sums))
                of_bag = scales[: len(sums), number]
                of_bag[:] = 0
                np.divide(1, sums, out=of_bag, where=sums != 0, casting="same_kind")
        return scales


def _offsets(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
