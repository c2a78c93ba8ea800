"""Plans of small problems against brute force, and lower bounds that hold."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.planner_problems import mixed_tables
from tests.sharding.problems import random_tables
from tpurec.sharding import bound as bound_module
from tpurec.sharding import search as search_module
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.balance import balance
from tpurec.sharding.bound import lower_bound
from tpurec.sharding.boxes import Boxes
from tpurec.sharding.packing import Packer
from tpurec.sharding.planner import make_space, plan
from tpurec.sharding.space import State
from tpurec.topology.slices import SliceTopology

SLICES = ("cpu-2", "cpu-3", "v6e-4", "v5p-8", "v6e-8")


def small_problem(seed):
    """Random tables on a few ranks, random link speed and memory: every kind of sharding gets its chance."""
    rng = np.random.default_rng(seed)
    slice_ = SliceTopology.parse(SLICES[seed % len(SLICES)])
    count = 2 if slice_.num_ranks > 4 else int(rng.integers(2, 4))
    tables = random_tables(rng, count, largest=float(rng.choice([1e4, 3e6])))
    total = sum(t.weight_bytes + t.state_bytes for t in tables)
    needed = 2**28 + total / slice_.num_ranks * float(rng.choice([1.3, 2.0, 5.0]))
    base = Assumptions().on(slice_)
    assumptions = Assumptions(
        dense_parameters=1000,
        program_bytes=2**20,
        reserve_share=0.0,
        hbm_bytes=int(needed),
        link_bytes_per_second=base.link_bytes_per_second * float(rng.choice([0.03, 1.0, 30.0])),
    )
    return tables, slice_, 96 * slice_.num_ranks, assumptions


def brute_force(space):
    """Seconds of the fastest placement that fits, by trying every one with the evaluator."""
    ranks = range(space.model.num_ranks)
    options = []
    for item in space.items:
        mine = []
        for number, choice in enumerate(item.choices):
            if choice.group:
                mine += [(number, g) for g in space.groups[choice.group]]
            else:
                mine += [(number, np.array(owners, dtype=np.int64)) for owners in combinations(ranks, choice.copies)]
        options.append(mine)
    best, state = None, State(space)

    def place(item):
        nonlocal best
        if item == len(options):
            cost = state.cost()
            if cost.bytes <= space.model.capacity_bytes and (best is None or cost.seconds < best):
                best = cost.seconds
            return
        for number, owners in options[item]:
            state.put(item, number, owners)
            place(item + 1)
            state.take(item)

    place(0)
    return best


def compare(seeds, monkeypatch, heuristic):
    """Seconds above the optimum, as a share, per problem that has a plan."""
    if heuristic:
        monkeypatch.setattr(search_module, "is_small", lambda space: False)
    above = []
    for seed in seeds:
        tables, slice_, batch, assumptions = small_problem(seed)
        space = make_space(tables, slice_, batch, assumptions)
        best = brute_force(space)
        answer = plan(tables, slice_, batch, assumptions)
        assert answer.fits == (best is not None), seed
        if best is None:
            continue
        found = answer.estimates
        assert found.hbm_bytes_max <= space.model.capacity_bytes + 1
        assert found.step_seconds >= best * (1 - 1e-9), seed  # brute force missed nothing
        assert found.lower_bound_seconds <= best * (1 + 1e-9), seed  # the bound holds for the true optimum
        above.append(found.step_seconds / best - 1)
    return np.array(above)


def test_200_small_problems_against_brute_force(monkeypatch):
    above = compare(range(200), monkeypatch, heuristic=False)
    assert len(above) >= 150
    assert above.max() <= 1e-9  # asked for: 5 %, and 0 in the middle


def test_the_heuristic_alone_is_close_on_small_problems(monkeypatch):
    above = compare(range(25), monkeypatch, heuristic=True)
    assert above.max() <= 0.05
    assert np.median(above) <= 1e-9


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_200_small_problems_by_heuristic_against_brute_force(monkeypatch):
    above = compare(range(200), monkeypatch, heuristic=True)
    assert len(above) >= 150
    assert above.max() <= 0.05 and np.median(above) <= 1e-9


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("few_items", [64, 0])
def test_bounds_are_below_the_optimum(seed, few_items, monkeypatch):
    monkeypatch.setattr(bound_module, "_FEW_ITEMS", few_items)  # 0: by boxes alone
    monkeypatch.setattr(bound_module, "_LOOSE", 0.0)
    monkeypatch.setattr(bound_module, "_CLOSE_OF_FEW", 1.0)
    monkeypatch.setattr(bound_module, "_CLOSE", 1.0)
    tables, slice_, batch, assumptions = small_problem(seed)
    space = make_space(tables, slice_, batch, assumptions)
    answer = plan(tables, slice_, batch, assumptions)
    if answer.fits:
        optimum = answer.estimates.step_seconds
        for known in (optimum, 3 * optimum):
            bound = lower_bound(space, known, space.model.capacity_bytes)
            assert 0 < bound.seconds <= optimum * (1 + 1e-9)


def test_telling_boxes_apart_tightens_the_bound():
    tables, slice_, batch, assumptions = small_problem(7)
    space = make_space(tables, slice_, batch, assumptions)
    optimum = plan(tables, slice_, batch, assumptions).estimates.step_seconds
    whole = next(Boxes(space, optimum, space.model.capacity_bytes).explore(800))
    bound = lower_bound(space, optimum, space.model.capacity_bytes)
    assert bound.kind == "boxes"
    assert whole.seconds * 1.01 < bound.seconds <= optimum * (1 + 1e-9)


def test_whole_choices_tighten_the_bound_where_memory_binds(monkeypatch):
    """9 tables, few of which may be copied: by boxes alone the plan is 1.09 times the bound; it is the fastest."""
    tables = random_tables(np.random.default_rng(9), 9)
    total = sum(t.weight_bytes + t.state_bytes for t in tables)
    small = Assumptions(
        dense_parameters=1000, program_bytes=2**20, reserve_share=0.0, hbm_bytes=int(2**29 + 1.2 * total / 16)
    )
    found = plan(tables, "v6e-16", 16 * 1024, small).estimates
    assert found.lower_bound_kind == "mixed program"
    assert found.step_seconds <= 1.001 * found.lower_bound_seconds
    monkeypatch.setattr(bound_module, "_FEW_ITEMS", 0)
    alone = plan(tables, "v6e-16", 16 * 1024, small).estimates
    assert alone.step_seconds == found.step_seconds
    assert alone.lower_bound_seconds * 1.05 < found.lower_bound_seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_bytes", "most"), [(16e9, 1.10), (2e12, 1.11)])
def test_1000_tables_on_1024_ranks_are_close_to_the_bound(num_bytes, most):
    found = plan(mixed_tables(1000, num_bytes), "v5p-2048", 65_536).estimates
    assert found.lower_bound_kind == "boxes"
    assert found.step_seconds <= most * found.lower_bound_seconds


@pytest.mark.parametrize("power", [16, 64])
def test_balancing_keeps_choices_and_evens_ranks(power):
    tables = mixed_tables(60, 2e10)
    space = make_space(tables, SliceTopology.parse("v6e-64"), 65_536, Assumptions())
    packer, state = Packer(space, 0.0, lambda: False), State(space)
    for number, item in enumerate(space.items):  # the worst start: every table whole on rank 0
        whole = next(n for n, choice in enumerate(item.choices) if choice.sharding == "table_wise")
        state.put(number, whole, np.zeros(1, dtype=np.int64))
    after = balance(state, packer.price, power, 4000, lambda: False)
    assert after.choice == state.choice
    assert all(len(set(ranks.tolist())) == len(ranks) for ranks in after.ranks)
    assert after.cost().seconds < 0.7 * state.cost().seconds
    assert np.allclose(after.load.sum(axis=0), state.load.sum(axis=0))
