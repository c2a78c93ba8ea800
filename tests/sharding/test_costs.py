"""The cost model against sums done by hand."""

from pathlib import Path

import numpy as np
import pytest

from tests.sharding.problems import table
from tpurec.errors import ConfigError
from tpurec.sharding.assumptions import Assumptions, rows_of_table
from tpurec.sharding.choices import ChoiceMaker, column_splits, impossible, stacks_of
from tpurec.sharding.costs import PARTS, CostModel
from tpurec.sharding.skew import unique_rows
from tpurec.sharding.tables import FeatureSpec, TableSpec
from tpurec.topology.slices import SliceTopology


def model(name="v6e-16", batch=1600, **changes):
    slice_ = SliceTopology.parse(name)
    return CostModel(slice_, batch, Assumptions(**changes).on(slice_))


def choices(spec, costs):
    return {c.key: c for c in ChoiceMaker(costs, stacks_of([spec], costs.num_ranks)).of_table(spec)}


def part(choice, kind, name):
    return float(getattr(choice, kind)[PARTS.index(name)])


def test_row_bytes_hold_weights_and_state_without_gaps():
    costs = model()
    assert costs.row_bytes(table("a", 9, 64), 64) == 64 * 4 + 4  # one accumulator per row
    assert costs.row_bytes(table("a", 9, 64, optimizer="adam"), 64) == 64 * 4 * 3
    assert costs.row_bytes(table("a", 9, 64, optimizer="sgd", dtype="bfloat16"), 64) == 128
    assert costs.row_bytes(table("a", 9, 24, optimizer="sgd"), 24) == 24 * 4


def test_a_lookup_takes_the_longer_of_bytes_and_bundles():
    costs = model(gather_efficiency=0.5, sparse_core_hertz=1e9)
    per_row = max(512 / (1638e9 * 0.5), (128 / 8 + 0.8) / (32 * 1e9))  # 16.8 bundles on 32 subcores
    assert costs.read_seconds(1000, 128, 4) == pytest.approx(1000 * per_row)
    # the smallest transfer is 32 bytes
    slow_memory = model(hbm_bytes_per_second=1e6, gather_efficiency=1.0)
    assert slow_memory.read_seconds(10, 4, 4) == pytest.approx(10 * 32 / 1e6)
    # no SparseCore on v5e: whole lines of 128 lanes, and memory decides
    assert model("v5e-16", gather_efficiency=1.0).read_seconds(10, 32, 4) == pytest.approx(10 * 512 / 819e9)


@pytest.mark.parametrize(("chip", "lanes"), [("v6e", 8), ("v5p", 8), ("7x", 16)])
def test_inner_loops_are_as_long_as_those_of_the_compiled_kernels(chip, lanes):
    text = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assume, vectors = Assumptions(), 128 // lanes
    for op, per_vector in (("lookup", 1.0), ("update", assume.combine_bundles)):
        shown = text.partition(f"| {chip} | {op} | SparseCore kernel | ")[2].split(" ", 1)[0]
        assert per_vector * vectors + assume.row_bundles == pytest.approx(float(shown), rel=0.06)


def test_table_wise_by_hand():
    spec, costs = table("a", 1000, 64, 2.0, optimizer="sgd"), model(rung_padding=1.25)
    choice = choices(spec, costs)["table_wise", "bags", "", 1]
    wire = 1 / 100e9  # 4 x 4 mesh
    assert part(choice, "lump", "exchange_ids") == pytest.approx(wire * 1600 * 2 * 4 * 1.25)
    assert part(choice, "lump", "exchange_vectors") == pytest.approx(2 * wire * 1600 * 64 * 4)
    assert choice.uniform.sum() == 0 and choice.copies == 1
    assert choice.lump[len(PARTS) : -1].sum() == 1000 * 64 * 4
    assert choice.lump[-1] == 1600 * 2 * 4 * 1.25 + 1600 * 64 * 4  # buffers: ids in, vectors out


def test_column_shards_split_vectors_and_repeat_ids_and_row_state():
    spec, costs = table("a", 1000, 64, 2.0), model()
    whole, quarter = (
        choices(spec, costs)[key] for key in (("table_wise", "bags", "", 1), ("column_wise", "bags", "", 4))
    )
    assert part(quarter, "lump", "exchange_ids") == part(whole, "lump", "exchange_ids")
    assert part(quarter, "lump", "exchange_vectors") == pytest.approx(part(whole, "lump", "exchange_vectors") / 4)
    assert quarter.lump[len(PARTS) : -1].sum() == 1000 * (16 * 4 + 4)
    # row-wise Adagrad needs the other shards' sums of squares; plain Adagrad does not
    plain = choices(table("b", 1000, 64, 2.0, optimizer="sgd"), costs)["column_wise", "bags", "", 4]
    assert quarter.flags != plain.flags


def test_row_wise_by_hand():
    spec, costs = table("a", 16_000, 64, 2.0), model()
    found = choices(spec, costs)
    unique, pools = found["row_wise", "unique_rows", "", 0], found["row_wise", "partial_pools", "", 0]
    local = unique_rows(16_000, 1.05, 200)
    assert part(unique, "padded", "exchange_ids") == pytest.approx(local * 4 / 100e9)
    assert part(unique, "padded", "exchange_vectors") == pytest.approx(2 * local * 64 * 4 / 100e9)
    assert unique.pair_ids == pytest.approx(local / 16)
    assert part(pools, "uniform", "reduce_all") == pytest.approx(2 * 1600 * 64 * 4 * (15 / 16 / 2 / 100e9))
    for choice in (unique, pools):
        assert choice.copies == 0 and choice.uniform[len(PARTS) : -1].sum() == 1000 * (64 * 4 + 4)


def test_data_parallel_costs_memory_everywhere_and_a_gradient_all_reduce():
    choice = choices(table("a", 1000, 64, optimizer="adam"), model())["data_parallel", "none", "", 0]
    assert choice.uniform[len(PARTS) : -1].sum() == 1000 * 64 * 12
    assert choice.uniform[-1] == 1000 * 64 * 4
    assert part(choice, "uniform", "all_reduce") == pytest.approx(2 * 1000 * 64 * 4 * (15 / 16 / 2 / 100e9))


def test_groups_share_rows_and_reduce_among_themselves():
    costs = model("v5p-128", batch=6400)
    found = choices(table("a", 64_000, 64, 30.0), costs)
    sizes = {key[2]: key[3] for key in found if key[0] == "table_row_wise"}
    assert sizes == {"host": 4, "plane": 16}  # a line has 4 ranks too, so it is left out
    assert part(found["table_row_wise", "partial_pools", "host", 4], "lump", "reduce_host") > 0
    assert part(found["table_row_wise", "partial_pools", "plane", 16], "lump", "reduce_plane") > 0
    for kind, (_, groups) in costs.groups.items():
        assert sorted(rank for group in groups for rank in group) == list(range(64)), kind


def test_stack_rows_are_padded_and_large_stacks_noted():
    assert model().stored_rows(5) == 8
    assert model(row_alignment=1).stored_rows(5) == 5


def test_memory_beside_tables_grows_with_the_batch_and_the_dense_model():
    tables = [table("a", 10, 64, 3.0)]
    small, large = model(batch=1600).constant_bytes(tables), model(batch=3200).constant_bytes(tables)
    assert large["activations"] == pytest.approx(2 * small["activations"])
    assert large["inputs"] == pytest.approx(2 * small["inputs"])
    assert model(dense_parameters=10).constant_bytes(tables)["dense_model"] == 160
    assert model(input_buffers=1).constant_bytes(tables)["inputs"] == small["inputs"] / 2


def test_usable_memory_is_what_libtpu_reports_less_the_reserve():
    assert model(reserve_share=0.0).capacity_bytes == int(31.24 * 2**30)
    assert model("tpu7x:4x4x4", batch=1280, reserve_share=0.5).capacity_bytes == int(94.74 * 2**30) / 2


@pytest.mark.parametrize(
    ("dim", "ranks", "splits"),
    [(128, 64, [2, 4, 8, 16]), (128, 4, [2, 4]), (24, 64, [3]), (8, 64, []), (12, 64, []), (64, 1, [])],
)
def test_column_splits_leave_multiples_of_8(dim, ranks, splits):
    assert column_splits(table("a", 10, dim), ranks) == splits


@pytest.mark.parametrize(
    ("dim", "dtype", "splits"),
    [(64, "float32", [2, 4, 8]), (64, "bfloat16", [2, 4]), (2560, "float32", [2, 4, 5, 8]), (64, "float16", [])],
)
def test_column_splits_on_a_tpu_leave_what_its_kernels_take(dim, dtype, splits):
    assert column_splits(table("a", 10, dim, dtype=dtype), 8, on_tpu=True) == splits


def test_unpooled_tables_travel_row_by_row():
    spec = TableSpec("a", 1000, 64, (FeatureSpec("f", 3.0),), pooling="none")
    costs = model()
    assert {key[:2] for key in choices(spec, costs)} == {
        ("data_parallel", "none"),
        ("table_wise", "unique_rows"),
        ("column_wise", "unique_rows"),
        ("row_wise", "unique_rows"),
    }
    assert "no pools" in impossible(spec, "table_row_wise", costs)


def test_sequences_travel_as_distinct_rows_and_are_copied_to_the_ids_by_hand():
    """10 ids an example of 100 rows: bags would send 100 vectors a rank, rows that repeat travel once."""
    spec = TableSpec("a", 100, 64, (FeatureSpec("f", 10.0),), pooling="none", optimizer="sgd", zipf_exponent=0.0)
    costs = model(rung_padding=1.25)
    choice = choices(spec, costs)["table_wise", "unique_rows", "", 1]
    asked, wire = 16 * unique_rows(100, 0.0, 1000), 1 / 100e9
    assert part(choice, "lump", "exchange_ids") == pytest.approx(wire * asked * 4)
    assert part(choice, "lump", "exchange_vectors") == pytest.approx(2 * wire * asked * 64 * 4)
    assert part(choice, "uniform", "pool") == pytest.approx(2 * costs.read_seconds(1000, 64, 4))
    assert choice.lump[-1] == pytest.approx(asked * (4 + 64 * 4))  # buffers: ids in, rows out
    assert choice.uniform[-1] == pytest.approx(asked / 16 * 64 * 4)  # and rows in
    halves = choices(spec, costs)["column_wise", "unique_rows", "", 2]
    assert part(halves, "lump", "exchange_vectors") == pytest.approx(part(choice, "lump", "exchange_vectors") / 2)
    uses = costs.constant_bytes([spec])
    pooled = costs.constant_bytes([TableSpec("a", 100, 64, spec.features)])
    more = costs.local_batch * costs.assume.activation_copies * 9 * 64 * 4  # 10 vectors an example instead of 1
    assert uses["activations"] - pooled["activations"] == pytest.approx(more)


def test_cpu_ranks_have_no_groups():
    assert "no" in impossible(table("a", 10), "table_row_wise", model("cpu-4"))
    assert model("cpu-4").groups == {}


def test_assumptions_are_checked_and_explained():
    with pytest.raises(ConfigError, match="rung_padding = 0: must be greater"):
        Assumptions(rung_padding=0)
    with pytest.raises(ConfigError, match=r"reserve_share = 1.2: is a share"):
        Assumptions(reserve_share=1.2)
    with pytest.raises(ConfigError, match="finite"):
        Assumptions(hbm_bytes_per_second=float("nan"))
    assert all(all(text for text in (row[0], row[1], row[3], row[4])) for row in rows_of_table())


def test_every_assumption_can_be_overridden_and_changes_something():
    """An assumption that no cost looks at would be a lie in the documentation."""
    import dataclasses

    from tpurec.sharding.space import Space, State

    spec = [
        table("a", 10**6, 64, 3.0),
        TableSpec("b", 10**6, 64, (FeatureSpec("w", 2.0, weighted=True),), pin="column_wise"),
        table("c", 10**6, 64, 9.0, pin="row_wise"),
    ]
    slice_ = SliceTopology.parse("v6e-16")

    def everything(assumptions):
        space = Space(spec, CostModel(slice_, 1600, assumptions.on(slice_)))
        loads = [space.latency, list(space.constant_parts.values()), list(space.constant_uses.values())]
        for item in space.items:
            for choice in item.choices:
                loads += [choice.uniform, choice.padded, choice.lump]
        flat = np.concatenate([np.ravel(load) for load in loads])
        return np.concatenate(
            [flat, [space.model.capacity_bytes, State(space).total(np.ones(space.num_columns), np.zeros(6) > 0).bytes]]
        )

    base = everything(Assumptions())
    filled = Assumptions().on(slice_)
    silent = []
    for spec_field in dataclasses.fields(Assumptions):
        value = getattr(filled, spec_field.name)
        changed = dataclasses.replace(
            Assumptions(), **{spec_field.name: type(value)(value * 2) if value * 2 <= 1 or value >= 1 else value / 2}
        )
        if np.array_equal(everything(changed), base):
            silent.append(spec_field.name)
    # the largest tensor only decides into how many tensors a stack is split
    assert silent == ["max_tensor_bytes"]


def test_the_documentation_lists_every_assumption_as_the_code_has_it():
    text = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    section = text.split("## Assumptions")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert listed == [f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows_of_table()]
