"""What a replan moves, against counting rows one by one."""

import dataclasses

import numpy as np
import pytest

from tests.sharding.problems import table
from tpurec.errors import ConfigError
from tpurec.sharding.planner import plan
from tpurec.sharding.replan import diff


def cells(placed):
    """(rank, row, column) that a plan's ranks hold, by the meaning of the row rules."""
    found = set()
    for shard in placed.shards:
        for row in range(placed.table.num_embeddings):
            for column in range(*shard.columns):
                ranks = shard.ranks if shard.rule == "replicated" else [shard.owner(row)]
                found |= {(rank, row, column) for rank in ranks}
    return found


WAYS = [
    {"pin": "table_wise", "pin_ranks": (1,)},
    {"pin": "table_wise", "pin_ranks": (2,)},
    {"pin": "column_wise", "pin_ranks": (2, 1)},
    {"pin": "row_wise"},
    {"pin": "data_parallel"},
    {"pin": "table_row_wise", "pin_ranks": (4, 5, 6, 7)},
]


@pytest.mark.parametrize("old", range(len(WAYS)))
@pytest.mark.parametrize("new", range(len(WAYS)))
@pytest.mark.parametrize(("before", "after"), [("v6e-16", "v6e-16"), ("v6e-16", "v6e-32")])
def test_moved_bytes_are_the_cells_that_a_rank_did_not_have(old, new, before, after):
    a = plan([table("t", 83, 16, optimizer="sgd", **WAYS[old])], before, 64)
    b = plan([table("t", 83, 16, optimizer="sgd", **WAYS[new])], after, 64)
    change = diff(a, b).tables[0]
    have, want = cells(a.tables[0]), cells(b.tables[0])
    assert change.bytes_total == 4 * len(want)
    assert change.bytes_moved == 4 * len(want - have)


def test_the_same_plan_moves_nothing_and_state_moves_with_its_rows():
    spec = [table("t", 1000, 64, 3.0, optimizer="adam", pin="row_wise")]
    one, two = plan(spec, "v6e-4", 64), plan(spec, "v6e-8", 64)
    assert diff(one, one).bytes_moved == 0
    change = diff(one, two)
    assert change.bytes_total == 1000 * 64 * 4 * 3
    kept = np.sum(np.arange(1000) % 4 == np.arange(1000) % 8)  # the shift of a single table is 0
    assert change.bytes_moved == change.bytes_total - kept * 64 * 4 * 3
    assert change.summary()["tables"][0]["changed"] and change.step_seconds[0] == one.estimates.step_seconds


def test_plans_of_different_tables_are_refused():
    one, other = plan([table("a", 10)], "v6e-4", 64), plan([table("b", 10)], "v6e-4", 64)
    with pytest.raises(ConfigError, match="table 'a' is in only one of the plans, the old one"):
        diff(one, other)
    with pytest.raises(ConfigError, match="another shape in the two plans: 10 rows x 64 and 11 rows x 64"):
        diff(one, plan([table("a", 11)], "v6e-4", 64))


@pytest.mark.parametrize(
    ("change", "kept", "total"),
    [
        ({"optimizer": "adagrad"}, 64 * 4, 64 * 4 * 2),  # weights stay, the state of another optimizer does not
        ({"dtype": "bfloat16"}, 64 * 2 + 4, 64 * 2 + 4),  # a rank casts its own weights
    ],
)
def test_another_optimizer_or_dtype_is_said_and_its_state_is_not_taken_for_kept(change, kept, total):
    one = plan([table("t", 1000, 64, pin="row_wise")], "v6e-4", 64)
    other = plan([table("t", 1000, 64, pin="row_wise", **change)], "v6e-4", 64)
    found = diff(one, other).tables[0]
    assert (found.bytes_total, found.bytes_moved) == (1000 * total, 1000 * (total - kept))
    (key, value), was = *change.items(), one.tables[0].table
    assert (
        found.before == f"row_wise on 4 ranks, {getattr(was, key)}" and found.after == f"row_wise on 4 ranks, {value}"
    )


def test_another_exchange_is_a_change_that_moves_nothing():
    one = plan([table("t", 1000, 64, pin="row_wise")], "v6e-4", 64)
    (placed,) = one.tables
    other = {"unique_rows": "partial_pools", "partial_pools": "unique_rows"}[placed.exchange]
    found = diff(one, dataclasses.replace(one, tables=(dataclasses.replace(placed, exchange=other),)))
    assert found.bytes_moved == 0 and found.summary()["tables"][0]["changed"]
    assert found.tables[0].after == f"row_wise on 4 ranks, {other.replace('_', ' ')}"
