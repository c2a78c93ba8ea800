"""Fewer widths at no higher cost: of plans that the cost model cannot tell apart, one that the exchange pads less.

Owners send pooled vectors in even messages, one after the other for each width of columns, and each width is padded to
its own busiest rank (`tpurec.sharding.placement`). The cost model adds up what a rank sends and does not see that. Two
tables in four columns each on the same four ranks cost as much as in two columns each on two of them; but beside other
tables of that width the latter are padded together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tpurec.sharding.choices import Choice
from tpurec.sharding.space import Placement, Space
from tpurec.sharding.tables import OPTIMIZER_STATE

_MOST_COSTED = 200  # placements: each is costed from scratch
_EQUAL = 1e-12  # of the step: rounding
_MOST_TRIED = 20_000  # moves, of which only those that save columns are costed

Move = dict[int, tuple[int, tuple[int, ...]]]  # item to its choice and ranks


class PooledLines:
    """How many columns of pooled vectors each rank answers with, by width.

    Args:
        space: the problem.
        placement: where the tables are.
    """

    def __init__(self, space: Space, placement: Placement) -> None:
        self._space = space
        self._used: dict[tuple[object, ...], np.ndarray] = {}
        for item, (choice, ranks) in enumerate(zip(placement.choices, placement.ranks, strict=True)):
            self.add(item, choice, ranks, 1)

    def add(self, item: int, choice: int, ranks: tuple[int, ...], sign: int) -> None:
        """Count an item.

        Args:
            item: its position.
            choice: the position of its choice.
            ranks: that own its lump; empty for all.
            sign: 1, or -1 to take it out.
        """
        space, chosen = self._space, self._space.items[item].choices[choice]
        if chosen.exchange not in ("bags", "partial_pools"):
            return
        by_columns = chosen.sharding == "column_wise"
        for position in space.items[item].tables:
            table = space.tables[position]
            width = table.embedding_dim // (chosen.copies if by_columns else 1)
            # Column shards with state per row have stacks of their own.
            kind = (width, table.dtype, table.optimizer, by_columns and OPTIMIZER_STATE[table.optimizer][0] > 0)
            used = self._used.setdefault(kind, np.zeros(space.model.num_ranks, dtype=np.int64))
            np.add.at(used, list(ranks) or slice(None), sign * width * len(table.features))

    @property
    def columns(self) -> int:
        """Of the padded message to each rank: the busiest rank's of each width."""
        return int(sum(used.max() for used in self._used.values()))


def with_fewer_widths(space: Space, placement: Placement, is_over: Callable[[], bool]) -> Placement:
    """Join columns where the exchange is then padded less, the step costs the same and the memory suffices.

    Args:
        space: the problem.
        placement: one that fits.
        is_over: whether to stop with what there is.

    Returns:
        A placement that fits and costs as many seconds.
    """
    lines, seconds, costed, tried = PooledLines(space, placement), space.cost(placement).seconds, 0, 0
    best, fewest = placement, lines.columns
    is_better = True
    while is_better:
        is_better = False
        for move in _moves(space, placement):
            tried += 1
            if costed >= _MOST_COSTED or tried > _MOST_TRIED or is_over():
                return best
            before = lines.columns
            _apply(lines, placement, move)
            # As many columns are good enough on the way: the busiest ranks of a width may be several.
            if lines.columns <= before:
                costed += 1
                moved = _moved(placement, move)
                found = space.cost(moved)
                # Not less, either: what the search finds must not depend on the speeds (`tpurec.sharding.search`).
                is_equal = abs(found.seconds - seconds) <= _EQUAL * seconds
                if is_equal and found.bytes <= space.model.capacity_bytes:
                    placement, is_better = moved, True
                    if lines.columns < fewest:
                        best, fewest = moved, lines.columns
                    break
            _apply(lines, placement, move, -1)
    return best


def _apply(lines: PooledLines, placement: Placement, move: Move, sign: int = 1) -> None:
    for item, (choice, ranks) in move.items():
        lines.add(item, placement.choices[item], placement.ranks[item], -sign)
        lines.add(item, choice, ranks, sign)


def _moved(placement: Placement, move: Move) -> Placement:
    choices, ranks = list(placement.choices), list(placement.ranks)
    for item, (choice, where) in move.items():
        choices[item], ranks[item] = choice, where
    return Placement(tuple(choices), tuple(ranks))


def _moves(space: Space, placement: Placement) -> Iterator[Move]:
    """An item alone on half of its ranks with columns twice as wide; or two on the same ranks, each on its half."""
    wider: dict[int, int] = {}
    for number, item in enumerate(space.items):
        chosen = item.choices[placement.choices[number]]
        joined = _joined(item.choices, chosen)
        if item.pinned is None and joined is not None:
            wider[number] = joined
    for number, choice in wider.items():
        ranks = placement.ranks[number]
        middle = len(ranks) // 2
        halves = dict.fromkeys(((ranks[::2], ranks[1::2]), (ranks[:middle], ranks[middle:])))
        for one, other in [*halves, *((other, one) for one, other in halves)]:
            yield {number: (choice, one)}
            for partner, its_choice in wider.items():
                if partner > number and placement.ranks[partner] == ranks:
                    yield {number: (choice, one), partner: (its_choice, other)}


def _joined(choices: tuple[Choice, ...], chosen: Choice) -> int | None:
    """The choice with half as many column shards."""
    if chosen.sharding != "column_wise" or chosen.exchange != "bags" or chosen.copies % 2:
        return None
    ways = ("table_wise", "column_wise")
    same = (n for n, one in enumerate(choices) if one.sharding in ways and one.copies == chosen.copies // 2)
    return next(same, None)
