"""Sharded sequence collections equal the unsharded ones: outputs, tables, optimizer state and losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torchrec import PoolingType

from tests.sharding import exchange_steps, sequence_steps
from tests.sharding.exchange_cases import OPTIMIZERS, Case, Table, batches_of, configs_of, cut, plan_of, sharded
from tests.sharding.test_exchange import KINDS, compare
from tests.sharding.world import World
from tpurec.sharding.exchange_volume import ExchangeVolume
from tpurec.sharding.host_batch import read_batch

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module", params=(2, pytest.param(3, marks=pytest.mark.slow)), ids=lambda size: f"world{size}")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(request.param, tmp_path_factory.mktemp("world"))
    yield started
    started.close()


def tables_of(*kinds: str) -> tuple[Table, ...]:
    """One-id, long and shared features, in turn; and a table with fewer rows than three ranks."""
    shapes = ((53, (1,)), (31, (4, 3)), (97, (13,)), (2, (2,)))
    return tuple(Table(rows, 16, kind, ids, "none") for kind in kinds for rows, ids in shapes)


MIXTURE = tables_of(*KINDS)


@pytest.mark.parametrize("optimizer", ("sgd", "rowwise_decay", "adam", "clipped_rowwise_adam"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_of_sequences_equals_the_unsharded_run(world: World, kind: str, optimizer: str) -> None:
    compare(world, Case(tables_of(kind), optimizer, double=True, skipped=0.1), 1e-10)


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "jagged"))
def test_sequences_of_uneven_batches_and_empty_ranks_equal_the_unsharded_run(world: World, packed: bool) -> None:
    cuts = {2: (24, 0), 3: (5, 0, 19)}[world.num_ranks]
    compare(world, Case(MIXTURE, "adagrad", double=True, cuts=cuts, packed=packed, skipped=0.2), 1e-10)


def test_sequences_in_an_unrouted_batch_give_the_same(world: World) -> None:
    compare(world, Case(MIXTURE, "rowwise_adagrad", double=True, inline=True), 1e-10)


def test_sequences_in_float32_and_half_precision(world: World) -> None:
    compare(world, Case(MIXTURE, "sgd"), 1e-6, 1e-4)
    compare(world, Case(tuple(replace(table, dtype="bfloat16") for table in MIXTURE), "rowwise_adagrad"), 2e-2, 1e-2)


@pytest.mark.parametrize("kind", ("unique_rows", "data_parallel"))
def test_steps_before_the_first_id_of_a_sequence_count(world: World, kind: str) -> None:
    compare(world, Case((Table(40, 8, kind, (2,), "none"),), "adam", double=True, steps_without_ids=2), 1e-10)


def test_a_row_that_repeats_on_a_rank_travels_once(world: World) -> None:
    """Whatever the plan says of the exchange: 13 ids an example of a table of 2 rows cost no more than 2 rows do."""
    found = []
    for ids in (2, 13):
        case = Case((Table(2, 8, "table_wise", (ids,), "none"),), "sgd", double=True)
        found.append(world.run(sharded, case)[0]["stats"]["bytes_per_step"]["vectors"])
    assert found[0] == found[1] > 0


def test_the_bytes_counted_for_sequences_are_those_that_processes_carry(world: World) -> None:
    case = Case(MIXTURE, "adagrad", steps=2, skipped=0.1)
    configs = [replace(config, pooling=PoolingType.NONE) for config in configs_of(case)]
    volume = ExchangeVolume(configs, OPTIMIZERS["adagrad"], plan_of(case, world.num_ranks))
    totals = dict.fromkeys(("ids", "vectors", "gradients"), 0.0)
    for batch in batches_of(case):
        parts = [batch.part(*cut(case, rank, world.num_ranks)).jagged(False) for rank in range(world.num_ranks)]
        counted = volume.step([read_batch(part, dict.fromkeys(part.keys())) for part in parts]).bytes
        totals = {kind: total + counted[kind] / case.steps for kind, total in totals.items()}
    carried = world.run(sharded, case)[0]["stats"]["bytes_per_step"]
    assert {kind: carried[kind] for kind in totals} == pytest.approx(totals)


def test_the_output_is_that_of_the_unsharded_collection(world: World) -> None:
    for answer in world.run(sequence_steps.outputs, Case(MIXTURE, double=True, skipped=0.2, steps=1)):
        assert answer == []


@pytest.mark.parametrize("inline", (False, True), ids=("routed", "inline"))
def test_bags_and_sequences_of_the_same_feature_share_one_exchange(world: World, inline: bool) -> None:
    """Routed by itself, a collection trained the others' rows of its features once more, without a gradient."""
    tables = (Table(31, 16, "unique_rows", (4, 3)), Table(53, 16, "table_wise", (9,)), Table(9, 16, "data_parallel"))
    case = Case(tables, weighted=True, double=True, skipped=0.1)
    for answer in world.run(sequence_steps.bags_and_sequences, case, inline):
        assert answer["worst"] <= 1e-9
        assert inline or answer["collectives"] <= 4


def test_sequences_keep_weights_and_state_of_a_trained_model_and_start_deferred(world: World) -> None:
    case = Case(MIXTURE, "rowwise_adagrad")
    for kept in world.run(exchange_steps.trained_then_sharded, case):
        assert kept and all(kept.values()), kept
    for differing in world.run(sequence_steps.deferred, case):
        assert differing == []


def test_frozen_sequence_tables_keep_their_bits_beside_trained_ones(world: World) -> None:
    for answer in world.run(sequence_steps.half_frozen, Case(tables_of("unique_rows", "column_wise:2"), "adam")):
        assert answer["kept"] == [True, False] * 4


def test_a_step_of_sequences_reads_no_value_of_the_device(world: World) -> None:
    case = Case(tables_of("unique_rows", "table_wise", "data_parallel"), "sgd", steps=6)
    for answer in world.run(exchange_steps.record_steps, case):
        assert answer["reads"] == []
        assert set(answer["collectives"]) == {4}
