"""Sharded models trained by real processes: what four ranks save, any other number under other plans goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection

from tests.sharding.exchange_cases import Case, Table, batches_of, build, configs_of, cut, loss_sum, plan_of
from tests.sharding.world import World
from tpurec.embeddings import fused_collections
from tpurec.embeddings.fuse import fused_optimizer_state_dict
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.checkpoint import Checkpointer, load_checkpoint, read_manifest, verify_checkpoint
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import checkpoint_pieces, shard
from tpurec.sharding.pieces import whole_tensors
from tpurec.sharding.plan import Plan

pytestmark = pytest.mark.multiprocess

KINDS = ("row_wise", "column_wise:2", "table_wise", "group_pools", "data_parallel")
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd", "adam", "rowwise_adam")
STEPS_BEFORE = 3


def case_of(first: int, optimizer: str) -> Case:
    """Tables of mixed dims under every kind of sharding, dealt out from `first` on."""
    kinds = [kind.replace("row_wise", "unique_rows") for kind in KINDS[first:] + KINDS[:first]]
    sizes = ((53, 8), (31, 16), (97, 8), (5, 8), (40, 12))
    tables = tuple(Table(rows, dim, kind, (3,)) for (rows, dim), kind in zip(sizes, kinds, strict=True))
    return Case(tables, optimizer, double=True, steps=6, batch_size=24)


def uneven(plan: Plan) -> Plan:
    """A plan whose column shards have widths of their own, and so storages with a number of updates of their own."""
    tables = []
    for placed in plan.tables:
        if placed.sharding == "column_wise":
            dim, (left, right) = placed.table.embedding_dim, placed.shards
            shards = (replace(left, columns=(0, dim // 4)), replace(right, columns=(dim // 4, dim)))
            placed = replace(placed, shards=shards)
        tables.append(placed)
    return replace(plan, tables=tuple(tables))


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is alike on every rank."""
    tensors = {f"model.{name}": tensor for name, tensor in whole_tensors(model).items()}
    return tensors | {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(model).items()}


def train(model: torch.nn.Module, case: Case, rank: int, num_ranks: int, steps: slice) -> None:
    """Some of the case's steps; every world size sees the same global batches."""
    router = BatchRouter(model) if num_ranks > 1 else None
    reducer = dense_gradient_reducer(model) if num_ranks > 1 else None
    dense = torch.optim.SGD([*model.hidden.parameters(), *model.out.parameters()], lr=0.1)
    for batch in batches_of(case)[steps]:
        mine = batch.part(*cut(case, rank, num_ranks))
        inputs, labels, valid = (torch.from_numpy(array) for array in (mine.dense, mine.labels, mine.valid))
        features = mine.jagged(case.weighted)
        if router is not None:
            features = router.prepare(features).features
        total = loss_sum(model, inputs, features, labels, valid) / max(int(batch.valid.sum()), 1)
        dense.zero_grad()
        total.backward()
        if reducer is not None:
            reducer.reduce()
        dense.step()


def save(rank: int, case: Case, folder: str) -> list[tuple[Any, ...]]:
    """Train on four ranks, save, and tell what this rank held when it did."""
    num_ranks = dist.get_world_size()
    model = shard(build(case), uneven(plan_of(case, num_ranks)))
    train(model, case, rank, num_ranks, slice(0, STEPS_BEFORE))
    pieces = checkpoint_pieces(model)
    held = [(p.name, p.global_shape, p.row_start, p.row_step, p.columns, p.tensor.clone()) for p in pieces]
    with Checkpointer(Path(folder), 1, process_group=dist.group.WORLD, asynchronous=True) as checkpointer:
        checkpointer.save(STEPS_BEFORE, state_of(model), {}, pieces=pieces)
        train(model, case, rank, num_ranks, slice(STEPS_BEFORE, None))  # while it is written
    return held


def whole_of(held: list[list[tuple[Any, ...]]]) -> dict[str, torch.Tensor]:
    """Every tensor put together from what all ranks held, row by row; copies must agree to the bit."""
    found: dict[str, torch.Tensor] = {}
    for name, shape, start, step, columns, tensor in (entry for rank in held for entry in rank):
        if not shape:  # the number of updates, which every rank has
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name}: copies differ"
            continue
        whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
        for number in range(len(tensor)):
            target = whole[start + number * step] if columns is None else whole[start + number * step, slice(*columns)]
            if whole.dim() == 1:
                before = whole[start + number * step].clone()
                whole[start + number * step] = tensor[number]
            else:
                before = target.clone()
                target.copy_(tensor[number])
            assert before.isnan().all() or torch.equal(before, tensor[number]), f"{name}: copies differ"
    assert all(not tensor.isnan().any() for tensor in found.values())
    return found


def load_and_train(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Load under another plan, tell what this rank then holds, and train on."""
    num_ranks = dist.get_world_size()
    case = replace(case, seed=7)  # other initial values: all must come from the checkpoint
    model = shard(build(case), uneven(plan_of(case, num_ranks)))
    pieces = checkpoint_pieces(model)
    load_checkpoint(Path(folder), state_of(model), pieces=pieces)
    held = [(p.name, p.global_shape, p.row_start, p.row_step, p.columns, p.tensor.clone()) for p in pieces]
    train(model, replace(case, seed=0), rank, num_ranks, slice(STEPS_BEFORE, None))
    after = [(p.name, p.global_shape, p.row_start, p.row_step, p.columns, p.tensor.clone()) for p in pieces]
    return {"loaded": held, "after": after}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]:
    """(first kind, optimizer) to a checkpoint of four ranks and the whole tensors that they held."""
    folder = tmp_path_factory.mktemp("saved")
    world = World(4, tmp_path_factory.mktemp("world4"))
    found = {}
    try:
        for first in range(len(KINDS)):
            for optimizer in OPTIMIZERS:
                where = folder / f"{first}-{optimizer}"
                held = world.run(save, case_of(first, optimizer), str(where))
                found[first, optimizer] = (str(where / f"step-{STEPS_BEFORE:08d}"), whole_of(held))
    finally:
        world.close()
    return found


@pytest.fixture(scope="module", params=(2, 8), ids=lambda size: f"world{size}")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(request.param, tmp_path_factory.mktemp("world"))
    yield started
    started.close()


def unsharded_end(case: Case) -> dict[str, torch.Tensor]:
    """The tables and their state after all steps of a run that was never sharded, saved or loaded."""
    model = build(case)
    train(model, case, 0, 1, slice(None))
    return {name: tensor.detach().clone() for name, tensor in state_of(model).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", range(len(KINDS)))
def test_other_ranks_under_other_plans_take_it_to_the_bit_and_train_on_as_if_nothing_had_happened(
    saved: dict, world: World, first: int, optimizer: str
) -> None:
    path, whole = saved[first, optimizer]
    other = case_of((first + 1) % len(KINDS), optimizer)  # every table changes its kind of sharding
    answers = world.run(load_and_train, other, path)
    loaded = whole_of([answer["loaded"] for answer in answers])
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    wanted = unsharded_end(case_of(first, optimizer))
    for name, tensor in whole_of([answer["after"] for answer in answers]).items():
        assert (tensor - wanted[name]).abs().max() <= 1e-10, name
        assert not torch.equal(tensor, whole[name]), "it was trained on"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", range(len(KINDS)))
def test_one_process_takes_it_unsharded_and_into_a_plain_torchrec_module(
    saved: dict, first: int, optimizer: str
) -> None:
    path, whole = saved[first, optimizer]
    assert read_manifest(Path(path)).world_size == 4
    verify_checkpoint(Path(path))
    case = case_of(first, optimizer)
    model = build(replace(case, seed=7))
    load_checkpoint(Path(path), state_of(model))
    state = state_of(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    train(model, case, 0, 1, slice(STEPS_BEFORE, None))
    wanted = unsharded_end(case)
    assert all((tensor - wanted[name]).abs().max() <= 1e-10 for name, tensor in state_of(model).items())

    plain = EmbeddingBagCollection(tables=configs_of(case)).double()
    load_checkpoint(Path(path), plain.state_dict(), prefix="model.embeddings.")
    (_, fused) = next(fused_collections(build(case)))
    load_checkpoint(Path(path), fused.optimizer_state_dict(), prefix="optimizer.embeddings.")
    for name, bag in plain.embedding_bags.items():
        assert torch.equal(bag.weight, whole[f"model.embeddings.embedding_bags.{name}.weight"])
    for name, tensor in fused.optimizer_state_dict().items():
        assert torch.equal(tensor, whole[f"optimizer.embeddings.{name}"])
