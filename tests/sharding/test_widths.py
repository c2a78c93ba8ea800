"""Plans of the same cost in fewer widths, which the exchange pads less."""

import numpy as np
import pytest

from tests.sharding.problems import random_tables, table
from tpurec.sharding.assemble import placement_of
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.planner import make_space, plan
from tpurec.sharding.space import Placement, Space
from tpurec.sharding.step_shapes import step_shapes
from tpurec.sharding.widths import PooledLines, with_fewer_widths
from tpurec.topology.slices import SliceTopology


def space_of(tables, **more) -> Space:
    return make_space(tables, SliceTopology.parse("v6e-4"), 4096, Assumptions(**more))


def placed(space: Space, **where: tuple[int, ...]) -> Placement:
    """A placement of column shards: table to its ranks, a shard each."""
    choices, ranks = [], []
    for item in space.items:
        own = where[space.tables[item.tables[0]].name]
        kind = "column_wise" if len(own) > 1 else "table_wise"
        choices.append(next(n for n, c in enumerate(item.choices) if (c.sharding, c.copies) == (kind, len(own))))
        ranks.append(own)
    return Placement(tuple(choices), tuple(ranks))


def joined(space: Space, placement: Placement) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Owners after joining, and the columns of a message before and after; the step must cost the same."""
    found = with_fewer_widths(space, placement, lambda: False)
    assert space.cost(found).seconds == pytest.approx(space.cost(placement).seconds, rel=1e-11)
    names = (space.tables[item.tables[0]].name for item in space.items)
    return (
        dict(zip(names, found.ranks, strict=True)),
        PooledLines(space, placement).columns,
        PooledLines(space, found).columns,
    )


def tables(ids: float = 1.0, rows: int = 900):
    """Two that may be cut in two, beside two whole ones with 5 ids an example."""
    cut = (table("a", rows, 128, ids, optimizer="sgd"), table("b", 900, 128, ids, optimizer="sgd"))
    return [*cut, *(table(name, 800, 128, 5.0, optimizer="sgd") for name in "cd")]


CUT = {"a": (0, 1), "b": (0, 1), "c": (2,), "d": (3,)}


def test_two_tables_in_two_columns_on_the_same_ranks_become_whole_on_one_each():
    """64 + 64 columns of ranks 0 and 1 are padded beside 128 of ranks 2 and 3: 256. Whole they are 128 on all."""
    space = space_of(tables())
    owners, before, after = joined(space, placed(space, **CUT))
    assert (before, after) == (256, 128)
    assert {owners["a"], owners["b"]} == {(0,), (1,)} and (owners["c"], owners["d"]) == ((2,), (3,))


def test_columns_stay_where_whole_tables_would_take_longer():
    """With 5 ids of a alone its owner would be slower than ranks 2 and 3."""
    space = space_of(tables(6.0)[:1] + tables()[2:])
    owners, before, after = joined(space, placed(space, a=(0, 1), c=(2,), d=(3,)))
    assert owners["a"] == (0, 1) and before == after == 192


def test_columns_stay_where_whole_tables_do_not_fit():
    wanted = placed(space_of(tables(rows=9_000_000)), **CUT)
    for share, columns in ((1.1, 128), (0.9, 256)):
        space = space_of(tables(rows=9_000_000))
        whole = space.cost(with_fewer_widths(space, wanted, lambda: False)).bytes
        tight = space_of(tables(rows=9_000_000), reserve_share=1 - share * whole / space.model.assume.hbm_bytes)
        assert (tight.model.capacity_bytes > whole) == (columns == 128)
        assert joined(tight, wanted)[2] == columns


def test_pinned_ranks_are_kept_and_a_clock_that_is_over_ends_it():
    pinned = [table("a", 900, 128, 1.0, optimizer="sgd", pin="column_wise", pin_ranks=(0, 1)), *tables()[1:]]
    space = space_of(pinned)
    assert joined(space, placed(space, **CUT))[0]["a"] == (0, 1)
    space = space_of(tables())
    assert with_fewer_widths(space, placed(space, **CUT), lambda: True) == placed(space, **CUT)


@pytest.mark.parametrize("seed", range(4))
def test_the_columns_counted_are_those_that_training_sends(seed):
    drawn = random_tables(np.random.default_rng(seed), 10, 3e6)
    found = plan(drawn, "v6e-16", 1600)
    space = make_space(drawn, SliceTopology.parse("v6e-16"), 1600, Assumptions())
    sent = sum(one.stack.width * one.stack.num_answers for one in step_shapes(drawn, found, 1600, most_ranks=1).stacks)
    assert PooledLines(space, placement_of(space, found.tables)).columns == sent
