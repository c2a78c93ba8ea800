"""What the plan page is given: small, and still everything. How it looks is tested in tests/browser."""

import json

import pytest

from tests.sharding.problems import table
from tpurec.sharding.planner import plan
from tpurec.sharding.report import page_data, write_report
from tpurec.topology.slices import SliceTopology

TABLES = [
    table("whole", 5000, 64, pin="table_wise", pin_ranks=(5,)),
    table("columns", 5000, 64, pin="column_wise", pin_ranks=(9, 3)),
    table("group", 5000, 64, 20.0, pin="table_row_wise", pin_ranks=(4, 5, 6, 7)),
    table("rows", 4091, 64, 3.0, pin="row_wise"),
    table("copy", 100, 64, pin="data_parallel"),
]


def expand(runs):
    return tuple(rank for first, last in zip(runs[::2], runs[1::2], strict=True) for rank in range(first, last + 1))


@pytest.fixture(scope="module")
def made():
    return plan(TABLES, "v6e-16", 1600)


def test_each_table_keeps_its_ranks_sharding_reason_and_parts(made):
    data = page_data([made], [made.summary()])
    (one,) = data["slices"]
    assert [shape[:3] for shape in data["tables"]] == [(t.name, t.num_embeddings, 64) for t in TABLES]
    for placed, (sharding, exchange, runs, nanoseconds, why) in zip(made.tables, one["placed"], strict=True):
        assert (sharding, exchange, one["whys"][why]) == (placed.sharding, placed.exchange, placed.reason)
        assert expand(runs) == placed.ranks
        assert sum(nanoseconds) == pytest.approx(1e9 * placed.seconds, rel=0.01)
    assert expand([9, 9, 11, 12]) == (9, 11, 12)


@pytest.mark.parametrize("slice_", ["v6e-32", "v5p-64", "tpu7x:2x2x4", "cpu-4"])
def test_every_rank_is_at_its_chip(slice_):
    topology = SliceTopology.parse(slice_)
    answer = plan([table("t", 1000)], slice_, 24 * topology.num_ranks)
    ranks = page_data([answer], [answer.summary()])["slices"][0]["ranks"]
    for rank, cell in enumerate(ranks["cells"]):
        place = []
        for extent in topology.dims:
            cell, at = divmod(cell, extent)
            place.append(at)
        assert tuple(place) == topology.coordinates(rank)


def test_a_value_that_all_ranks_share_is_written_once_and_others_a_rank(made):
    ranks = page_data([made], [made.summary()])["slices"][0]["ranks"]
    assert [len(ranks[key]) for key in ("bytes", "seconds", "shards")] == [16, 16, 16]
    assert ranks["bytes"] == pytest.approx(made.estimates.rank_bytes, rel=1e-4)
    assert ranks["shards"][3] == 3 and ranks["shards"][0] == 2
    alike = plan(TABLES[3:], "v6e-16", 1600)
    assert page_data([alike], [alike.summary()])["slices"][0]["ranks"]["shards"] == [2]


def test_many_problems_are_not_all_on_the_page_and_the_data_is_json(tmp_path):
    huge = [table(f"h{k}", 400_000_000, 128) for k in range(14)]
    answer = plan(huge, "v6e-1", 1024)
    write_report(tmp_path / "page.html", [answer], [answer.summary()])
    text = (tmp_path / "page.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    (one,) = json.loads(text)["slices"]
    assert len(one["problems"]) == 11 and one["problems"][-1]["message"] == "And 4 more tables in the same way."
