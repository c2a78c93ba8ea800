"""Tables and optimizer state cut as a plan says, and ranks that are threads: any world size without processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.sharding.problems import table
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.checkpoint_ranks import Ranks
from tpurec.sharding.pieces import TensorPiece, pieces_of_shard
from tpurec.sharding.plan import PlacedTable, Plan, Rungs, Shard

SHARDINGS = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise")
WEIGHT = "model.ebc.embedding_bags.{}.weight"
STATE = "optimizer.ebc.embedding_bags.{}.sum"


def placed(
    name: str, rows: int, dim: int, optimizer: str, sharding: str, world_size: int, pick: int = 0
) -> PlacedTable:
    """A table placed in one of the ways a plan may, chosen among them by `pick`."""
    ranks = tuple((number + pick) % world_size for number in range(world_size))
    if sharding == "data_parallel":
        shards = (Shard(tuple(range(world_size)), "replicated", (0, dim)),)
    elif sharding == "table_wise":
        shards = (Shard(ranks[:1], "all", (0, dim)),)
    elif sharding == "column_wise":
        cut = max(1, dim // 2)
        edges = [(0, cut), (cut, dim)] if cut < dim else [(0, dim)]
        shards = tuple(Shard((ranks[i % world_size],), "all", columns) for i, columns in enumerate(edges))
    else:
        owners = ranks if sharding == "row_wise" else ranks[: max(1, world_size // 2)]
        shards = (Shard(owners, "modulo", (0, dim), pick % len(owners)),)
    spec = table(name, rows, dim, optimizer=optimizer)
    return PlacedTable(spec, sharding, "none", shards)


def plan_of(tables: list[PlacedTable], world_size: int) -> Plan:
    """A plan of tables; it checks itself."""
    return Plan(f"cpu-{world_size}", 8, tuple(tables), (), Rungs(0, 0, 0, 0), Assumptions())


@st.composite
def table_shapes(draw: Callable[..., Any]) -> list[tuple[str, int, int, str]]:
    """Names, rows, columns and optimizers of a few tables."""
    optimizers = st.sampled_from(["row_wise_adagrad", "adagrad", "sgd"])
    return [
        (f"t{number}", draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(optimizers))
        for number in range(draw(st.integers(1, 4)))
    ]


@st.composite
def plans(draw: Callable[..., Any], shapes: list[tuple[str, int, int, str]], world_size: int) -> Plan:
    """A random plan of these tables."""
    picks = [(draw(st.sampled_from(SHARDINGS)), draw(st.integers(0, world_size - 1))) for _ in shapes]
    return plan_of(
        [placed(*shape, sharding, world_size, pick) for shape, (sharding, pick) in zip(shapes, picks, strict=True)],
        world_size,
    )


def whole_state(shapes: list[tuple[str, int, int, str]]) -> dict[str, torch.Tensor]:
    """The unsharded tables and their optimizer state, every value its own."""
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, rows, dim, optimizer in shapes:
        tensors[WEIGHT.format(name)] = torch.randn(rows, dim, generator=generator)
        if optimizer != "sgd":
            state = (rows,) if optimizer == "row_wise_adagrad" else (rows, dim)
            tensors[STATE.format(name)] = torch.rand(state, generator=generator)
    return tensors


def cut(plan: Plan, rank: int, tensors: dict[str, torch.Tensor], fill: float | None = None) -> list[TensorPiece]:
    """A rank's pieces of whole tensors; with `fill`, of that value, to be loaded."""
    pieces = []
    for entry in plan.tables:
        for key in (WEIGHT.format(entry.name), STATE.format(entry.name)):
            if key not in tensors:
                continue
            tensor = tensors[key]
            for shard in entry.shards:
                rows = [row for row in range(tensor.shape[0]) if _holds(shard, row, rank)]
                local = tensor[rows]
                if tensor.dim() > 1:
                    local = local[:, slice(*shard.columns)]
                local = local.clone() if fill is None else torch.full_like(local, fill)
                pieces += pieces_of_shard(key, shard, rank, tuple(tensor.shape), [local])
    return pieces


def _holds(shard: Shard, row: int, rank: int) -> bool:
    if shard.rule == "modulo":
        return shard.owner(row) == rank
    return rank in shard.ranks


class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def _collect(self, what: str, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        self._board[self.rank] = json.dumps(value)
        self._barrier.wait(60)
        result = [json.loads(text) for text in self._board] if self.rank == 0 else None
        self._barrier.wait(60)
        return result

    def _share(self, what: str, value: dict[str, Any]) -> dict[str, Any]:
        if self.rank == 0:
            self._board[0] = json.dumps(value)
        self._barrier.wait(60)
        result = json.loads(self._board[0])
        self._barrier.wait(60)
        return result


def on_ranks(world_size: int, action: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Run an action on every rank; what it returned, or the error it raised, by rank."""
    board, barrier = [None] * world_size, threading.Barrier(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = action(ThreadRanks(rank, world_size, board, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
