"""What must hold of every plan, whatever the tables and the slice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_problems import mixed_tables
from tests.sharding.problems import table
from tpurec.kernels.limits import problem_of_rows
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.plan import Plan
from tpurec.sharding.planner import evaluate, plan
from tpurec.topology.slices import SliceTopology

SMALL = ("cpu-2", "cpu-3", "v6e-4", "v6e-8")
MEDIUM = ("v6e-16", "v5p-16", "v5e-32", "tpu7x:2x2x2", "cpu-6")

rows = st.one_of(st.integers(1, 300), st.integers(1000, 3_000_000))
one_table = st.tuples(
    rows,
    st.sampled_from([4, 8, 24, 64, 128]),
    st.sampled_from([0.0, 0.7, 1.0, 4.0, 60.0]),
    st.sampled_from(["sgd", "row_wise_adagrad", "adagrad", "adam", "partial_rowwise_adam"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["sum", "mean", "none"]),
)
assumed = st.fixed_dictionaries(
    {
        "zipf_exponent": st.sampled_from([0.0, 1.05, 1.5]),
        "link_bytes_per_second": st.sampled_from([None, 1e8, 3e10]),
        "hbm_bytes_per_second": st.sampled_from([None, 1e10]),
        "hbm_bytes": st.sampled_from([None, 2 * 10**9, 3 * 10**8]),
    }
)


@st.composite
def problems(draw, slices=SMALL + MEDIUM, most=8):
    name = draw(st.sampled_from(slices))
    most = 2 if name in SMALL else most
    drawn = draw(st.lists(one_table, min_size=1, max_size=most))
    on_cpu = name.startswith("cpu")
    tables = [
        table(f"t{i}", r, d if on_cpu or problem_of_rows(d, t) is None else 32, ids, optimizer=o, dtype=t, pooling=p)
        for i, (r, d, ids, o, t, p) in enumerate(drawn)
    ]
    batch = 24 * SliceTopology.parse(name).num_ranks
    return tables, name, batch, Assumptions(dense_parameters=1000, program_bytes=2**20, **draw(assumed))


def owners_of_every_cell(placed):
    """Count the owners of sampled rows and all columns by the meaning of the row rules, not by the plan's own check."""
    spec = placed.table
    sample = {0, 1, spec.num_embeddings // 2, spec.num_embeddings - 1} & set(range(spec.num_embeddings))
    for row in sample:
        for column in range(0, spec.embedding_dim, 4):
            owners = []
            for shard in placed.shards:
                if shard.columns[0] <= column < shard.columns[1]:
                    if shard.rule == "replicated":
                        owners.append("everyone")
                    else:
                        owners.append(shard.owner(row))
            yield owners


@settings(max_examples=30, deadline=None)
@given(problems())
def test_every_row_is_owned_once_and_memory_limits_hold(problem):
    tables, name, batch, assumptions = problem
    answer = plan(tables, name, batch, assumptions)
    if not answer.fits:
        assert answer.problems[0].bytes_missing > 0 and answer.hbm_bytes_max > answer.hbm_bytes_budget
        return
    for placed in answer.tables:
        assert all(len(owners) == 1 for owners in owners_of_every_cell(placed))
        for shard in placed.shards:  # and the counts add up to the whole table
            owned = [shard.num_rows(rank, placed.table.num_embeddings) for rank in shard.ranks]
            copies = len(shard.ranks) if shard.rule == "replicated" else 1
            assert sum(owned) == placed.table.num_embeddings * copies
    found = answer.estimates
    assert max(found.rank_bytes) <= found.hbm_bytes_max + 1 <= found.hbm_bytes_budget + 2
    assert found.hbm_bytes_max <= found.hbm_bytes_capacity
    assert found.lower_bound_seconds <= found.step_seconds * (1 + 1e-12)
    assert sum(found.step_parts.values()) == pytest.approx(found.step_seconds)
    assert sum(found.hbm_parts.values()) == pytest.approx(found.hbm_bytes_max, abs=10)


@settings(max_examples=12, deadline=None)
@given(problems(), st.sampled_from(["link_bytes_per_second", "hbm_bytes_per_second", "hbm_bytes"]), st.floats(1.0, 8.0))
def test_more_bandwidth_or_more_memory_is_never_slower(problem, what, factor):
    tables, name, batch, assumptions = problem
    filled = assumptions.on(SliceTopology.parse(name))
    value = getattr(filled, what)
    better = dataclasses.replace(assumptions, **{what: type(value)(value * factor)})
    before, after = plan(tables, name, batch, assumptions), plan(tables, name, batch, better)
    if before.fits:
        assert after.fits
        assert after.estimates.step_seconds <= before.estimates.step_seconds * (1 + 1e-12)


def test_more_memory_is_never_slower_for_many_tables():
    """Many tables are planned at one speed and up to the first plan that fits, with finer steps before it."""
    tables = mixed_tables(66, 60e9)
    steps = []
    for gib in (10, 11, 12, 14, 17, 30):
        answer = plan(tables, "v6e-8", 8192, Assumptions(hbm_bytes=gib * 2**30))
        steps.append(answer.estimates.step_seconds if answer.fits else float("inf"))
    assert np.isfinite(steps[1:]).all() and steps[0] > steps[-1]
    assert steps == sorted(steps, reverse=True)


@settings(max_examples=12, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_permuting_tables_changes_nothing(problem, random):
    tables, name, batch, assumptions = problem
    shuffled = list(tables)
    random.shuffle(shuffled)
    one, other = plan(tables, name, batch, assumptions), plan(shuffled, name, batch, assumptions)
    assert one.fits == other.fits
    if one.fits:
        assert one.estimates == other.estimates
        assert {p.name: p for p in one.tables} == {p.name: p for p in other.tables}
        assert [p.name for p in other.tables] == [t.name for t in shuffled]


@settings(max_examples=12, deadline=None)
@given(problems())
def test_a_plan_survives_json_and_is_costed_the_same(problem):
    tables, name, batch, assumptions = problem
    answer = plan(tables, name, batch, assumptions)
    if answer.fits:
        again = Plan.from_json(answer.to_json())
        assert again == answer and again.to_json() == answer.to_json()
        costed = evaluate(answer.tables, name, batch, assumptions)
        assert costed.step_seconds == answer.estimates.step_seconds
        assert costed.rank_bytes == answer.estimates.rank_bytes


def test_the_same_input_gives_the_same_plan_text():
    tables = [table("a", 10**6, 64, 3.0), table("b", 5000), table("c", 10**7, 128, 20.0)]
    one, other = (plan(tables, "v6e-16", 4096) for _ in range(2))
    assert (
        dataclasses.replace(one, plan_seconds=0.0).to_json() == dataclasses.replace(other, plan_seconds=0.0).to_json()
    )
