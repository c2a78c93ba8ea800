"""Ways out of a plan that does not fit: cheapest first, each checked."""

import dataclasses

from tests.sharding.problems import table
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.planner import plan
from tpurec.sharding.tables import TableSpec

# On a single TPU a table above 16 GiB is refused whatever the memory; here memory is what is short.
ANY_TENSOR = Assumptions(max_tensor_bytes=2**40)


def actions(answer):
    return [remedy["action"] for remedy in answer.problems[0].remedies]


def test_another_optimizer_and_bfloat16_are_named_where_they_help():
    spec = table("t", 40_000_000, 128, optimizer="adam")  # 61 GB; 20 GB with one float a row, 10 GB in bfloat16
    answer = plan([spec], "v6e-1", 1024, ANY_TENSOR)
    assert actions(answer) == [
        "table 't': row_wise_adagrad in place of adam",
        "use v6e-4 (4 chips instead of 1)",
    ]
    lighter = plan([dataclasses.replace(spec, optimizer="row_wise_adagrad")], "v6e-1", 1024, ANY_TENSOR)
    assert lighter.fits and lighter.estimates.hbm_bytes_max == answer.problems[0].remedies[0]["hbm_bytes_max"]


def test_changes_are_combined_only_if_none_helps_alone():
    spec = table("t", 80_000_000, 128, optimizer="adam")  # 41 GB even without state: both changes are needed
    found = actions(plan([spec], "v6e-1", 1024, ANY_TENSOR))
    assert found[0] == "together, for all tables: every sharding, row_wise_adagrad, bfloat16 weights"
    assert found[1:] == ["use v6e-4 (4 chips instead of 1)"]


def test_only_what_fits_is_offered():
    found = actions(plan([table("t", 400_000_000, 128)], "v6e-1", 1024))
    assert found == ["use v6e-8 (8 chips instead of 1)"]
    assert actions(plan([table("t", 2 * 10**9, 512)], "v5e-256", 1024)) == ["table 't': bfloat16 weights"]


def test_nothing_is_offered_where_nothing_helps():
    small = Assumptions(hbm_bytes=2**28)
    assert plan([table("t", 10, 64)], "v6e-256", 1024, small).problems[0].remedies == ()


def test_all_tables_are_changed_if_the_largest_alone_does_not_help():
    tables: list[TableSpec] = [table(f"t{i}", 20_000_000, 128) for i in range(4)]  # 41 GB, 10 GB each
    found = actions(plan(tables, "v6e-1", 1024))
    assert "all tables: bfloat16 weights" in found and "table 't0': bfloat16 weights" not in found


def test_a_batch_that_fills_the_memory_is_named_once_with_a_batch_that_fits():
    answer = plan([table(f"t{i}", 1000 + i, 64) for i in range(3)], "v6e-4", 2**22)
    problem = answer.problems[0]
    assert len(answer.problems) == 1 and problem.table == "" and problem.bytes_missing > 0
    assert "4,194,304 examples, 1,048,576 a rank" in problem.message and "nothing for tables" in problem.message
    assert actions(answer) == ["--batch-size 2097152 in place of 4194304", "use v6e-8 (8 chips instead of 4)"]


def test_a_smaller_batch_is_offered_only_where_the_batch_is_what_fills_the_memory():
    crowded = plan([table("t", 57_000_000, 128)], "v6e-1", 65536, ANY_TENSOR)  # 27 GiB beside 3 GiB of activations
    assert "--batch-size 32768 in place of 65536" in actions(crowded)
    assert not any("batch" in action for action in actions(plan([table("t", 90_000_000, 128)], "v6e-1", 1024)))
