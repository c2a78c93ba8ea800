"""A proven lower bound: no plan of a space is faster.

Boxes of placements are told apart first (`tpurec/sharding/boxes.py`): they see latencies, padding and what lumps leave
no room for, and need NumPy alone. Where memory binds and tables are few, a plan may stay far above that; then a
program with whole choices follows. A placement chooses x[i, c] in {0, 1} per item i and choice c. Per part k of the
step, the slowest rank carries at least

    the mean over ranks        sum over i, c of x (even + lump copies / ranks)
    any one item's lump        sum over i, c of x even  +  sum over c of x[i, c] lump

where `even` is the uniform load plus the padded one times the smallest padding that is possible (padding per id falls
as more ids share the exchange). A latency is due as soon as one item causes it. Stacks obey the same inequalities in
bytes, and their sum has to fit. Choices that alone are slower than a known plan cannot be part of a faster one and are
left out. HiGHS minimises the sum of parts by branch and bound; its dual bound is valid wherever it stops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tpurec.sharding.boxes import Boxes
from tpurec.sharding.space import NUM_PARTS, Space

# Limits in nodes and boxes, not in seconds, so that the bound is the same on every machine.
_FEW_ITEMS = 64
_BOXES, _BOXES_OF_FEW = 800, 64  # to tell apart at most
_MOST_BOXED = 800_000  # items x boxes
_CLOSE, _CLOSE_OF_FEW = 1.02, 1.002  # how near the bound is near enough
_MIXED_NODES = 20
_LOOSE = 1.08  # how far a plan of few items may be above the boxes before the mixed program is tried


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step.

    Args:
        seconds: no placement that fits is faster.
        kind: `boxes` or `mixed program`.
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
    few = len(space.items) <= _FEW_ITEMS
    boxes, close = (_BOXES_OF_FEW, _CLOSE_OF_FEW) if few else (_BOXES, _CLOSE)
    boxes = min(boxes, _MOST_BOXED // len(space.items))
    proven = 0.0
    for node in Boxes(space, known_seconds, capacity_bytes).explore(boxes):
        proven = max(proven, node.seconds)
        if known_seconds <= close * proven or out_of_time():
            break
    if few and known_seconds > _LOOSE * proven and not out_of_time():
        mixed = _mixed(space, known_seconds, capacity_bytes)
        if mixed > proven:
            return Bound(min(mixed, known_seconds), "mixed program")
    return Bound(min(proven, known_seconds), "boxes")


def _mixed(space: Space, known: float, capacity: float) -> float:
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: it takes half a second, and few plans need it

    program = _Program(space, known, capacity)
    integrality = np.zeros(program.num_variables)
    integrality[: program.num_choices] = 1
    answer = milp(
        program.objective,
        constraints=LinearConstraint(program.matrix(), program.low, program.high),
        bounds=Bounds(program.lower, program.upper),
        integrality=integrality,
        options={"node_limit": _MIXED_NODES, "mip_rel_gap": 1e-3},
    )
    if answer.status == 2:  # infeasible: nothing is faster than what is known
        return known
    proven = answer.mip_dual_bound
    if proven is None or not np.isfinite(proven):
        proven = 0.0
    # 1e-6: the solver's tolerance; the program is scaled to about 1
    return space.constant_seconds + max(float(proven) - 1e-6, 0.0) * known


class _Program:
    """Columns: x per choice, even load per column, maximum per column, one per latency. Scaled to about 1."""

    def __init__(self, space: Space, known_seconds: float, capacity_bytes: float) -> None:
        self.space = space
        budget = max(capacity_bytes - space.constant_bytes, 1.0)
        seconds = np.full(NUM_PARTS, known_seconds)
        scale = np.concatenate([seconds, np.full(space.num_columns - NUM_PARTS, budget)])
        padding = space.padding(sum(max(choice.pair_ids for choice in item.choices) for item in space.items))
        even, lump, flags, copies, owner = [], [], [], [], []
        for position, item in enumerate(space.items):
            for choice in item.choices:
                low = (choice.uniform + padding * choice.padded) / scale
                own = choice.lump / scale
                latency = sum(space.latency[b] for b in range(len(space.latency)) if choice.flags >> b & 1)
                least = (low + own)[:NUM_PARTS].sum() + (latency + space.constant_seconds) / known_seconds
                if least > 1 + 1e-9 or (low + own)[NUM_PARTS:].sum() > 1 + 1e-9:
                    continue
                even.append(low)
                lump.append(own)
                flags.append(choice.flags)
                copies.append(choice.copies)
                owner.append(position)
        self.num_choices = len(owner)
        shape = (self.num_choices, space.num_columns)
        self._lump = np.array(lump).reshape(shape)
        self._rows: list[int] = []
        self._cols: list[int] = []
        self._vals: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._build(np.array(even).reshape(shape), np.array(flags, dtype=np.int64), np.array(copies), np.array(owner))
        num_columns = space.num_columns
        self.num_variables = self.num_choices + 2 * num_columns + len(space.latency)
        self.objective = np.zeros(self.num_variables)
        start = self.num_choices + num_columns
        self.objective[start : start + NUM_PARTS] = 1.0
        self.objective[start + num_columns :] = space.latency / known_seconds
        self.lower = np.zeros(self.num_variables)
        self.upper = np.full(self.num_variables, np.inf)
        self.upper[: self.num_choices] = 1.0
        self.upper[start + num_columns :] = 1.0

    def matrix(self) -> object:
        """The rows, as SciPy takes them."""
        from scipy.sparse import csr_array

        return csr_array((self._vals, (self._rows, self._cols)), shape=(len(self.low), self.num_variables))

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
            self._row(np.array(ends), np.array([1.0, -1.0]), -np.inf, 0.0)
            share = self._lump[:, column] * copies / ranks if num else np.zeros(0)
            used = np.flatnonzero(share)
            self._row(np.append(used, ends), np.append(share[used], [1.0, -1.0]), -np.inf, 0.0)
            for mine in by_item:
                heavy = mine[self._lump[mine, column] > 0]
                if len(heavy):
                    self._row(np.append(heavy, ends), np.append(self._lump[heavy, column], [1.0, -1.0]), -np.inf, 0.0)
        tops = np.arange(first_top + NUM_PARTS, first_top + width)
        self._row(tops, np.ones(len(tops)), -np.inf, 1.0)
        for bit in range(len(space.latency)):
            for mine in by_item:
                due = mine[(flags[mine] >> bit & 1) > 0]
                if len(due) and space.latency[bit] > 0:
                    self._row(np.append(due, first_top + width + bit), np.append(np.ones(len(due)), -1.0), -np.inf, 0.0)
