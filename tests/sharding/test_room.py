"""What shards leave no room for: valid for every packing, and seen by the bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_problems import long_bag_tables
from tests.sharding.problems import table
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.boxes import Boxes
from tpurec.sharding.packing import Packer
from tpurec.sharding.planner import make_space, plan
from tpurec.sharding.room import BESIDE, FUNCTIONS, beside, common_unit, room_beside, room_of_all, room_taken
from tpurec.sharding.space import State
from tpurec.sharding.trade import trade
from tpurec.topology.slices import SliceTopology

# Sizes near the functions' steps are where a mistake would show: k/n, and a little beside it.
size = st.one_of(
    st.floats(0.0, 1.0),
    st.builds(
        lambda k, n, e: min(1.0, max(0.0, k / n + e)),
        st.integers(0, 12),
        st.integers(1, 12),
        st.sampled_from([-1e-4, 0, 1e-4]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(size, min_size=1, max_size=12))
def test_whatever_fits_by_size_fits_by_room(sizes):
    kept, total = [], 0.0
    for value in sizes:  # as many as fit
        if total + value <= 1:
            kept.append(value)
            total += value
    for function in range(len(FUNCTIONS)):
        taken = room_taken(np.array(kept), function)
        assert taken.sum() <= 1 + 1e-8, FUNCTIONS[function]
        assert (taken >= 0).all() and (taken <= 1).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(size, size), min_size=1, max_size=12), st.sampled_from(BESIDE))
def test_whatever_fits_by_both_sizes_fits_beside(pairs, least):
    kept = np.zeros((0, 2))
    for pair in pairs:
        if (kept.sum(axis=0) + pair <= 1).all():
            kept = np.append(kept, [pair], axis=0)
    assert beside(kept[:, 0], kept[:, 1], least).sum() <= 1 + 1e-8


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [([0.0, 6e-6, 10e-6, 15e-6], 1e-6), ([4.0], 4.0), ([0.0], 0.0), ([1.0, np.pi, np.e], 0.0), ([1.0, 1e-9], 0.0)],
)
def test_common_unit(sizes, unit):
    assert common_unit(np.array(sizes)) == pytest.approx(unit, rel=1e-6)


def whole_tables(count, slice_):
    tables = [table(f"t{i}", 50_000 + i, 64, allow=("table_wise",)) for i in range(count)]
    return make_space(tables, SliceTopology.parse(slice_), 6144, Assumptions(dense_parameters=1000))


def test_the_bound_sees_that_one_of_three_ranks_gets_two_of_four_tables():
    space = whole_tables(4, "cpu-3")
    lump = space.items[0].choices[0].lump
    state = Packer(space, 0.0, lambda: False).construct([0] * 4)
    step = state.cost().seconds
    bound = max(node.seconds for node in Boxes(space, step * 1.001, float("inf")).explore(60))
    loads = bound - space.constant_seconds - float(space.latency[0])
    assert loads == pytest.approx(2 * lump[:9].sum(), rel=0.01)  # by the mean it were 4/3 of a table
    assert bound <= step * (1 + 1e-9)


@pytest.mark.parametrize("power", [64, 256])
def test_trading_repairs_a_wrong_pairing_and_keeps_the_pattern(power):
    tables = [table(f"t{i}", 1_000_000, 64, 1.0 + i) for i in range(16)]
    space = make_space(tables, SliceTopology.parse("v6e-8"), 8192, Assumptions())
    packer = Packer(space, 0.0, lambda: False)
    whole = [
        next(n for n, choice in enumerate(item.choices) if choice.sharding == "table_wise") for item in space.items
    ]
    order = np.argsort([-item.choices[pick].lump.sum() for item, pick in zip(space.items, whole, strict=True)])
    state = State(space)
    for place, item in enumerate(order.tolist()):  # the two heaviest on one rank, and so on: the worst pairing
        state.put(item, whole[item], np.array([place // 2]))
    after = trade(state, packer.price, power, 100, lambda: False)
    assert after.choice == state.choice
    assert sorted(ranks[0] for ranks in after.ranks) == sorted(ranks[0] for ranks in state.ranks)
    best = after.load[:, 1].mean()
    assert state.load[:, 1].max() > 1.5 * best
    assert after.load[:, 1].max() < 1.1 * best


def test_a_trade_gives_the_heavy_table_the_others_sharding():
    tables = [table(f"t{i}", 2000, 64, 60.0 if i == 0 else 1.0) for i in range(4)]
    space = make_space(tables, SliceTopology.parse("v6e-4"), 8192, Assumptions())
    packer, state = Packer(space, 0.0, lambda: False), State(space)
    for number, item in enumerate(space.items):  # the heavy table on one rank, light ones copied
        heavy = space.tables[number].ids_per_example > 1
        wanted = "table_wise" if heavy else "data_parallel"
        pick = next(n for n, choice in enumerate(item.choices) if choice.sharding == wanted)
        state.put(number, pick, np.array([number % 4] if heavy else [], dtype=np.int64))
    after = trade(state, packer.price, 64, 100, lambda: False)
    for number, item in enumerate(space.items):
        heavy = space.tables[number].ids_per_example > 1
        if heavy:
            assert item.choices[after.choice[number]].sharding == "data_parallel"
    assert after.cost().seconds < state.cost().seconds
    assert after.cost().seconds == pytest.approx(space.cost(after.placement()).seconds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_long_bags_are_planned_close_to_the_bound():
    """The plan was 1.33 times the bound before tables traded places and the bound saw what has room side by side."""
    found = plan(long_bag_tables(200, 2e11), "v6e-256", 65_536).estimates
    assert found.lower_bound_kind == "boxes"
    assert found.step_seconds <= 1.10 * found.lower_bound_seconds


def test_room_of_many_functions_at_once_is_the_room_of_each() -> None:
    """Sums for the search of rows that lack room."""
    rng = np.random.default_rng(5)
    sizes, others, share = rng.random(50), rng.random((50, 3)), rng.random(50)
    sizes[:4] = 0.5, 1.0, 0.0, 0.97
    each = [float(share @ room_taken(sizes, function)) for function in range(len(FUNCTIONS))]
    assert room_of_all(sizes, share) == pytest.approx(each)
    beside_each = [[float(share @ beside(sizes, other, least)) for other in others.T] for least in BESIDE]
    assert room_beside(sizes, others, share).ravel() == pytest.approx(np.array(beside_each).ravel())
