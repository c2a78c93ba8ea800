"""What a step of the exchange does, counted op by op; initial values; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.sharding import exchange_steps
from tests.sharding.exchange_cases import Case, Table, unsharded
from tests.sharding.test_exchange import MIXTURE
from tests.sharding.world import World

pytestmark = pytest.mark.multiprocess

# Every other one is frozen.
FROZEN_AND_NOT = (
    (20, 8, "unique_rows"),
    (30, 8, "table_wise"),
    (9, 8, "data_parallel"),
    (40, 8, "column_wise:2"),
    (25, 16, "table_wise"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(3, tmp_path_factory.mktemp("world"))
    yield started
    started.close()


@pytest.mark.parametrize("optimizer", ("sgd", "rowwise_adagrad"))
def test_a_step_reads_no_value_and_has_one_program_a_set_of_rungs(world: World, optimizer: str) -> None:
    answers = world.run(exchange_steps.record_steps, Case(MIXTURE, optimizer, weighted=True, steps=12, batch_size=48))
    for answer in answers:
        assert answer["reads"] == []
        assert answer["distinct"] <= answer["programs"] < 12
        assert set(answer["collectives"]) == {5 if optimizer == "rowwise_adagrad" else 4}
        assert 0 < answer["padding_share"] < 1
    # All ranks run one program: the same ops on the same shapes, in the same order.
    assert all(answer["names"] == answers[0]["names"] for answer in answers)
    assert all(answer["signatures"] == answers[0]["signatures"] for answer in answers)


def test_the_counted_collectives_are_those_that_were_called(world: World) -> None:
    answer = world.run(exchange_steps.record_steps, Case(MIXTURE, "rowwise_adagrad", steps=4))[0]
    assert sum(answer["collectives"]) == 4 * answer["stats"]["collectives_per_step"]
    assert answer["stats"]["collectives_per_step"] == 5
    assert answer["stats"]["exchange_bytes_per_step"] == sum(answer["stats"]["bytes_per_step"].values()) > 0


@pytest.mark.parametrize("double", (False, True))
def test_deferred_tables_start_as_the_unsharded_model_does(world: World, double: bool) -> None:
    case = Case((*MIXTURE, Table(70_001, 64, "unique_rows")), "adagrad", double=double, steps=0)
    wanted = unsharded(case)["tensors"]
    for tensors in world.run(exchange_steps.initial_tensors, case):
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(tensors[name].double(), tensor.double()), name


def test_a_trained_model_keeps_weights_and_optimizer_state(world: World) -> None:
    for kept in world.run(exchange_steps.trained_then_sharded, Case(MIXTURE, "rowwise_adagrad")):
        assert kept and all(kept.values()), kept


@pytest.mark.parametrize("inline", (False, True))
def test_two_collections_share_one_exchange(world: World, inline: bool) -> None:
    tables = tuple(replace(table, pooling="sum") for table in MIXTURE)
    for answer in world.run(exchange_steps.two_collections, Case(tables, double=True, steps=3), inline):
        assert answer["worst"] <= 1e-10
        assert inline or answer["collectives"] <= 4


def test_dlrm_of_torchrec_runs_unchanged(world: World) -> None:
    assert max(world.run(exchange_steps.dlrm)) < 1e-6


def test_the_backward_pass_as_a_function_trains_the_tables(world: World) -> None:
    for answer in world.run(exchange_steps.by_function, Case(MIXTURE, steps=2)):
        assert answer["moved"]
        assert answer["dense"] == ["hidden.bias", "hidden.weight", "out.bias", "out.weight"]


def test_ids_may_travel_ahead(world: World) -> None:
    assert all(world.run(exchange_steps.ahead, Case(MIXTURE, "rowwise_adagrad", weighted=True, steps=3)))


def test_skipped_ids_change_nothing(world: World) -> None:
    """Cases 8 and 11."""
    assert max(world.run(exchange_steps.skipped_ids, Case(MIXTURE, weighted=True))) < 1e-5


def test_what_cannot_be_is_refused_by_name(world: World) -> None:
    """Cases 7, 38."""
    said = world.run(exchange_steps.refused, Case((Table(10, 8, "unique_rows"),)))
    assert all(answer == said[0] for answer in said)
    expected = {
        "too large": ("'f0_0'", "id 10", "'t0'", "10 rows"),
        "negative": ("id -2",),
        "beyond 32 bits": ("id 8589934592",),
        "no such feature": ("'f0_0'", "other"),
        "weights": ("weights",),
        "other world": ("4 ranks", "has 3"),
        "more state": ("'t0'", "1 numbers of optimizer state", "'row_wise_adagrad'", "RowWiseAdam keeps 9"),
        "less state": ("nothing",),
        "wire": ("float16",),
        "moved": ("cannot be moved or converted",),
        "nothing fused": ("Linear", "no fused collection"),
    }
    for name, parts in expected.items():
        assert all(part in said[0][name] for part in parts), (name, said[0][name])


def test_a_bad_id_of_one_rank_stops_all_and_hangs_none(world: World) -> None:
    answers = world.run(exchange_steps.one_bad_rank, Case((Table(10, 8, "table_wise"),)))
    assert "id 10" in answers[1][0]
    assert all("rank 1 refused" in answers[rank][0] for rank in (0, 2))
    assert [said[1] for said in answers] == ["nothing"] * 3


def test_a_forgotten_reduction_is_named(world: World) -> None:
    for answer in world.run(exchange_steps.forgotten_reduction, Case((Table(10, 8, "data_parallel"),))):
        assert "reduce()" in answer


def test_batches_of_any_size_follow_each_other(world: World) -> None:
    tables = (Table(1000, 8, "unique_rows"), Table(500, 8, "partial_pools"), Table(300, 16, "table_wise"))
    for worst, programs in world.run(exchange_steps.growing_batches, Case((*tables, Table(9, 8, "data_parallel")))):
        assert worst < 1e-5
        assert programs <= 4


def test_frozen_tables_keep_their_bits(world: World) -> None:
    assert all(world.run(exchange_steps.frozen_tables, Case(MIXTURE, "rowwise_decay", weighted=True, steps=2)))


@pytest.mark.parametrize("optimizer", ("adam", "rowwise_adam"))
def test_frozen_tables_count_updates_as_they_do_unsharded(world: World, optimizer: str) -> None:
    """Frozen tables with and without trained ones of their dim; a checkpoint of either loads into the other."""
    tables = [Table(rows, dim, kind, (2,)) for rows, dim, kind in FROZEN_AND_NOT]
    for sharded, alone in world.run(exchange_steps.partly_frozen, Case(tuple(tables), optimizer, double=True, steps=3)):
        assert sharded.keys() <= alone.keys() and len(sharded) == 4 * len(tables)
        counts = [int(sharded[f"optimizer.embeddings.embedding_bags.t{number}.step"]) for number in range(len(tables))]
        assert counts == [3, 3, 3, 3, 0]
        for name, tensor in sharded.items():
            assert (tensor - alone[name].double()).abs().max() < 1e-10, name


def test_a_routed_batch_may_be_used_again(world: World) -> None:
    case = Case((Table(50, 8, "unique_rows", (2,)), Table(50, 8, "table_wise", (2,))), double=True, steps=1)
    assert max(world.run(exchange_steps.one_batch_twice, case)) < 1e-10
