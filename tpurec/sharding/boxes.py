"""A lower bound by branch and bound over boxes; and the choices behind it.

A box limits what a linear program over choices cannot see: per part of the step a range for the largest lump that any
rank carries, which latencies are due, and a range for the ids that share the padded exchange. In a box, choices whose
lumps are too large or whose latencies are not due are left out, every part takes at least the lower end of its range,
and padding is at least that of the most ids. What remains couples items only through a few sums:

    mean over ranks of part k  <=  its top s[k], between the ends of its range
    least ids  <=  ids that share the exchange  <=  most ids
    mean over ranks of bytes  <=  memory for tables
    mean over ranks of the room that lumps of part k take  <=  1        (`tpurec/sharding/room.py`)

With prices on these sums (Lagrange multipliers) every item takes its cheapest choice by itself, and the total is a
lower bound for *any* prices, so nothing rests on a solver's tolerance: prices only have to be good, not optimal. A box
whose bound is below the known plan is split where its choices break what the box left open; the smallest bound of the
boxes left over is the bound. Boxes are counted, not seconds, so that the bound is the same on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tpurec.sharding.ascend import ascend
from tpurec.sharding.room import BESIDE, beside, common_unit, room_beside, room_of_all, room_taken
from tpurec.sharding.space import NUM_PARTS, Space

_STEPS = 60  # evaluations of prices per box and side
_SIDES = 3
_NEGLIGIBLE = 2e-4  # what a split has to be about, as a share of the step
_DEAREST = 4.0  # highest price on a part's mean, in units of the part itself
_TIGHT = 0.01  # room that a choice's lumps have to lack, as a share, for a row about it
_MOST_CUTS = 16  # rows about room in one box
_ROUNDS = 2  # of adding them


Cut = tuple[int, int, int]  # a row about room: part, part in which others are counted, function


@dataclass(frozen=True)
class Box:
    """A part of all placements.

    Args:
        least: per column with lumps, what the largest load of lumps is at least, in seconds.
        most: per column with lumps, what it is at most.
        due: latencies that are due, as positions in LATENCY_FLAGS.
        absent: latencies that are not.
        pairs: least and most ids of a mean rank pair in the padded exchange.
    """

    least: tuple[float, ...]
    most: tuple[float, ...]
    due: tuple[int, ...]
    absent: tuple[int, ...]
    pairs: tuple[float, float]


@dataclass(frozen=True)
class Node:
    """A box with its bound.

    Args:
        seconds: no placement in the box is faster.
        box: the box.
        prices: that give the bound.
        cuts: rows about room that have a price.
        rows: per item, the row of its cheapest choice at these prices.
        tops: per column with lumps, what the bound counts for it.
    """

    seconds: float
    box: Box
    prices: np.ndarray = field(repr=False)
    cuts: tuple[Cut, ...] = field(repr=False)
    rows: np.ndarray = field(repr=False)
    tops: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class _Priced:
    """Prices and what they prove; see Node. `value` is the bound less what is fixed, as a share of the known step."""

    value: float
    prices: np.ndarray
    cuts: tuple[Cut, ...]
    rows: np.ndarray
    tops: np.ndarray


class Boxes:
    """The boxes of one space.

    Args:
        space: the problem.
        known_seconds: step of some placement; boxes that cannot beat it are dropped.
        capacity_bytes: memory per rank; infinity if it does not count.
        unevenness: fullest rank over the mean that lumps cannot go below; more than 1 is no bound, but a guess from
            which a search starts better, because it leaves the room that placing shards takes.
    """

    def __init__(self, space: Space, known_seconds: float, capacity_bytes: float, unevenness: float = 1.0) -> None:
        self.space, self.known_seconds = space, known_seconds
        self._budget = capacity_bytes - space.constant_bytes
        every = [(i, n, choice) for i, item in enumerate(space.items) for n, choice in enumerate(item.choices)]
        ranks = space.model.num_ranks
        self._item = np.array([item for item, _, _ in every])
        self._number = np.array([number for _, number, _ in every])
        lump = np.array([choice.lump for _, _, choice in every])
        share = np.array([choice.copies for _, _, choice in every]) / ranks
        self._columns = np.flatnonzero(lump[:, :NUM_PARTS].any(axis=0))
        self._lump = lump[:, self._columns]
        self._share = share
        # Loads of such a part are multiples of a unit, too: its tops go from one multiple to the next.
        self._unit = np.array([common_unit(column) for column in self._lump.T])
        # Parts that come in few sizes are packed without waste; it is the others that are left uneven.
        self._mean = self._lump * share[:, None] * np.where(self._unit > 0, 1.0, unevenness)
        uniform = np.array([choice.uniform for _, _, choice in every])
        padded = np.array([choice.padded for _, _, choice in every])
        self._uniform, self._padded = uniform[:, :NUM_PARTS].sum(axis=1), padded[:, :NUM_PARTS].sum(axis=1)
        self._bytes = (uniform + padded + lump * share[:, None])[:, NUM_PARTS:].sum(axis=1)
        self._pairs = np.array([choice.pair_ids for _, _, choice in every])
        bits = np.arange(len(space.latency))
        self._flags = (np.array([choice.flags for _, _, choice in every])[:, None] >> bits & 1) > 0

    def explore(self, most_boxes: int, largest_lump: float = float("inf")) -> Iterator[Node]:
        """Split boxes, the one with the smallest bound first.

        Args:
            most_boxes: how many to bound.
            largest_lump: seconds that a lump may add to a part at most; only without a limit are bounds proven.

        Yields:
            The box with the smallest bound of all that remain, again and again; its `seconds` never fall. A node at
            `known_seconds` says that no placement is faster.
        """
        starts = np.flatnonzero(np.diff(self._item, prepend=-1))
        pairs = float(np.maximum.reduceat(self._pairs, starts).sum())
        width = len(self._columns)
        everything = Box((0.0,) * width, (largest_lump,) * width, (), (), (0.0, pairs))
        queue: list[tuple[float, int, Node]] = []
        root = Node(0.0, everything, np.append(np.full(width, 0.7), [0.0, 0.0]), (), np.zeros(0, np.int64), np.zeros(0))
        count = self._push(queue, everything, root, 0)
        while queue:
            yield queue[0][2]
            parts = self._split(queue[0][2]) if count + 2 <= most_boxes else None
            if parts is None:
                return
            _, _, worst = heapq.heappop(queue)
            for box in parts:
                count = self._push(queue, box, worst, count)
        yield replace(root, seconds=self.known_seconds)

    def picks(self, node: Node) -> list[int]:
        """The choices that a node's prices favour.

        Args:
            node: of `explore`.

        Returns:
            Per item the position of its choice.
        """
        return [int(number) for number in self._number[node.rows]]

    def promise(self, node: Node) -> float:
        """Seconds of a step if the choices of a node spread evenly: the means or the largest lumps, if those are more.

        Args:
            node: of `explore`.

        Returns:
            Seconds; below what placing the choices will take.
        """
        rows, space = node.rows, self.space
        mean, largest = self._mean[rows].sum(axis=0), self._lump[rows].max(axis=0)
        tops = np.maximum(mean, largest)
        step = np.where(self._unit > 0, self._unit, 1.0)
        tops = np.where(self._unit > 0, step * np.ceil(tops / step - 1e-6), tops)
        even = self._uniform[rows].sum() + space.padding(self._pairs[rows].sum()) * self._padded[rows].sum()
        latency = space.latency @ self._flags[rows].any(axis=0)
        return float(space.constant_seconds + latency + even + tops.sum())

    def _push(self, queue: list[tuple[float, int, Node]], box: Box, above: Node, count: int) -> int:
        node = self._bound(box, above)
        if node is not None and node.seconds < self.known_seconds:
            seconds = max(above.seconds, node.seconds)
            heapq.heappush(queue, (seconds, count, replace(node, seconds=seconds)))
        return count + 1

    def _bound(self, box: Box, above: Node) -> Node | None:
        """The best bound found for a box, starting from the prices of the one it was cut from; None if it is empty."""
        absent = list(box.absent)
        kept = (self._lump <= np.array(box.most)).all(axis=1) & ~self._flags[:, absent].any(axis=1)
        if box.pairs[1] <= 0:
            kept &= self._pairs <= 0
        rows = np.flatnonzero(kept)
        starts = np.flatnonzero(np.diff(self._item[rows], prepend=-1))
        if len(starts) < len(self.space.items):
            return None
        tops = np.array(box.least)
        best = _Priced(-np.inf, above.prices, above.cuts, rows[starts], tops)
        for _ in range(_ROUNDS + 1):
            best = self._price(box, rows, starts, best)
            cuts = tuple(cut for cut, _ in self._tight(best.rows, np.array(box.most), best.cuts))
            if not cuts or self._fixed(box) + best.value * self.known_seconds >= self.known_seconds:
                break
            best = replace(best, cuts=best.cuts + cuts, prices=np.append(best.prices, np.zeros(len(cuts))))
        priced = best.prices[len(self._columns) + 2 :] > 0
        cuts = tuple(cut for cut, used in zip(best.cuts, priced, strict=True) if used)
        prices = np.append(best.prices[: len(self._columns) + 2], best.prices[len(self._columns) + 2 :][priced])
        return Node(self._fixed(box) + best.value * self.known_seconds, box, prices, cuts, best.rows, best.tops)

    def _fixed(self, box: Box) -> float:
        """Seconds that every placement in a box takes, whatever its choices."""
        return self.space.constant_seconds + float(self.space.latency[list(box.due)].sum())

    def _room(self, cut: Cut, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        """What the lumps of some choices take of a rank's room."""
        column, other, function = cut
        sizes = np.minimum(self._lump[rows, column] / most[column], 1.0)
        if column == other:
            return room_taken(sizes, function)
        return beside(sizes, np.minimum(self._lump[rows, other] / most[other], 1.0), BESIDE[function])

    def _tight(self, rows: np.ndarray, most: np.ndarray, known: tuple[Cut, ...]) -> list[tuple[Cut, float]]:
        """Which rows about room some choices break the most, and the room they take."""
        found: dict[tuple[int, int, float], Cut] = {}  # several functions may say the same
        columns = np.flatnonzero(np.isfinite(most) & (most > 0)).tolist()
        if not columns:
            return []
        share, sizes = self._share[rows], self._lump[np.ix_(rows, columns)] / most[columns]
        mean, capped = share @ sizes, np.minimum(sizes, 1.0)
        for position, column in enumerate(columns):
            own = room_of_all(capped[:, position], share)
            beside_others = room_beside(capped[:, position], capped, share)
            for place, other in enumerate(columns):
                taken = own if column == other else beside_others[:, place]
                for function in np.flatnonzero(taken > max(1.0, mean[place]) + _TIGHT).tolist():
                    cut = column, other, function
                    if cut not in known:
                        found.setdefault((column, other, float(taken[function])), cut)
        order = sorted((-taken, cut) for (_, _, taken), cut in found.items())
        return [(cut, -taken) for taken, cut in order[: _MOST_CUTS - len(known)]]

    def _price(self, box: Box, rows: np.ndarray, starts: np.ndarray, best: _Priced) -> _Priced:
        """Improve the prices of a box."""
        space, known = self.space, self.known_seconds
        low, high = box.pairs
        even = (self._uniform[rows] + space.padding(high) * self._padded[rows]) / known
        scale = max(high, 1e-30)
        budget = self._budget if np.isfinite(self._budget) else 1e30
        room = [self._room(cut, rows, np.array(box.most)) * self._share[rows] for cut in best.cuts]
        sums = np.column_stack([self._mean[rows] / known, self._pairs[rows] / scale, self._bytes[rows] / budget, *room])
        # A line per item, as long as the longest: its cheapest choice is then found without a loop over items.
        line, place = self._item[rows], np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
        slots = int(place.max()) + 1
        at_slot = line * slots + place
        lines, evens = np.zeros((len(starts) * slots, sums.shape[1])), np.full(len(starts) * slots, np.inf)
        lines[at_slot], evens[at_slot] = sums, even
        columns = np.ascontiguousarray(lines.T)
        first_slot = np.arange(len(starts)) * slots
        width = len(self._columns)
        bottom, top = np.array(box.least) / known, np.minimum(np.array(box.most) / known, 1.0)
        found = replace(best, value=-np.inf)
        enough = 1.0 - self._fixed(box) / known  # then no placement in the box is faster, and it is dropped

        def priced(at: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal found
            cost = evens + np.einsum("ij,i->j", columns, at)  # not by BLAS, whose threads cost more than they bring
            slot = cost.reshape(len(starts), slots).argmin(axis=1)
            chosen = first_slot + slot
            left = 1.0 - at[:width]
            tops = np.where(left >= 0, bottom, top)
            ids = high / scale if at[width] >= 0 else low / scale
            value = float(cost[chosen].sum() + left @ tops - at[width] * ids - at[width + 1 :].sum())
            slope = lines.take(chosen, axis=0).sum(axis=0)
            slope[:width] -= tops
            slope[width] -= ids
            slope[width + 1 :] -= 1.0
            if value > found.value:
                reached = np.maximum(slope[:width] + tops, bottom) * known
                found = _Priced(value, at.copy(), best.cuts, rows[starts + slot], reached)
            return value, slope

        # Prices have kinks at 1 (a part between the ends of its range) and at 0 (ids between theirs), where a smooth
        # method stalls: it works on one side of each kink, and on the other side if the answer lies there.
        over, sign = np.zeros(width, dtype=bool), 1.0 if best.prices[width] >= 0 else -1.0
        for _ in range(_SIDES):
            limits = [(1.0, _DEAREST) if beyond else (0.0, 1.0) for beyond in over]
            limits += [(0.0, _DEAREST) if sign > 0 else (-_DEAREST, 0.0)] + [(0.0, _DEAREST)] * (1 + len(room))
            ascend(priced, found.prices, *np.array(limits).T, evaluations=_STEPS, enough=enough)
            mean, ids = self._mean[found.rows].sum(axis=0) / known, float(self._pairs[found.rows].sum())
            at = found.prices
            beyond = np.where(at[:width] > 1, True, np.where(at[:width] < 1, False, mean > top * (1 + 1e-9)))
            side = sign if at[width] else (1.0 if ids > high else -1.0 if ids < low else sign)
            if side == sign and (beyond == over).all():
                break
            over, sign = beyond, side
        return found

    def _split(self, node: Node) -> tuple[Box, Box] | None:
        """Cut a box where its bound cheats most: an open latency, lumps above or beside the top, too little padding."""
        space, box, rows = self.space, node.box, node.rows
        best, parts = _NEGLIGIBLE * self.known_seconds, None
        for bit in np.flatnonzero(self._flags[rows].any(axis=0)):
            if bit not in box.due and space.latency[bit] > best:
                bit = int(bit)
                best = float(space.latency[bit])
                parts = replace(box, due=(*box.due, bit)), replace(box, absent=(*box.absent, bit))
        for column in range(len(self._columns)):
            found = self._threshold(node, column)
            if found is not None and found[0] > best:
                best, parts = found[0], self._at(box, column, found[1])
        pairs, (low, high) = float(self._pairs[rows].sum()), box.pairs
        if pairs < high:
            missing = space.padding(max(pairs, low, 1e-9 * high)) - space.padding(high)
            gain = missing * float(self._padded[rows].sum())
            middle = float(np.sqrt(max(pairs, low, 1e-3 * high) * high))
            if gain > best and low < middle < high:
                parts = replace(box, pairs=(low, middle)), replace(box, pairs=(middle, high))
        if parts is None:  # what is left is room: lumps that the tops could hold, but not side by side
            for column in range(len(self._columns)):
                found = self._lacking(node, column)
                if found is not None and found[0] > best:
                    best, parts = found[0], self._at(box, column, found[1])
        return parts

    def _threshold(self, node: Node, column: int) -> tuple[float, float] | None:
        """Where to cut the range of a part's largest load, and seconds to gain by it."""
        top, most = float(node.tops[column]), node.box.most[column]
        lumps = self._lump[node.rows, column]
        above = np.sort(lumps[lumps > top * (1 + 1e-6)])
        if len(above):
            weight = np.cumsum(above)
            threshold = float(above[np.searchsorted(weight, weight[-1] / 2)])

            return threshold - top, threshold
        unit = float(self._unit[column])
        if unit and top > 0:
            threshold = unit * np.ceil(top / unit - 1e-6)
            if max(top, node.box.least[column]) < threshold * (1 - 1e-6) < most:
                return threshold - top, threshold
        return None

    def _lacking(self, node: Node, column: int) -> tuple[float, float] | None:
        """Where to cut the range of a part's largest load so that below it shards lack room, and seconds to gain."""
        top, most, unit = float(node.tops[column]), node.box.most[column], float(self._unit[column])
        if top <= 0:
            return None
        limits = np.array(node.box.most)
        limits[column] = top
        lack = [taken for cut, taken in self._tight(node.rows, limits, ()) if column in cut[:2]]
        reach = min(most, top + self.known_seconds - node.seconds) - top
        if not lack or reach <= 0:
            return None
        gain = min(lack[0] - 1, 0.5) * reach
        threshold = top + max(unit, reach / 2)
        if unit:
            threshold = unit * np.rint(threshold / unit)
        return (gain, threshold) if node.box.least[column] * (1 + 1e-6) < threshold < most else None

    def _at(self, box: Box, column: int, threshold: float) -> tuple[Box, Box]:
        """The box below and from a threshold on; ends at multiples of the unit if there is one."""
        unit = float(self._unit[column])
        below, since = threshold * (1 - 1e-9), threshold
        if unit:
            since = unit * np.ceil(threshold / unit - 1e-6)
            below = since - unit * (1 - 1e-6)
        most, least = list(box.most), list(box.least)
        most[column], least[column] = float(below), float(since) * (1 - 1e-9)
        return replace(box, most=tuple(most)), replace(box, least=tuple(least))
