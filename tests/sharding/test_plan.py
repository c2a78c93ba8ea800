"""The plan's JSON form, and what its check refuses."""

import dataclasses
import json

import pytest

from tests.sharding.problems import table
from tpurec.errors import ConfigError
from tpurec.sharding.plan import PlacedTable, Plan, Shard
from tpurec.sharding.plan_json import PLAN_VERSION
from tpurec.sharding.planner import plan


@pytest.fixture(scope="module")
def made():
    pinned = table("c", 4000, 64, pin="column_wise", pin_ranks=(2, 0))
    return plan([table("a", 10**6, 64, 3.0), table("b", 50), pinned], "v6e-4", 4096)


def test_round_trip_on_disk_leaves_no_other_file(made, tmp_path):
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_json_form_has_what_the_interface_names(made):
    body = json.loads(made.to_json())
    assert body["version"] == PLAN_VERSION and body["slice"] == "v6e-4" and body["num_ranks"] == 4
    assert body["coordinates"] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert {"tables", "stacks", "rungs", "assumptions", "estimates", "batch_size"} <= set(body)
    shards = body["tables"][2]["shards"]
    assert [(s["ranks"], s["rows"]["rule"], s["columns"]) for s in shards] == [
        ([2], "all", [0, 32]),
        ([0], "all", [32, 64]),
    ]
    assert all(entry["sharding"] and entry["exchange"] for entry in body["tables"])


def test_a_table_that_is_never_looked_up_round_trips():
    # its sum of no parts was the whole number 0 before writing and 0.0 after reading
    made = plan([table("a", 100, 64, 0.0)], "v6e-4", 4096)
    assert Plan.from_json(made.to_json()).to_json() == made.to_json()


def test_the_summary_has_the_keys_of_the_command(made):
    found = made.summary()
    keys = (
        "fits slice num_chips num_ranks idle_ranks step_seconds step_parts lower_bound_seconds samples_per_second "
        "hbm_bytes_max hbm_bytes_mean hbm_bytes_capacity plan_seconds tables problems"
    )
    assert set(keys.split()) <= set(found)
    assert all({"name", "sharding", "ranks", "bytes", "seconds"} <= set(entry) for entry in found["tables"])
    json.dumps(found)
    none = plan([table("a", 10**9, 128)], "v6e-1", 64)
    assert set(none.summary()) == set(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "version 99 is not known"),
        ({"format": "other"}, "is not a sharding plan"),
        ({"slice": "v6e-5"}, "Google offers no"),
        ({"slice": "v6e-8"}, "coordinates are not those"),
        ({"tables": 3}, "no list 'tables'"),
        ({"batch": 3}, "unknown key 'batch'"),
    ],
)
def test_foreign_and_edited_files_are_refused(made, change, words):
    body = {**json.loads(made.to_json()), **change}
    with pytest.raises(ConfigError, match=words):
        Plan.from_json(json.dumps(body))


def test_no_json_and_no_file(tmp_path):
    with pytest.raises(ConfigError, match="not valid JSON"):
        Plan.from_json("{")
    with pytest.raises(ConfigError, match="not a sharding plan"):
        Plan.from_json("[]")
    with pytest.raises(ConfigError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"binary\.json: is not a sharding plan"):
        Plan.load(tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([Shard((0,), "all", (0, 32))], "columns 32 to 64 are owned by no rank"),
        ([Shard((0,), "all", (0, 32)), Shard((1,), "all", (16, 64))], "columns 16 to 32 are owned more than once"),
        ([Shard((0,), "all", (8, 64))], "columns 0 to 8 are owned by no rank"),
        ([Shard((0, 1), "all", (0, 64))], "2 ranks each own all rows"),
        ([Shard((0, 0), "modulo", (0, 64))], "repeat a rank"),
        ([Shard((0, 4), "modulo", (0, 64))], "rank 4 is not on the slice"),
        ([Shard((0, 1), "modulo", (0, 64), shift=2)], "shift 2"),
        ([Shard((0, 1), "replicated", (0, 64))], "a copy on every rank"),
        ([Shard((0,), "some", (0, 64))], "row rule 'some'"),
        ([Shard((), "modulo", (0, 64))], "empty"),
        ([Shard((0,), "all", (0, 128))], "columns"),
        ([], "columns 0 to 64 are owned by no rank"),
    ],
)
def test_rows_and_columns_owned_twice_or_never_are_refused(made, shards, words):
    wrong = PlacedTable(table("a", 10**6, 64), "column_wise", "bags", tuple(shards))
    with pytest.raises(ConfigError, match=words) as caught:
        dataclasses.replace(made, tables=(wrong,))
    assert "'a'" in str(caught.value)


@pytest.mark.parametrize("change", [{"sharding": "by_hand"}, {"exchange": "both"}])
def test_an_unknown_sharding_or_exchange_is_refused(made, change):
    (key, word) = next(iter(change.items()))
    body = json.loads(made.to_json())
    body["tables"][0].update(change)
    with pytest.raises(ConfigError, match=rf"table 'a': {key} '{word}' is not one of"):
        Plan.from_json(json.dumps(body))


def test_modulo_rows_have_one_owner_and_counts_add_up():
    shard = Shard((5, 2, 7), "modulo", (0, 8), shift=2)
    owners = [shard.owner(row) for row in range(11)]
    assert owners[:4] == [7, 5, 2, 7]
    for rank in (5, 2, 7, 1):
        assert shard.num_rows(rank, 11) == owners.count(rank)
    # local rows are row // 3: no two rows of one owner share a cell
    cells = {(shard.owner(row), row // 3) for row in range(11)}
    assert len(cells) == 11


def test_stacks_hold_all_rows_of_every_rank(made):
    everything = sum(stack.bytes for stack in made.stacks)
    assert everything == made.estimates.hbm_parts["tables_and_optimizer"]
    names = {name for stack in made.stacks for name in stack.tables}
    assert names == {"a", "b", "c"}


def test_stacks_above_16_gib_are_split():
    big = plan([table("t", 40_000_000, 128, pin="table_wise")], "v6e-4", 4096)
    (stack,) = big.stacks
    weights = stack.rows * stack.width * 4
    assert weights > 16 * 2**30
    assert stack.num_tensors == -(-weights // (16 * 2**30)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": -3}, "batch_size = -3 is not 1 or more"),
        ({"batch_size": 0}, "batch_size = 0 is not 1 or more"),
        ({"num_ranks": 3}, "ranks and coordinates are not those of"),
    ],
)
def test_a_plan_whose_numbers_were_edited_is_refused(made, change, words):
    with pytest.raises(ConfigError, match=words):
        Plan.from_json(json.dumps(json.loads(made.to_json()) | change))
