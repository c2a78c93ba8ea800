"""A proven lower bound: no plan of a space is faster.

A placement chooses x[i, c] in {0, 1} per item i and choice c. Per part k of the step, the slowest rank carries at least

    the mean over ranks        sum over i, c of x (even + lump copies / ranks)
    any one item's lump        sum over i, c of x even  +  sum over c of x[i, c] lump

where `even` is the uniform load plus the padded one times the smallest padding that is possible (padding per id falls
as more ids share the exchange). A latency is due as soon as one item causes it. Stacks obey the same inequalities in
bytes, and their sum has to fit. Minimising the sum of parts under these is a linear program if x may be fractional, and
its optimum cannot exceed the cost of any placement. Choices that alone are slower than a known plan cannot be part of a
faster one and are left out.

The program is tightened where a plan is far above it. With few items x is kept whole (HiGHS branch and bound, whose
dual bound is valid wherever it stops). With more, boxes of placements are told apart (`tpurec/sharding/boxes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tpurec.sharding.boxes import Boxes
from tpurec.sharding.space import NUM_PARTS, Space

_BOXED = 200_000  # items x ranks above which boxes come first: the linear program is slow and rarely good enough
_BOXES = 800  # to tell apart at most
_MIXED_ITEMS = 64  # up to this many items x is kept whole
# Limits in nodes and boxes, not in seconds, so that the bound is the same on every machine.
_MIXED_NODES = 20
_LOOSE = 1.08  # how far a plan may be above a plain linear program before more is tried
_CLOSE = 1.02  # how near the bound is near enough


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step.

    Args:
        seconds: no placement that fits is faster.
        kind: `linear program`, `mixed program` or `boxes`.
    """

    seconds: float
    kind: str


def lower_bound(
    space: Space, known_seconds: float, capacity_bytes: float, out_of_time: Callable[[], bool] = lambda: False
) -> Bound:
    """Prove how fast a plan can be at most.

    Args:
        space: the problem.
        known_seconds: step of a placement that fits.
        capacity_bytes: memory per rank.
        out_of_time: asked between boxes; True ends the proof where it is.

    Returns:
        The bound, at most `known_seconds`.
    """
    if len(space.items) * space.model.num_ranks > _BOXED:
        return _by_boxes(space, known_seconds, capacity_bytes, 0.0, out_of_time)
    root = _solve(_Program(space, known_seconds, capacity_bytes, _Case.of(space)))
    if known_seconds <= _LOOSE * root.seconds:
        return Bound(min(root.seconds, known_seconds), "linear program")
    if len(space.items) <= _MIXED_ITEMS:
        mixed = _solve(_Program(space, known_seconds, capacity_bytes, _Case.of(space)), whole=True)
        return Bound(min(max(mixed.seconds, root.seconds), known_seconds), "mixed program")
    return _by_boxes(space, known_seconds, capacity_bytes, root.seconds, out_of_time)


def fractional_choices(space: Space, known_seconds: float) -> list[int] | None:
    """Which choice the linear program favours per item, memory not counted: a start for the search.

    Args:
        space: the problem.
        known_seconds: step of some placement.

    Returns:
        Per item the position of the choice with the largest share; None if the program finds nothing faster.
    """
    answer = _solve(_Program(space, known_seconds, float("inf"), _Case.of(space)))
    if answer.shares is None:
        return None
    share: dict[int, tuple[float, int]] = {}
    for (item, choice), part in zip(answer.program.chosen, answer.shares, strict=True):
        share[item] = max(share.get(item, (-1.0, 0)), (float(part), -choice))
    return [-share[item][1] for item in range(len(space.items))]


@dataclass(frozen=True)
class _Case:
    """A part of all placements.

    Args:
        most: largest lump per column (seconds or bytes).
        least: what the maximum of a column exceeds its even load by, at least.
        pairs: least and most ids of a mean rank pair in the padded exchange.
    """

    most: tuple[float, ...]
    least: tuple[float, ...]
    pairs: tuple[float, float]

    @classmethod
    def of(cls, space: Space) -> _Case:
        pairs = sum(max(choice.pair_ids for choice in item.choices) for item in space.items)
        return cls((float("inf"),) * space.num_columns, (0.0,) * space.num_columns, (0.0, pairs))


@dataclass(frozen=True)
class _Answer:
    seconds: float
    shares: np.ndarray | None
    program: _Program = field(repr=False)
    even: np.ndarray | None = None
    tops: np.ndarray | None = None


def _solve(program: _Program, whole: bool = False) -> _Answer:
    from scipy.optimize import Bounds, LinearConstraint, milp

    integrality = np.zeros(program.num_variables)
    if whole:
        integrality[: program.num_choices] = 1
    answer = milp(
        program.objective,
        constraints=LinearConstraint(program.matrix, program.low, program.high),
        bounds=Bounds(program.lower, program.upper),
        integrality=integrality,
        options={"node_limit": _MIXED_NODES, "mip_rel_gap": 1e-3} if whole else {},
    )
    space, known = program.space, program.known_seconds
    if answer.status == 2:  # infeasible: nothing in this case is faster than what is known
        return _Answer(known, None, program)
    proven = answer.mip_dual_bound if whole else answer.fun
    if proven is None or not np.isfinite(proven):
        proven = 0.0
    # 1e-6: the solver's tolerance; the program is scaled to about 1
    seconds = space.constant_seconds + max(float(proven) - 1e-6, 0.0) * known
    if answer.x is None:
        return _Answer(seconds, None, program)
    first = program.num_choices
    even = answer.x[first : first + space.num_columns] * program.scale
    tops = answer.x[first + space.num_columns : first + 2 * space.num_columns] * program.scale
    return _Answer(seconds, answer.x[:first], program, even, tops)


def _by_boxes(space: Space, known: float, capacity: float, proven: float, out_of_time: Callable[[], bool]) -> Bound:
    for node in Boxes(space, known, capacity).explore(_BOXES):
        proven = max(proven, node.seconds)
        if known <= _CLOSE * proven or out_of_time():
            break
    return Bound(min(proven, known), "boxes")


class _Program:
    """Columns: x per choice, even load per column, maximum per column, one per latency. Scaled to about 1."""

    def __init__(self, space: Space, known_seconds: float, capacity_bytes: float, case: _Case) -> None:
        from scipy.sparse import csr_array

        self.space, self.known_seconds, self.case = space, known_seconds, case
        budget = max(capacity_bytes - space.constant_bytes, 1.0)
        if not np.isfinite(budget):
            budget = 1e18  # memory does not count
        seconds = np.full(NUM_PARTS, known_seconds)
        self.scale = np.concatenate([seconds, np.full(space.num_columns - NUM_PARTS, budget)])
        padding = space.padding(case.pairs[1])
        most = np.array(case.most) / self.scale
        even, lump, flags, copies, owner, pairs, padded = [], [], [], [], [], [], []
        self.chosen: list[tuple[int, int]] = []
        for position, item in enumerate(space.items):
            for number, choice in enumerate(item.choices):
                low = (choice.uniform + padding * choice.padded) / self.scale
                own = choice.lump / self.scale
                latency = sum(space.latency[b] for b in range(len(space.latency)) if choice.flags >> b & 1)
                least = (low + own)[:NUM_PARTS].sum() + (latency + space.constant_seconds) / known_seconds
                if least > 1 + 1e-9 or (low + own)[NUM_PARTS:].sum() > 1 + 1e-9 or (own > most).any():
                    continue
                even.append(low)
                lump.append(own)
                flags.append(choice.flags)
                copies.append(choice.copies)
                owner.append(position)
                pairs.append(choice.pair_ids)
                padded.append(float(choice.padded[:NUM_PARTS].sum()))
                self.chosen.append((position, number))
        self.num_choices = len(owner)
        shape = (self.num_choices, space.num_columns)
        self.lump = np.array(lump).reshape(shape)
        self.pairs, self.padded = np.array(pairs), np.array(padded)
        self._rows: list[int] = []
        self._cols: list[int] = []
        self._vals: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._build(np.array(even).reshape(shape), np.array(flags, dtype=np.int64), np.array(copies), np.array(owner))
        num_columns = space.num_columns
        self.num_variables = self.num_choices + 2 * num_columns + len(space.latency)
        self.matrix = csr_array((self._vals, (self._rows, self._cols)), shape=(len(self.low), self.num_variables))
        self.objective = np.zeros(self.num_variables)
        start = self.num_choices + num_columns
        self.objective[start : start + NUM_PARTS] = 1.0
        self.objective[start + num_columns :] = space.latency / known_seconds
        self.lower = np.zeros(self.num_variables)
        self.upper = np.full(self.num_variables, np.inf)
        self.upper[: self.num_choices] = 1.0
        self.upper[start + num_columns :] = 1.0

    def _row(self, columns: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        self._rows += [len(self.low)] * len(columns)
        self._cols += columns.tolist()
        self._vals += values.tolist()
        self.low.append(low)
        self.high.append(high)

    def _build(self, even: np.ndarray, flags: np.ndarray, copies: np.ndarray, owner: np.ndarray) -> None:
        space, num, ranks = self.space, self.num_choices, self.space.model.num_ranks
        width = space.num_columns
        first_even, first_top = num, num + width
        everything = np.arange(num)
        by_item = [everything[owner == position] for position in range(len(space.items))]
        for mine in by_item:
            self._row(mine, np.ones(len(mine)), 1.0, 1.0)
        for column in range(width):
            used = np.flatnonzero(even[:, column])
            self._row(np.append(used, first_even + column), np.append(even[used, column], -1.0), -np.inf, 0.0)
            ends = [first_even + column, first_top + column]
            least = self.case.least[column] / self.scale[column]
            self._row(np.array(ends), np.array([1.0, -1.0]), -np.inf, -least)
            share = self.lump[:, column] * copies / ranks if num else np.zeros(0)
            used = np.flatnonzero(share)
            self._row(np.append(used, ends), np.append(share[used], [1.0, -1.0]), -np.inf, 0.0)
            for mine in by_item:
                heavy = mine[self.lump[mine, column] > least]
                if len(heavy):
                    self._row(np.append(heavy, ends), np.append(self.lump[heavy, column], [1.0, -1.0]), -np.inf, 0.0)
        tops = np.arange(first_top + NUM_PARTS, first_top + width)
        self._row(tops, np.ones(len(tops)), -np.inf, 1.0)
        used = np.flatnonzero(self.pairs)
        if len(used):
            low, high = self.case.pairs
            slack = 1e-9 * max(high, 1.0)
            self._row(used, self.pairs[used], low - slack, high + slack)
        elif self.case.pairs[0] > 0:
            self._row(np.array([first_even]), np.array([0.0]), 1.0, 1.0)  # ids are asked for that no choice has
        for bit in range(len(space.latency)):
            for mine in by_item:
                due = mine[(flags[mine] >> bit & 1) > 0]
                if len(due) and space.latency[bit] > 0:
                    self._row(np.append(due, first_top + width + bit), np.append(np.ones(len(due)), -1.0), -np.inf, 0.0)
