"""Plans go to TorchRec and come back."""

import pytest

from tests.sharding.problems import MLPERF, table
from tpurec.errors import ConfigError
from tpurec.sharding.planner import plan
from tpurec.sharding.tables import SHARDINGS, read_tables
from tpurec.sharding.torchrec_plan import from_torchrec, to_torchrec

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
