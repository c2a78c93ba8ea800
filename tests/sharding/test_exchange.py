"""A sharded run equals the unsharded one: tables, optimizer state, dense part and losses after five steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.sharding.exchange_cases import OPTIMIZERS, Case, Table, sharded, unsharded
from tests.sharding.world import World

pytestmark = pytest.mark.multiprocess

KINDS = ("table_wise", "column_wise:2", "unique_rows", "partial_pools", "group_pools", "data_parallel")
SIZES = (2, 3, 4, 8)


# One sharding at a time, on its own, runs at two sizes; the others are slow, and see all shardings in the mixtures.
FEW_SIZES = (2, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 8)))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """Worlds by size; each is started once, and the last one is ended before another starts."""
    running: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in running:
            for other in list(running):
                running.pop(other).close()
            running[size] = World(size, tmp_path_factory.mktemp("world"))
        return running[size]

    yield of_size
    for started in running.values():
        started.close()


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"world{size}")
def world(request: pytest.FixtureRequest, worlds: Callable[[int], World]) -> World:
    return worlds(request.param)


@pytest.fixture(scope="module", params=FEW_SIZES, ids=lambda size: f"world{size}")
def few_worlds(request: pytest.FixtureRequest, worlds: Callable[[int], World]) -> World:
    return worlds(request.param)


def compare(world: World, case: Case, tolerance: float, loss_tolerance: float | None = None) -> list[dict]:
    """Run a case and compare every rank's results; the unsharded run must have moved every table."""
    wanted, found = unsharded(case), world.run(sharded, case)
    start = unsharded(replace(case, steps=0))["tensors"]
    for answer in found:
        assert answer["tensors"].keys() == wanted["tensors"].keys()
        for name, tensor in wanted["tensors"].items():
            difference = (answer["tensors"][name].double() - tensor.double()).abs().max().item()
            assert difference <= tolerance, f"{name}: {difference}"
            assert not torch.equal(tensor, start[name]), f"{name} was not trained; the case proves nothing"
        for one, other in zip(answer["losses"], wanted["losses"], strict=True):
            assert one == pytest.approx(other, abs=loss_tolerance or tolerance)
    return found


def tables_of(kind: str) -> tuple[Table, ...]:
    """One-id, long, shared and wide bags; sum and mean; and a table with fewer rows than ranks."""
    return (
        Table(53, 8, kind, (1,)),
        Table(31, 8, kind, (4, 3), "mean"),
        Table(97, 16, kind, (7,)),
        Table(5, 8, kind, (2,), "mean"),
    )


@pytest.mark.parametrize("weighted", (False, True), ids=("plain", "weighted"))
@pytest.mark.parametrize("optimizer", ("sgd", "adagrad", "rowwise_adagrad"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_equals_the_unsharded_run_in_float64(
    few_worlds: World, kind: str, optimizer: str, weighted: bool
) -> None:
    """Cases 12, 13 and 19."""
    compare(few_worlds, Case(tables_of(kind), optimizer, weighted, double=True), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_equals_the_unsharded_run_in_float32(few_worlds: World, kind: str) -> None:
    """Case 13."""
    compare(few_worlds, Case(tables_of(kind), "sgd"), 1e-6, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_reaches_touched_rows_only(few_worlds: World, kind: str) -> None:
    """Case 16: other rows would move in the unsharded run, too, if they were touched."""
    case = Case((Table(400, 8, kind, (2,)), Table(300, 16, kind, (1, 2))), "rowwise_decay", double=True)
    compare(few_worlds, case, 1e-10)


MIXTURE = tuple(
    Table(rows, dim, kind, ids, pooling)
    for rows, dim, kind, ids, pooling in (
        (53, 8, "table_wise", (1,), "sum"),
        (31, 16, "column_wise:2", (4, 3), "mean"),
        (97, 8, "unique_rows", (1,), "sum"),
        (61, 8, "unique_rows", (3, 2), "mean"),
        (41, 16, "partial_pools", (9,), "mean"),
        (29, 8, "partial_pools", (6,), "sum"),
        (19, 8, "group_pools", (5,), "sum"),
        (11, 8, "data_parallel", (1,), "mean"),
        (3, 16, "data_parallel", (2, 2), "sum"),
        (2, 4, "table_wise", (1,), "sum"),
        (71, 32, "column_wise:4", (2,), "sum"),
    )
)


@pytest.mark.parametrize("optimizer", tuple(OPTIMIZERS))
def test_a_mixture_of_all_shardings_equals_the_unsharded_run(world: World, optimizer: str) -> None:
    answers = compare(world, Case(MIXTURE, optimizer, weighted=True, double=True), 1e-10)
    assert answers[0]["stats"]["collectives_per_step"] <= 6


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "jagged"))
@pytest.mark.parametrize("weighted", (False, True), ids=("plain", "weighted"))
def test_uneven_batches_and_empty_ranks_equal_the_unsharded_run(world: World, packed: bool, weighted: bool) -> None:
    """Cases 2 and 28: one rank has most of the examples, another has none."""
    cuts = {2: (24, 0), 3: (5, 0, 19), 4: (3, 0, 20, 1), 8: (0, 1, 0, 2, 17, 0, 3, 1)}[world.num_ranks]
    compare(world, Case(MIXTURE, "rowwise_adagrad", weighted, double=True, cuts=cuts, packed=packed), 1e-10)


def test_a_rank_without_any_id_takes_part(world: World) -> None:
    """Case 3: every bag of the batch is empty on all ranks but one, whose bags have one id at most."""
    tables = (Table(40, 8, "table_wise", (1,)), Table(40, 8, "unique_rows", (1,)), Table(9, 8, "data_parallel", (1,)))
    cuts = (1,) + (0,) * (world.num_ranks - 1)
    compare(world, Case(tables, "sgd", double=True, batch_size=1, cuts=cuts, seed=5, steps=12), 1e-10)


@pytest.mark.parametrize("kind", ["unique_rows", "partial_pools", "column_wise", "data_parallel"])
def test_steps_before_the_first_id_count_as_those_of_an_unsharded_table(world: World, kind: str) -> None:
    """Adam's bias correction depends on the count; distinct rows did not count while no rank had an id."""
    compare(world, Case((Table(40, 8, kind, (2,)),), "adam", double=True, steps_without_ids=2), 1e-10)


def test_an_unrouted_batch_gives_the_same(world: World) -> None:
    compare(world, Case(MIXTURE, "adagrad", weighted=True, double=True, inline=True), 1e-10)


def test_one_table_costs_as_many_collectives_as_many(world: World) -> None:
    many = Case(tuple(replace(table) for table in MIXTURE * 4), "rowwise_adagrad", double=True, steps=2)
    few = Case(MIXTURE[:2], "rowwise_adagrad", double=True, steps=2)
    numbers = [world.run(sharded, case)[0]["stats"]["collectives_per_step"] for case in (many, few)]
    assert numbers == [5, 5]


@pytest.mark.parametrize("seed", range(6))
def test_random_tables_and_plans_equal_the_unsharded_run(world: World, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * world.num_ranks + seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    tables = []
    for _ in range(pick(1, 2, 3, 5, 8)):
        dim = pick(4, 8, 8, 24, 16)
        ids = pick((1,), (3,), (1, 4), (12,))
        kind = pick(*KINDS, f"column_wise:{pick(2, 4)}")
        tables.append(Table(pick(1, 2, 7, 50, 300), dim, kind, ids, pick("sum", "mean")))
    cuts = torch.randint(0, 9, (world.num_ranks,), generator=generator).tolist()
    cuts[0] += 4
    case = Case(
        tuple(tables),
        pick("sgd", "adagrad", "rowwise_adagrad", "rowwise_decay", "sgd_decay"),
        pick(True, False),
        double=True,
        batch_size=sum(cuts),
        cuts=tuple(cuts),
        packed=pick(True, False),
        seed=seed,
    )
    wanted, found = unsharded(case), world.run(sharded, case)
    for answer in found:
        for name, tensor in wanted["tensors"].items():
            assert (answer["tensors"][name].double() - tensor.double()).abs().max() <= 1e-10, (name, case)
        assert answer["losses"] == pytest.approx(wanted["losses"], abs=1e-10)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_tables_of_half_precision_round_once_a_step(world: World, dtype: str) -> None:
    """The combined gradient differs in its last float32 bits, so a weight may round to its neighbour."""
    tables = tuple(replace(table, dtype=dtype) for table in MIXTURE)
    compare(world, Case(tables, "rowwise_adagrad"), 2e-2 if dtype == "bfloat16" else 4e-3, 1e-2)


def test_bfloat16_on_the_wire_halves_the_bytes_at_a_small_error(world: World) -> None:
    """`docs/sharded_training.md` states the bound: 2^-8 of the largest vector and gradient, once each way."""
    tables = tuple(replace(table, sharding="unique_rows") for table in MIXTURE)
    full = compare(world, Case(tables, "sgd"), 1e-6)[0]["stats"]["bytes_per_step"]
    half = compare(world, Case(tables, "sgd", wire_dtype="bfloat16"), 5e-3, 5e-3)[0]["stats"]["bytes_per_step"]
    assert half["vectors"] == full["vectors"] / 2
    assert half["gradients"] == full["gradients"] / 2
    assert half["ids"] == full["ids"]
