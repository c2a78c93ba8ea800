"""A proven lower bound: no plan of a space is faster.

A placement chooses x[i, c] in {0, 1} per item i and choice c. Per part k of the step, the slowest rank carries at least

    the mean over ranks        sum over i, c of x (even + lump copies / ranks)
    any one item's lump        sum over i, c of x even  +  sum over c of x[i, c] lump

where `even` is the uniform load plus the padded one times the smallest padding that is possible (padding per id falls
as more ids share the exchange). A latency is due as soon as one item causes it. Stacks obey the same inequalities in
bytes, and their sum has to fit. Minimising the sum of parts under these is a linear program if x may be fractional,
and its optimum cannot exceed the cost of any placement. With few items x is kept whole (HiGHS branch and bound, whose
dual bound is valid wherever it stops). Choices that alone are slower than a known plan cannot be part of a faster one
and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpurec.sharding.space import NUM_PARTS, Space

_MIXED_ITEMS = 64  # up to this many items x is kept whole
_MIXED_NODES = 20  # a limit in nodes, not seconds, so that the bound is the same on every machine
_LOOSE = (
    1.08  # how far a plan may be above the linear program's bound before the mixed one, which takes longer, is asked
)


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step.

    Args:
        seconds: no placement that fits is faster.
        kind: `linear program` or `mixed program`.
    """

    seconds: float
    kind: str


def lower_bound(space: Space, known_seconds: float, capacity_bytes: float) -> Bound:
    """Prove how fast a plan can be at most.

    Args:
        space: the problem.
        known_seconds: step of a placement that fits.
        capacity_bytes: memory per rank.

    Returns:
        The bound, at most `known_seconds`.
    """
    program = _Program(space, known_seconds, capacity_bytes)
    bound = _solve(space, program, known_seconds, mixed=False)
    if len(space.items) <= _MIXED_ITEMS and known_seconds > _LOOSE * bound.seconds:
        bound = max(bound, _solve(space, program, known_seconds, mixed=True), key=lambda found: found.seconds)
    return bound


def _solve(space: Space, program: _Program, known_seconds: float, mixed: bool) -> Bound:
    from scipy.optimize import Bounds, LinearConstraint, milp

    kind = "mixed program" if mixed else "linear program"
    integrality = np.zeros(program.num_variables)
    if mixed:
        integrality[: program.num_choices] = 1
    answer = milp(
        program.objective,
        constraints=LinearConstraint(program.matrix, program.low, program.high),
        bounds=Bounds(program.lower, program.upper),
        integrality=integrality,
        options={"node_limit": _MIXED_NODES, "mip_rel_gap": 1e-3} if mixed else {},
    )
    proven = answer.mip_dual_bound if mixed else answer.fun
    if answer.status == 2:  # infeasible: nothing is faster than what is known
        return Bound(known_seconds, kind)
    if proven is None or not np.isfinite(proven):
        proven = 0.0
    # 1e-6: the solver's tolerance, relative to a program scaled to about 1
    seconds = space.constant_seconds + (float(proven) - 1e-6) * known_seconds
    return Bound(min(known_seconds, max(seconds, space.constant_seconds)), kind)


def fractional_choices(space: Space, known_seconds: float) -> list[int] | None:
    """Which choice the linear program favours per item, memory not counted: a start for the search.

    Args:
        space: the problem.
        known_seconds: step of some placement.

    Returns:
        Per item the position of the choice with the largest share; None if the program finds nothing faster.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    program = _Program(space, known_seconds, float("inf"))
    answer = milp(
        program.objective,
        constraints=LinearConstraint(program.matrix, program.low, program.high),
        bounds=Bounds(program.lower, program.upper),
    )
    if answer.x is None:
        return None
    share: dict[int, tuple[float, int]] = {}
    for (item, choice), part in zip(program.chosen, answer.x, strict=False):
        share[item] = max(share.get(item, (-1.0, 0)), (float(part), -choice))
    return [-share[item][1] for item in range(len(space.items))]


class _Program:
    """Columns: x per choice, even load per column, maximum per column, one per latency. Scaled to about 1."""

    def __init__(self, space: Space, known_seconds: float, capacity_bytes: float) -> None:
        from scipy.sparse import csr_array

        self._space = space
        ranks = space.model.num_ranks
        budget = max(capacity_bytes - space.constant_bytes, 1.0)
        if not np.isfinite(budget):
            budget = 1e18  # memory does not count
        scale = np.concatenate([np.full(NUM_PARTS, known_seconds), np.full(space.num_columns - NUM_PARTS, budget)])
        pairs = [[choice.pair_ids for choice in item.choices] for item in space.items]
        padding = space.padding(sum(map(max, pairs)))
        even, lump, flags, copies, owner = [], [], [], [], []
        self.chosen: list[tuple[int, int]] = []
        for position, item in enumerate(space.items):
            for number, choice in enumerate(item.choices):
                low = (choice.uniform + padding * choice.padded) / scale
                peak = low + choice.lump / scale
                latency = sum(space.latency[b] for b in range(len(space.latency)) if choice.flags >> b & 1)
                too_slow = peak[:NUM_PARTS].sum() + (latency + space.constant_seconds) / known_seconds > 1 + 1e-9
                if too_slow or peak[NUM_PARTS:].sum() > 1 + 1e-9:
                    continue
                even.append(low)
                lump.append(choice.lump / scale)
                flags.append(choice.flags)
                copies.append(choice.copies)
                owner.append(position)
                self.chosen.append((position, number))
        self.num_choices = len(owner)
        self._rows: list[int] = []
        self._cols: list[int] = []
        self._vals: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        if not owner:
            even, lump = [np.zeros(space.num_columns)], [np.zeros(space.num_columns)]
        self._build(np.array(even), np.array(lump), np.array(flags), np.array(copies), np.array(owner), ranks)
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

    def _build(
        self,
        even: np.ndarray,
        lump: np.ndarray,
        flags: np.ndarray,
        copies: np.ndarray,
        owner: np.ndarray,
        ranks: int,
    ) -> None:
        space, num = self._space, self.num_choices
        width = space.num_columns
        first_even, first_top = num, num + width
        everything = np.arange(num)
        by_item = [everything[owner == position] for position in range(len(space.items))]
        for mine in by_item:
            self._row(mine, np.ones(len(mine)), 1.0, 1.0)
        for column in range(width):
            loads = even[:num, column] if num else np.zeros(0)
            used = np.flatnonzero(loads)
            self._row(np.append(used, first_even + column), np.append(loads[used], -1.0), -np.inf, 0.0)
            share = lump[:num, column] * copies / ranks if num else np.zeros(0)
            used = np.flatnonzero(share)
            ends = [first_even + column, first_top + column]
            self._row(np.append(used, ends), np.append(share[used], [1.0, -1.0]), -np.inf, 0.0)
            for mine in by_item:
                heavy = mine[lump[mine, column] > 0] if len(mine) else mine
                if len(heavy):
                    self._row(np.append(heavy, ends), np.append(lump[heavy, column], [1.0, -1.0]), -np.inf, 0.0)
        tops = np.arange(first_top + NUM_PARTS, first_top + width)
        self._row(tops, np.ones(len(tops)), -np.inf, 1.0)
        for bit in range(len(space.latency)):
            for mine in by_item:
                due = mine[(flags[mine] >> bit & 1) > 0] if len(mine) else mine
                if len(due) and space.latency[bit] > 0:
                    self._row(np.append(due, first_top + width + bit), np.append(np.ones(len(due)), -1.0), -np.inf, 0.0)
