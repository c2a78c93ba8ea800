"""The counts for a slice that nobody has are those of a process group that everybody has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from tests.sharding import exchange_steps
from tests.sharding.exchange_cases import OPTIMIZERS, Case, batches_of, build, configs_of, cut, plan_of
from tests.sharding.test_exchange import MIXTURE
from tests.sharding.world import World
from tpurec.embeddings import dense_parameters
from tpurec.errors import DataError
from tpurec.sharding.exchange_volume import ExchangeVolume, StepVolume
from tpurec.sharding.routing import HostBatch

NUM_RANKS = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(NUM_RANKS, tmp_path_factory.mktemp("world"))
    yield started
    started.close()


def host_batches(case: Case) -> Iterator[Iterator[HostBatch]]:
    """For every step the batches of all ranks."""
    for batch in batches_of(case):
        parts = [batch.part(*cut(case, rank, NUM_RANKS)) for rank in range(NUM_RANKS)]
        yield (
            HostBatch(
                len(part.labels),
                {name: np.concatenate([*bags, np.empty(0, np.int64)]) for name, bags in part.ids.items()},
                {name: np.array([len(bag) for bag in bags], np.int32) for name, bags in part.ids.items()},
                {name: np.concatenate([*bags, np.empty(0, np.float32)]) for name, bags in part.weights.items()},
            )
            for part in parts
        )


def counted(case: Case) -> list[StepVolume]:
    dense = sum(parameter.numel() for parameter in dense_parameters(build(case)))
    volume = ExchangeVolume(
        configs_of(case),
        OPTIMIZERS[case.optimizer],
        plan_of(case, NUM_RANKS),
        is_weighted=case.weighted,
        dense_elements=dense,
    )
    return [volume.step(batches) for batches in host_batches(case)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("optimizer", ("sgd", "rowwise_adagrad", "rowwise_decay"))
@pytest.mark.parametrize("weighted", (False, True))
def test_bytes_equal_what_the_collectives_carry(world: World, optimizer: str, weighted: bool) -> None:
    case = Case(MIXTURE, optimizer, weighted=weighted, packed=True, steps=6, batch_size=48)
    steps = counted(case)
    stats = world.run(exchange_steps.record_steps, case)[0]["stats"]
    kinds = stats["bytes_per_step"]
    assert kinds == pytest.approx({kind: np.mean([step.bytes[kind] for step in steps]) for kind in steps[0].bytes})
    assert len(kinds) == (4 if optimizer == "sgd" else 5)
    assert len({step.exchange_bytes for step in steps}) > 1  # sizes grew on the way, there as here


def test_sizes_never_shrink_and_every_id_counts() -> None:
    case = Case(MIXTURE, steps=6, batch_size=48)
    steps = counted(case)
    sizes = [step.exchange_bytes for step in steps]
    assert sizes == sorted(sizes)
    for step, batch in zip(steps, batches_of(case), strict=True):
        assert step.num_ids == sum(len(bag) for bags in batch.ids.values() for bag in bags)
        assert 0 < step.padding_share < 1
        assert 0 < step.unique_share < 1


def test_every_rank_needs_a_batch() -> None:
    case = Case(MIXTURE, steps=1)
    volume = ExchangeVolume(configs_of(case), OPTIMIZERS["sgd"], plan_of(case, NUM_RANKS))
    batches = list(next(iter(host_batches(dataclasses.replace(case)))))
    with pytest.raises(DataError, match="2 batches for a plan of 3 ranks"):
        volume.step(batches[:-1])


def test_a_smaller_batch_is_padded_to_the_largest_so_far() -> None:
    large, small = Case(MIXTURE, steps=1, batch_size=48), Case(MIXTURE, steps=1, batch_size=12)
    volume = ExchangeVolume(configs_of(large), OPTIMIZERS["sgd"], plan_of(large, NUM_RANKS))
    before = volume.step(next(iter(host_batches(large))))
    assert volume.step(next(iter(host_batches(small)))).bytes == before.bytes
