"""Small inputs that break planners, and the settings of the MLPerf tables."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharding.problems import MLPERF, table
from tpurec.errors import ConfigError
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.plan import PlacedTable, Shard
from tpurec.sharding.planner import evaluate, plan
from tpurec.sharding.tables import SHARDINGS, FeatureSpec, TableSpec, read_tables


def test_a_table_larger_than_any_chip_is_named_with_bytes_and_ways_out():
    """case 17: one table larger than any chip, table-wise only."""
    big = table("big", 100_000_000, 128, allow=("table_wise",), optimizer="adam")
    answer = plan([big, table("small", 1000)], "v6e-16", 4096)
    assert not answer.fits
    (problem,) = answer.problems
    needed = 100_000_000 * 128 * 4 * 3
    assert problem.table == "big" and "table_wise" in problem.message
    assert "143.05 GiB" in problem.message and "31.24 GiB" in problem.message  # GiB needed, GiB there are
    assert problem.bytes_missing == pytest.approx(needed - 29.3 * 2**30, rel=0.01)
    ways = {remedy["action"]: remedy for remedy in problem.remedies}
    assert "table 'big': allow every sharding" in ways
    for way in ways.values():
        assert way["hbm_bytes_max"] < 31.24 * 2**30 and way["step_seconds"] > 0


def test_every_way_out_works_when_taken():
    """case 17: each remedy was planned; take the first and plan again."""
    big = table("big", 100_000_000, 128, allow=("table_wise",), optimizer="adam")
    first = plan([big], "v6e-16", 4096).problems[0].remedies[0]
    assert first["action"] == "table 'big': allow every sharding"
    again = plan([dataclasses.replace(big, allow=None)], first["slice"], 4096)
    assert again.fits and again.estimates.step_seconds == first["step_seconds"]


@pytest.mark.parametrize(
    ("spec", "slice_", "reason"),
    [
        (table("t", 100, 12, pin="column_wise"), "cpu-4", "multiple of 8 columns; embedding_dim 12"),
        (table("t", 100, 16, dtype="bfloat16", pin="column_wise"), "v6e-4", "multiple of 16 columns; embedding_dim 16"),
        (table("t", 100, 64, pin="column_wise"), "v6e-1", "needs 2 ranks or more"),
        (table("t", 100, 64, pin="row_wise"), "v6e-1", "needs 2 ranks or more"),
        (table("t", 100, 64, pin="table_row_wise"), "cpu-4", "cpu-4 has none"),
        (table("t", 100, 64, pin="table_row_wise", pooling="none"), "v6e-16", "no pools"),
        (table("t", 100, 64, pin="column_wise", pin_ranks=(0, 1, 2)), "v6e-4", r"column_wise needs \[2, 4\] ranks"),
        (table("t", 100, 64, pin="table_wise", pin_ranks=(4,)), "v6e-4", "0 to 3 on v6e-4"),
        (table("t", 100, 64, pin="row_wise", pin_ranks=(0, 1)), "v6e-4", "uses all 4 ranks"),
        (table("t", 100, 64, pin="table_row_wise", pin_ranks=(0, 1, 2, 5)), "v6e-16", "one host, torus line"),
    ],
)
def test_a_sharding_that_a_table_cannot_have_is_refused_with_the_reason(spec, slice_, reason):
    """case 18: a forced sharding type that the table cannot have."""
    with pytest.raises(ConfigError, match=reason) as caught:
        plan([spec], slice_, 64)
    assert "'t'" in str(caught.value)


@pytest.mark.parametrize("rows", [4091, 5, 1, 8])
@pytest.mark.parametrize("sharding", [None, "row_wise"])
def test_rows_that_do_not_divide_are_padded_and_owned_once(rows, sharding):
    """case 19: 4,091 rows over 8 ranks; 5 rows over 8 ranks."""
    answer = plan([table("t", rows, 64, pin=sharding)], "v6e-8", 64)
    (placed,) = answer.tables
    (shard,) = placed.shards
    counts = [shard.num_rows(rank, rows) for rank in range(8)]
    if shard.rule == "modulo":
        assert sum(counts) == rows and max(counts) == -(-rows // 8)
        (stack,) = answer.stacks  # recorded: every rank stores the same padded number of rows
        assert stack.rows >= max(counts) and stack.rows % 8 == 0
        assert shard.bytes == stack.rows * (64 * 4 + 4)
    else:
        assert shard.rule in ("all", "replicated") and counts[shard.ranks[0]] == rows


@pytest.mark.parametrize(
    ("way", "slice_", "others"),
    [
        ("row_wise", "v6e-1", "data_parallel or table_wise"),
        ("table_row_wise", "cpu-4", "data_parallel or table_wise or column_wise or row_wise"),
    ],
)
def test_a_refused_sharding_comes_with_those_that_are_possible(way, slice_, others):
    """case 18: the way out is not what was just refused."""
    with pytest.raises(ConfigError) as caught:
        plan([table("t", 100, 64, pin=way)], slice_, 64)
    assert str(caught.value).endswith(f"Allow another sharding: it can be {others}.")


def test_idle_ranks_are_visible():
    """case 20: 16 chips but a plan that uses 8."""
    eight = [table(f"t{i}", 1000, 64, pin="table_wise", pin_ranks=(i,)) for i in range(8)]
    answer = plan(eight, "v6e-16", 4096)
    assert answer.estimates.idle_ranks == 8 and answer.summary()["idle_ranks"] == 8
    free = plan([table(f"t{i}", 100_000, 64, 5.0) for i in range(8)], "v6e-16", 4096)
    assert free.estimates.idle_ranks == 0


def test_few_rows_leave_ranks_idle_and_replicas_do_not():
    """case 20: idle is counted by rows that are owned."""
    assert plan([table("t", 5, 64, pin="row_wise")], "v6e-8", 64).estimates.idle_ranks == 3
    assert plan([table("t", 5, 64, pin="data_parallel")], "v6e-8", 64).estimates.idle_ranks == 0


def test_109_gb_do_not_fit_two_chips_of_32_gb():
    """case 21: optimizer state, activations, exchange buffers and the dense model count."""
    two = Assumptions(hbm_bytes=int(31.24 * 2**30))
    tables = [table(f"t{i}", 8_515_625, 128) for i in range(25)]  # 109 GB of float32 weights
    assert sum(t.weight_bytes for t in tables) == pytest.approx(109e9, rel=0.01)
    answer = plan(tables, "cpu-2", 4096, two)
    assert not answer.fits
    assert answer.problems[0].bytes_missing > 109e9 / 2 - 31.24 * 2**30
    assert {"dense_model", "activations", "tables_and_optimizer", "exchange_buffers"} <= set(answer.hbm_parts)
    assert "t0" in answer.problems[0].message or answer.problems[0].table.startswith("t")
    assert "use cpu-4 (4 ranks instead of 2)" in [way["action"] for way in answer.problems[0].remedies]
    alone = plan(tables, "cpu-1", 4096, two).problems[0]
    assert "with optimizer state) on one rank: the most compact plan" in alone.message


@pytest.mark.parametrize(
    "heavier",
    [
        {"optimizer": "adam"},  # state
        {"batch": 400_000},  # activations and exchange buffers
        {"assumptions": Assumptions(dense_parameters=10**9)},  # dense model
        {"assumptions": Assumptions(reserve_share=0.95)},
    ],
)
def test_everything_that_takes_memory_counts(heavier):
    """case 21: tables that fit alone stop fitting when anything else grows."""
    spec = table("t", 14_000_000, 128, allow=("table_wise", "row_wise"), optimizer=heavier.get("optimizer", "sgd"))
    light = plan([dataclasses.replace(spec, optimizer="sgd")], "v6e-4", 4096)
    assert light.fits
    heavy = plan([spec], "v6e-4", heavier.get("batch", 4096), heavier.get("assumptions"))
    assert not heavy.fits or heavy.estimates.hbm_bytes_max > light.estimates.hbm_bytes_max * 1.2


@pytest.mark.parametrize(("batch", "advice"), [(1000, "960 or 1024"), (63, "64"), (1, "64")])
def test_a_batch_that_the_ranks_cannot_share_is_refused_at_planning(batch, advice):
    """case 38: a world size that the even exchange cannot handle."""
    with pytest.raises(ConfigError, match="cannot be shared evenly by the 64 ranks of v6e-64") as caught:
        plan([table("t", 100)], "v6e-64", batch)
    assert f"Use {advice}." in str(caught.value)


def test_rows_that_int32_cannot_count_are_refused_at_planning():
    """case 38: local rows are int32 in the kernels."""
    huge = table("t", 2**32, 8, allow=("table_wise",))
    with pytest.raises(ConfigError, match="4294967296 rows on one rank: local rows exceed int32") as caught:
        plan([huge], "v6e-4", 64)
    assert "Allow row_wise" in str(caught.value), "on a larger slice it would still be on one rank"
    with pytest.raises(ConfigError, match=r"on 4 ranks: local rows exceed int32\. Use a larger slice"):
        plan([table("t", 2**34, 8)], "v6e-4", 64)
    on_a_host = table("t", 2**32, 8, allow=("table_row_wise",))  # 2^30 rows on each of four ranks
    assert isinstance(plan([on_a_host], "v6e-16", 64).fits, bool)
    assert isinstance(plan([dataclasses.replace(huge, allow=None)], "v6e-4", 64).fits, bool)


def test_constraints_are_obeyed():
    for sharding in SHARDINGS:
        (placed,) = plan([table("t", 10_000, 64, 4.0, pin=sharding)], "v6e-16", 1600).tables
        assert placed.sharding == sharding
        (placed,) = plan([table("t", 10_000, 64, 4.0, forbid=(sharding,))], "v6e-16", 1600).tables
        assert placed.sharding != sharding
    pinned = plan([table("t", 100, 64, pin="table_wise", pin_ranks=(7,))], "v6e-16", 1600).tables[0]
    assert pinned.ranks == (7,)


def test_tables_kept_together_share_sharding_and_ranks():
    tables = [
        table("a", 10**6, 64, 3.0, keep_together="x", forbid=("row_wise", "data_parallel")),
        table("b", 10**5, 64, 1.0, keep_together="x"),
        table("c", 10**5, 64, 1.0),
    ]
    answer = plan(tables, "v6e-16", 1600)
    a, b = answer.table("a"), answer.table("b")
    assert (a.sharding, a.ranks) == (b.sharding, b.ranks) and a.reason == "kept together with 1 other table (x)"
    assert a.seconds > b.seconds > 0
    with pytest.raises(ConfigError, match="'a', 'b' are kept together but have no sharding in common"):
        plan(
            [dataclasses.replace(tables[0], pin="table_wise"), dataclasses.replace(tables[1], pin="row_wise")],
            "v6e-16",
            1600,
        )


def test_a_plan_made_elsewhere_can_be_costed_even_with_two_shards_on_one_rank():
    spec = table("t", 1000, 64, 2.0)
    twice = PlacedTable(spec, "column_wise", "bags", (Shard((1,), "all", (0, 32)), Shard((1,), "all", (32, 64))))
    apart = PlacedTable(spec, "column_wise", "bags", (Shard((1,), "all", (0, 32)), Shard((2,), "all", (32, 64))))
    costs = [evaluate([entry], "v6e-4", 4096) for entry in (twice, apart)]
    assert costs[0].step_seconds > costs[1].step_seconds and costs[0].idle_ranks == 3


def test_a_time_limit_still_gives_a_plan():
    tables = [table(f"t{i}", 10**6, 64, 3.0) for i in range(12)]
    answer = plan(tables, "v6e-16", 4096, seconds=0.0)
    assert answer.fits and answer.stopped_early
    assert plan(tables, "v6e-16", 4096).stopped_early is False


@pytest.mark.parametrize(
    ("slice_", "most"), [("v6e-16", 1.10), ("v6e-64", 1.10), ("v6e-256", 1.10), ("v5p-2048", 1.25)]
)
def test_mlperf_tables_use_every_rank_and_come_close_to_the_bound(slice_, most):
    answer = plan(read_tables(MLPERF).tables, slice_, 65_536)
    found = answer.estimates
    assert found.idle_ranks == 0
    assert found.lower_bound_seconds <= found.step_seconds <= most * found.lower_bound_seconds


def test_one_rank_needs_no_exchange():
    answer = plan([table("a", 1000, 64, 2.0), TableSpec("b", 9, 8, (FeatureSpec("g"),))], "v6e-1", 32)
    parts = answer.estimates.step_parts
    assert "exchange_ids" not in parts and "exchange_vectors" not in parts and "all_reduce" not in parts


def test_many_small_tables_pinned_to_single_ranks_stay_within_floating_point():
    """Loads are raised to high powers on the way; so small ones among so many must neither overflow nor vanish."""
    tables = [table(f"t{k}", 1000 + k, 8, pin="table_wise") for k in range(150)]
    found = plan(tables, "v6e-4", 8192).estimates
    assert max(found.rank_seconds) <= 1.1 * min(found.rank_seconds)


def test_planning_loads_neither_torch_nor_jax(tmp_path):
    """Neither the library nor the command, whether TABLES is a list or a recipe."""
    recipe = ("pipelines/recipes/demo.toml", "--set", "data.schema=criteo")
    commands = [(str(MLPERF), "--report", str(tmp_path / "plan.html")), recipe]
    code = (
        "import sys; from tpurec.sharding.planner import plan; from tpurec.sharding.tables import *\n"
        "import tpurec.sharding.torchrec_plan, tpurec.sharding.replan\n"
        "assert 'scipy' not in sys.modules\n"
        "plan([TableSpec('t', 100, 64, (FeatureSpec('f'),))], 'v6e-4', 64)\n"
        "from tpurec import cli\n"
        f"for words in {commands!r}:\n"
        "    try: cli.main(['plan', *words, '--slice', 'v6e-16', '--json'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "bad = [m for m in ('torch', 'torchrec', 'jax', 'ray') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
