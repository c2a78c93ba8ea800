"""Plans go to TorchRec and come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.problems import MLPERF, table
from tpurec.errors import ConfigError
from tpurec.sharding.planner import plan
from tpurec.sharding.tables import SHARDINGS, read_tables
from tpurec.sharding.torchrec_plan import from_torchrec, to_torchrec
from tpurec.topology.slices import SliceTopology

TABLES = [
    table("a", 4091, 64, 3.0, pin="row_wise"),
    table("b", 100, 64, pin="data_parallel"),
    table("c", 5000, 64, pin="column_wise", pin_ranks=(9, 3)),
    table("d", 5000, 64, pin="table_wise", pin_ranks=(5,)),
    table("e", 5000, 64, 20.0, pin="table_row_wise", pin_ranks=(4, 5, 6, 7)),
    table("f", 5, 64, pin="row_wise"),
]


@pytest.fixture(scope="module")
def made():
    return plan(TABLES, "v6e-16", 1600)


def test_a_plan_survives_torchrec(made):
    exchanges = {placed.name: placed.exchange for placed in made.tables}
    again = from_torchrec(to_torchrec(made), TABLES, "v6e-16", 1600, exchanges=exchanges)
    assert {placed.sharding for placed in made.tables} == set(SHARDINGS)
    assert again.tables == made.tables and again.stacks == made.stacks and again.rungs == made.rungs
    assert again.estimates.step_seconds == made.estimates.step_seconds


@pytest.mark.parametrize("slice_", ["v6e-16", "v6e-64"])
def test_the_mlperf_plan_survives_torchrec(slice_):
    tables = read_tables(MLPERF).tables
    made = plan(tables, slice_, 65_536)
    again = from_torchrec(to_torchrec(made, "model.sparse_arch"), tables, slice_, 65_536)
    assert [(p.name, p.sharding, p.shards) for p in again.tables] == [
        (p.name, p.sharding, p.shards) for p in made.tables
    ]
    assert again.estimates.hbm_bytes_max == pytest.approx(made.estimates.hbm_bytes_max, rel=0.05)


@st.composite
def problems(draw):
    """Tables of all kinds on a slice, each pinned to a sharding (some to ranks in any order), or free."""
    slice_ = SliceTopology.parse(draw(st.sampled_from(["v6e-8", "v6e-16", "v5p-16", "tpu7x:2x2x2", "cpu-3"])))
    ways = [None, *(way for way in SHARDINGS if slice_.chip or way != "table_row_wise")]  # CPU ranks have no torus
    tables = []
    for number in range(draw(st.integers(1, 5))):
        pin = draw(st.sampled_from(ways))
        ranks = None
        if pin in ("table_wise", "column_wise"):
            owners = 1 if pin == "table_wise" else 2
            ranks = draw(
                st.none() | st.permutations(range(slice_.num_ranks)).map(lambda some, k=owners: tuple(some[:k]))
            )
        tables.append(
            table(
                f"t{number}",
                draw(st.integers(1, 40) | st.integers(1000, 200_000)),
                draw(st.sampled_from([32, 64, 128])),
                draw(st.sampled_from([0.0, 0.7, 1.0, 30.0])),
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                optimizer=draw(st.sampled_from(["sgd", "row_wise_adagrad", "adam"])),
                pooling=draw(st.sampled_from(["sum", "mean"])),
                pin=pin,
                pin_ranks=ranks,
            )
        )
    return tables, slice_.name, 24 * slice_.num_ranks


@settings(max_examples=50, deadline=None)
@given(problems(), st.sampled_from(["", "model.sparse"]))
def test_any_plan_survives_torchrec(problem, module_path):
    tables, slice_, batch = problem
    made = plan(tables, slice_, batch)
    sharding = to_torchrec(made, module_path)
    for placed in made.tables:  # what TorchRec is told, by its own meaning of shards
        entry, spec = sharding.plan[module_path][placed.name], placed.table
        assert entry.ranks == [rank for shard in placed.shards for rank in shard.ranks]
        if placed.sharding == "data_parallel":
            continue
        owned = [(s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in entry.sharding_spec.shards]
        assert [rank for rank, *_ in owned] == entry.ranks
        for row in {0, spec.num_embeddings // 2, spec.num_embeddings - 1}:
            for column in range(0, spec.embedding_dim, 8):
                assert sum(r <= row < r + h and c <= column < c + w for _, r, c, h, w in owned) == 1
    again = from_torchrec(sharding, tables, slice_, batch)
    assert [(p.name, p.sharding, p.shards) for p in again.tables] == [
        (p.name, p.sharding, p.shards) for p in made.tables
    ]
    exchanges = {placed.name: placed.exchange for placed in made.tables}
    same = from_torchrec(sharding, tables, slice_, batch, exchanges=exchanges)
    assert (same.tables, same.stacks, same.rungs) == (made.tables, made.stacks, made.rungs)
    assert same.estimates.rank_bytes == made.estimates.rank_bytes
    assert same.estimates.step_seconds == pytest.approx(made.estimates.step_seconds, rel=1e-12)


def test_torchrec_shards_cover_each_table_once_and_name_the_owners(made):
    module = to_torchrec(made, "ebc").plan["ebc"]
    for spec in TABLES:
        entry = module[spec.name]
        assert entry.sharding_type == spec.pin
        if spec.pin == "data_parallel":
            assert entry.sharding_spec is None and entry.compute_kernel == "dense"
            continue
        shards = entry.sharding_spec.shards
        assert sum(s.shard_sizes[0] * s.shard_sizes[1] for s in shards) == spec.num_embeddings * 64
        assert [s.placement.rank() for s in shards] == entry.ranks
    assert module["c"].ranks == [9, 3]
    assert [s.shard_sizes[0] for s in module["f"].sharding_spec.shards][:6] == [1, 1, 1, 1, 1, 0]


def test_torchrec_itself_accepts_the_form(made):
    text = str(to_torchrec(made, "ebc").plan["ebc"])  # TorchRec's own table of shards
    assert "column_wise" in text and "rank:9/cpu" in text


def test_what_is_not_ours_is_refused(made):
    sharding = to_torchrec(made, "ebc")
    with pytest.raises(ConfigError, match="has no table 'z'"):
        from_torchrec(sharding, [table("z", 5)], "v6e-16", 1600)
    sharding.plan["ebc"]["a"].sharding_type = "grid_shard"
    with pytest.raises(ConfigError, match="'a': TorchRec's sharding type 'grid_shard'"):
        from_torchrec(sharding, TABLES, "v6e-16", 1600)
    sharding = to_torchrec(made, "ebc")
    sharding.plan["ebc"]["d"].sharding_spec.shards[0].shard_sizes[0] = 4999
    with pytest.raises(ConfigError, match=r"'d'.*exactly once"):
        from_torchrec(sharding, TABLES, "v6e-16", 1600)
    sharding = to_torchrec(made, "ebc")
    del sharding.plan["ebc"]["d"].sharding_spec.shards[:]
    with pytest.raises(ConfigError, match=r"'d'.*lists no shards"):
        from_torchrec(sharding, TABLES, "v6e-16", 1600)
