"""A lower bound by branch and bound over boxes, for problems with many items; and the choices behind it.

A box limits what a linear program over choices cannot see: per part of the step a range for the largest lump that any
rank carries, which latencies are due, and a range for the ids that share the padded exchange. In a box, choices whose
lumps are too large or whose latencies are not due are left out, every part takes at least the lower end of its range,
and padding is at least that of the most ids. What remains couples items only through a few sums:

    mean over ranks of part k  <=  its top s[k], between the ends of its range
    least ids  <=  ids that share the exchange  <=  most ids
    mean over ranks of bytes  <=  memory for tables

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

from tpurec.sharding.space import NUM_PARTS, Space

_STEPS = 30  # evaluations of prices per box and side
_SIDES = 3
_NEGLIGIBLE = 2e-4  # what a split has to be about, as a share of the step
_DEAREST = 4.0  # highest price on a part's mean, in units of the part itself


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
        rows: per item, the row of its cheapest choice at these prices.
        tops: per column with lumps, what the bound counts for it.
    """

    seconds: float
    box: Box
    prices: np.ndarray = field(repr=False)
    rows: np.ndarray = field(repr=False)
    tops: np.ndarray = field(repr=False)


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
        self._mean = self._lump * share[:, None] * unevenness
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
        count = self._push(queue, everything, np.append(np.full(width, 0.7), [0.0, 0.0]), 0.0, 0)
        while queue:
            yield queue[0][2]
            parts = self._split(queue[0][2]) if count + 2 <= most_boxes else None
            if parts is None:
                return
            _, _, worst = heapq.heappop(queue)
            for box in parts:
                count = self._push(queue, box, worst.prices, worst.seconds, count)
        yield Node(self.known_seconds, everything, np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0))

    def picks(self, node: Node) -> list[int]:
        """The choices that a node's prices favour.

        Args:
            node: of `explore`.

        Returns:
            Per item the position of its choice.
        """
        return [int(number) for number in self._number[node.rows]]

    def _push(
        self, queue: list[tuple[float, int, Node]], box: Box, prices: np.ndarray, least: float, count: int
    ) -> int:
        node = self._bound(box, prices)
        if node is not None and node.seconds < self.known_seconds:
            heapq.heappush(queue, (max(least, node.seconds), count, replace(node, seconds=max(least, node.seconds))))
        return count + 1

    def _bound(self, box: Box, prices: np.ndarray) -> Node | None:
        """The best bound found for a box; None if no placement is in it."""
        from scipy.optimize import minimize

        space, known = self.space, self.known_seconds
        absent = list(box.absent)
        kept = (self._lump <= np.array(box.most)).all(axis=1) & ~self._flags[:, absent].any(axis=1)
        low, high = box.pairs
        if high <= 0:
            kept &= self._pairs <= 0
        rows = np.flatnonzero(kept)
        starts = np.flatnonzero(np.diff(self._item[rows], prepend=-1))
        if len(starts) < len(space.items):
            return None
        sizes = np.diff(np.append(starts, len(rows)))
        even = (self._uniform[rows] + space.padding(high) * self._padded[rows]) / known
        scale = max(high, 1e-30)
        budget = self._budget if np.isfinite(self._budget) else 1e30
        sums = np.column_stack([self._mean[rows] / known, self._pairs[rows] / scale, self._bytes[rows] / budget])
        width = len(self._columns)
        bottom, top = np.array(box.least) / known, np.minimum(np.array(box.most) / known, 1.0)
        best: list[object] = [-np.inf, prices, rows[starts], bottom]

        def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
            cost = even + sums @ at
            cheapest = np.minimum.reduceat(cost, starts)
            first = _first_of(cost == np.repeat(cheapest, sizes), starts)
            left = 1.0 - at[:width]
            tops = np.where(left >= 0, bottom, top)
            ids = high / scale if at[width] >= 0 else low / scale
            value = float(cheapest.sum() + left @ tops - at[width] * ids - at[width + 1])
            slope = sums[first].sum(axis=0) - np.concatenate([tops, [ids, 1.0]])
            if value > best[0]:
                best[:] = [value, at.copy(), rows[first], np.maximum(slope[:width] + tops, bottom)]
            return -value, -slope

        # Prices have kinks at 1 (a part between the ends of its range) and at 0 (ids between theirs), where a smooth
        # method stalls: it works on one side of each kink, and on the other side if the answer lies there.
        over, sign = np.zeros(width, dtype=bool), 1.0 if prices[width] >= 0 else -1.0
        for _ in range(_SIDES):
            limits = [(1.0, _DEAREST) if beyond else (0.0, 1.0) for beyond in over]
            limits += [(0.0, _DEAREST) if sign > 0 else (-_DEAREST, 0.0), (0.0, _DEAREST)]
            start = np.clip(best[1], *np.array(limits).T)
            minimize(negative, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxfun": _STEPS})
            _, at, chosen, _ = best
            mean, ids = self._mean[chosen].sum(axis=0) / known, float(self._pairs[chosen].sum())
            beyond = np.where(at[:width] > 1, True, np.where(at[:width] < 1, False, mean > top * (1 + 1e-9)))
            side = sign if at[width] else (1.0 if ids > high else -1.0 if ids < low else sign)
            if side == sign and (beyond == over).all():
                break
            over, sign = beyond, side
        value, found, chosen, tops = best
        fixed = space.constant_seconds + float(space.latency[list(box.due)].sum())
        return Node(fixed + float(value) * known, box, found, chosen, tops * known)

    def _split(self, node: Node) -> tuple[Box, Box] | None:
        """Cut a box where its bound cheats most: a latency left open, lumps above the top, too little padding."""
        space, box, rows = self.space, node.box, node.rows
        best, parts = _NEGLIGIBLE * self.known_seconds, None
        for bit in np.flatnonzero(self._flags[rows].any(axis=0)):
            if bit not in box.due and space.latency[bit] > best:
                bit = int(bit)
                best = float(space.latency[bit])
                parts = replace(box, due=(*box.due, bit)), replace(box, absent=(*box.absent, bit))
        for column in range(len(self._columns)):
            lumps = self._lump[rows, column]
            above = np.sort(lumps[lumps > node.tops[column] * (1 + 1e-6)])
            if not len(above):
                continue
            weight = np.cumsum(above)
            threshold = float(above[np.searchsorted(weight, weight[-1] / 2)])
            gain = threshold - float(node.tops[column])
            if gain > best:
                most, least = list(box.most), list(box.least)
                most[column], least[column] = threshold * (1 - 1e-9), threshold
                best, parts = gain, (replace(box, most=tuple(most)), replace(box, least=tuple(least)))
        pairs, (low, high) = float(self._pairs[rows].sum()), box.pairs
        if pairs < high:
            missing = space.padding(max(pairs, low, 1e-9 * high)) - space.padding(high)
            gain = missing * float(self._padded[rows].sum())
            middle = float(np.sqrt(max(pairs, low, 1e-3 * high) * high))
            if gain > best and low < middle < high:
                parts = replace(box, pairs=(low, middle)), replace(box, pairs=(middle, high))
        return parts


def _first_of(marked: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Positions of the first marked entry in every segment."""
    positions = np.flatnonzero(marked)
    segment = np.searchsorted(starts, positions, side="right") - 1
    return positions[np.flatnonzero(np.diff(segment, prepend=-1))]
