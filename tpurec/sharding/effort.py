"""How much a search among many items does, by the size of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from tpurec.sharding.space import Space

_MANY_ITEMS = 64  # from here on all choices come from boxes, and loads are evened shard by shard
_HUGE, _ENORMOUS = 200_000, 4_000_000  # items x ranks


@dataclass(frozen=True)
class Effort:
    """How much a search among many items does.

    Args:
        unevenness: of ranks, that starts leave room for.
        boxes: to tell apart, for each unevenness.
        starts: to build, for each unevenness.
        traded: starts whose tables trade places; how good a start is shows only then.
        powers: of the means under which they trade, one after the other.
        refined: of those, how many are refined to the end.
        cycles: of refining, at most.
        refine_powers: of the means of one cycle. A sharp one finds one small gain after another: with a thousand tables
            it takes most of the time for a few thousandths of the step.
    """

    unevenness: tuple[float, ...]
    boxes: int
    starts: int
    traded: int
    powers: tuple[int, ...]
    refined: int
    cycles: int
    refine_powers: tuple[int, ...]


SMALL = Effort((1.0,), 40, 2, 0, (), 0, 0, ())
_LARGE_EFFORT = Effort((1.03, 1.08), 60, 6, 10, (4, 16, 64), 1, 1, (64, 256))
_HUGE_EFFORT = Effort((1.06,), 200, 6, 6, (8, 16, 64), 1, 1, (64,))
# So many that one move or trade, which looks at all of them, takes as long as placing hundreds; and each of them is so
# small beside a rank's load that placing them one after the other leaves ranks even.
ENORMOUS = Effort((1.03,), 16, 2, 2, (), 1, 0, ())


def has_many(space: Space) -> bool:
    """Whether a problem is searched as one of many items; depends on its shape only.

    Args:
        space: the problem.

    Returns:
        True if all of its choices come from boxes.
    """
    return len(space.items) >= _MANY_ITEMS


def effort_of(space: Space) -> Effort:
    """How much to do for a problem with many items; depends on its shape only.

    Args:
        space: the problem.

    Returns:
        The effort.
    """
    size = len(space.items) * space.model.num_ranks
    if size > _ENORMOUS:
        return ENORMOUS
    return _HUGE_EFFORT if size > _HUGE else _LARGE_EFFORT
