"""Models, plans and batches for the tests of the exchange, and the run of a case on one rank or unsharded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, PoolingType
from torchrec.types import DataType

from tpurec.embeddings import (
    SGD,
    Adagrad,
    Adam,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    RowWiseAdagrad,
    RowWiseAdam,
    fused_collections,
)
from tpurec.embeddings.fuse import fused_optimizer_state_dict
from tpurec.features.packing import Ladder, PackedBatch, PackedFeature
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import checkpoint_pieces, exchange_of, exchange_stats, shard
from tpurec.sharding.plan import PlacedTable, Plan, Rungs, Shard
from tpurec.sharding.tables import FeatureSpec, TableSpec

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1),
    "sgd_decay": SGD(lr=0.1, weight_decay=0.01),
    "adagrad_decay": Adagrad(lr=0.1, weight_decay=0.01),
    "rowwise_decay": RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "adam": Adam(lr=0.05),
    "adamw": Adam(lr=0.05, weight_decay=0.01, decoupled_weight_decay=True),
    "rowwise_adam": RowWiseAdam(lr=0.05, weight_decay=0.01),
    "clipped_rowwise": RowWiseAdagrad(lr=0.1, weight_decay=0.01, max_gradient_norm=0.003),
    "clipped_sgd": SGD(lr=0.1, max_gradient_norm=0.003),
    "clipped_rowwise_adam": RowWiseAdam(lr=0.05, weight_decay=0.01, max_gradient_norm=0.003),
}


@dataclass(frozen=True)
class Table:
    """One table of a case: its size, its features' largest bag lengths, and how it is sharded."""

    rows: int
    dim: int
    sharding: str
    max_ids: tuple[int, ...] = (1,)
    pooling: str = "sum"
    dtype: str = "float32"


@dataclass(frozen=True)
class Case:
    """A model, a plan and its batches.

    Tables of pooling `none` make a sequence collection; then all have that, and one dim. A share `skipped` of the ids
    is -1. `cuts` are the shares of the global batch that each rank gets, as numbers of examples; None for equal ones.
    The first `steps_without_ids` batches have none.
    """

    tables: tuple[Table, ...]
    optimizer: str = "sgd"
    weighted: bool = False
    double: bool = False
    batch_size: int = 24
    cuts: tuple[int, ...] | None = None
    packed: bool = False
    inline: bool = False
    wire_dtype: str = "float32"
    seed: int = 0
    steps: int = 5
    steps_without_ids: int = 0
    skipped: float = 0.0
    extra: dict = field(default_factory=dict)


def configs_of(case: Case) -> list[EmbeddingBagConfig]:
    data_types = {"float32": DataType.FP32, "bfloat16": DataType.BF16, "float16": DataType.FP16}
    return [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[f"f{number}_{feature}" for feature in range(len(table.max_ids))],
            pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
            data_type=data_types[table.dtype],
        )
        for number, table in enumerate(case.tables)
    ]


def sequence_configs_of(case: Case) -> list[EmbeddingConfig]:
    names = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type")
    return [EmbeddingConfig(**{name: getattr(config, name) for name in names}) for config in configs_of(case)]


def plan_of(case: Case, num_ranks: int, optimizer: str = "adam") -> Plan:
    """A plan with the shardings that the case asks for, owners dealt in turn; Adam has of all the most state."""
    placed, turn = [], 0
    everyone = tuple(range(num_ranks))
    for number, table in enumerate(case.tables):
        spec = TableSpec(
            f"t{number}",
            table.rows,
            table.dim,
            tuple(FeatureSpec(f"f{number}_{f}", 1.0) for f in range(len(table.max_ids))),
            pooling=table.pooling,
            optimizer=optimizer,
        )
        kind, _, count = table.sharding.partition(":")
        columns = (0, table.dim)
        if kind == "data_parallel":
            shards, exchange = (Shard(everyone, "replicated", columns),), "none"
        elif kind == "table_wise":
            shards, exchange = (Shard((turn % num_ranks,), "all", columns),), "bags"
            turn += 1
        elif kind == "column_wise":
            pieces = min(int(count or 2), table.dim)
            width = table.dim // pieces
            shards = tuple(
                Shard(((turn + piece) % num_ranks,), "all", (piece * width, (piece + 1) * width))
                for piece in range(pieces)
            )
            turn, exchange = turn + pieces, "bags"
        elif kind in ("unique_rows", "partial_pools"):
            shards, exchange = (Shard(everyone, "modulo", columns, number % num_ranks),), kind
        else:  # groups of ranks
            size = max(1, num_ranks // 2)
            group = tuple(sorted((turn + rank) % num_ranks for rank in range(size)))
            shards = (Shard(group, "modulo", columns, number % size),)
            turn, exchange = turn + size, "partial_pools"
        sharding = {"unique_rows": "row_wise", "partial_pools": "row_wise", "group_pools": "table_row_wise"}
        placed.append(PlacedTable(spec, sharding.get(kind, kind), exchange, shards))
    return Plan(f"cpu-{num_ranks}", 1024, tuple(placed), (), Rungs(0, 0, 0, 0), Assumptions())


class Tower(nn.Module):
    """A dense part small enough to compare, large enough to mix everything."""

    def __init__(self, collection: nn.Module, num_columns: int) -> None:
        super().__init__()
        self.embeddings = collection
        self.hidden = nn.Linear(num_columns + 3, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, dense, features):
        looked_up = self.look_up(features).to(dense.dtype)
        return self.out(torch.tanh(self.hidden(torch.cat([dense, looked_up], dim=1)))).squeeze(1)

    def look_up(self, features):
        return self.embeddings(features).values()


class SequenceTower(Tower):
    """The same over sequences: each place of a sequence has a weight of its own."""

    def look_up(self, features):
        return torch.cat([sum_of_places(one) for one in self.embeddings(features).values()], dim=1)


def sum_of_places(sequences: JaggedTensor) -> torch.Tensor:
    """`[B, dim]`, each vector divided by its place in its sequence, from 1. (FBGEMM pads no float64.)

    On a device there may be more values than ids, which belong to no example.
    """
    values, lengths = sequences.values(), sequences.lengths()
    num_examples, ends = len(lengths), lengths.cumsum(0, dtype=torch.int32)
    positions = torch.arange(len(values), dtype=torch.int32, device=values.device)
    example_of = torch.searchsorted(ends, positions, right=True)
    starts = torch.cat([ends - lengths, ends.new_zeros(1)])
    places = 1 + positions - starts[example_of]
    sums = values.new_zeros(num_examples + 1, values.shape[1])
    return sums.index_add(0, example_of, values / places[:, None])[:num_examples]


def build(case: Case) -> Tower:
    torch.manual_seed(case.seed)
    num_columns = sum(table.dim * len(table.max_ids) for table in case.tables)
    if case.tables[0].pooling == "none":
        sequences = FusedEmbeddingCollection(sequence_configs_of(case), OPTIMIZERS[case.optimizer])
        model = SequenceTower(sequences, num_columns)
    else:
        collection = FusedEmbeddingBagCollection(configs_of(case), OPTIMIZERS[case.optimizer], case.weighted)
        model = Tower(collection, num_columns)
    return model.double() if case.double else model


@dataclass
class Examples:
    """A global batch: for each feature ids and weights of each example."""

    dense: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    ids: dict[str, list[np.ndarray]]
    weights: dict[str, list[np.ndarray]]

    def part(self, begin: int, end: int) -> Examples:
        cut = {name: bags[begin:end] for name, bags in self.ids.items()}
        weights = {name: bags[begin:end] for name, bags in self.weights.items()}
        return Examples(self.dense[begin:end], self.labels[begin:end], self.valid[begin:end], cut, weights)

    def jagged(self, weighted: bool) -> KeyedJaggedTensor:
        values = [np.concatenate(bags) if bags else np.empty(0, np.int64) for bags in self.ids.values()]
        lengths = [len(bag) for bags in self.ids.values() for bag in bags]
        weights = None
        if weighted:
            parts = [np.concatenate(bags) if bags else np.empty(0, np.float32) for bags in self.weights.values()]
            weights = torch.from_numpy(np.concatenate(parts).astype(np.float32))
        return KeyedJaggedTensor(
            list(self.ids),
            torch.from_numpy(np.concatenate(values)),
            weights=weights,
            lengths=torch.tensor(lengths, dtype=torch.int32),
            stride=len(self.labels),
        )

    def packed(self, weighted: bool, size: int) -> PackedBatch:
        """Padded to `size` examples."""
        spare, ladder, sparse = size - len(self.labels), Ladder.for_batch(max(size, 1)), {}
        for name, bags in self.ids.items():
            lengths = np.array([len(bag) for bag in bags] + [0] * spare, dtype=np.int32)
            rows = np.full(ladder.rung(int(lengths.sum())), -1, dtype=np.int32)
            rows[: lengths.sum()] = np.concatenate([*bags, np.empty(0, np.int64)])
            weights = None
            if weighted:
                weights = np.zeros(len(rows), dtype=np.float32)
                weights[: lengths.sum()] = np.concatenate([*self.weights[name], np.empty(0, np.float32)])
            sparse[name] = PackedFeature(rows, lengths, weights)
        pad = lambda array: np.concatenate([array, np.zeros((spare, *array.shape[1:]), array.dtype)])  # noqa: E731
        return PackedBatch(pad(self.dense), pad(self.labels), pad(self.valid), sparse, len(self.labels))


def batches_of(case: Case) -> list[Examples]:
    rng = np.random.default_rng(case.seed + 1)
    found = []
    for step in range(case.steps):
        ids, weights = {}, {}
        for number, table in enumerate(case.tables):
            for feature, most in enumerate(table.max_ids):
                lengths = rng.integers(0, most + 1, case.batch_size) * (step >= case.steps_without_ids)
                # Skewed, so that rows repeat within bags, over examples, features and ranks.
                bags = [(rng.random(length) ** 3 * table.rows).astype(np.int64) for length in lengths]
                if case.skipped:
                    bags = [np.where(rng.random(len(bag)) < case.skipped, -1, bag) for bag in bags]
                ids[f"f{number}_{feature}"] = bags
                weights[f"f{number}_{feature}"] = [rng.normal(1, 1, len(bag)).astype(np.float32) for bag in bags]
        labels = rng.integers(0, 2, case.batch_size).astype(np.float32)
        valid = rng.random(case.batch_size) < 0.8
        dense = rng.normal(size=(case.batch_size, 3)).astype(np.float32)
        found.append(Examples(dense, labels, valid, ids, weights))
    return found


def loss_sum(model: nn.Module, dense: torch.Tensor, features, labels: torch.Tensor, valid: torch.Tensor):
    dtype = next(model.hidden.parameters()).dtype
    logits = model(dense.to(dtype), features)
    return nn.functional.binary_cross_entropy_with_logits(
        logits, labels.to(dtype), weight=valid.to(dtype), reduction="sum"
    )


def unsharded(case: Case) -> dict:
    """Losses, tables, accumulators and dense parameters of the unsharded run."""
    model, losses = build(case), []
    dense = torch.optim.SGD([*model.hidden.parameters(), *model.out.parameters()], lr=0.1)
    for batch in batches_of(case):
        valid = torch.from_numpy(batch.valid)
        total = loss_sum(
            model, torch.from_numpy(batch.dense), batch.jagged(case.weighted), torch.from_numpy(batch.labels), valid
        )
        loss = total / max(int(valid.sum()), 1)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer.{name}": tensor.clone() for name, tensor in fused_optimizer_state_dict(model).items()}
    return {"losses": losses, "tensors": tensors}


def cut(case: Case, rank: int, num_ranks: int) -> tuple[int, int]:
    sizes = case.cuts or (case.batch_size // num_ranks,) * num_ranks
    begin = sum(sizes[:rank])
    return begin, begin + sizes[rank]


def sharded(rank: int, case: Case) -> dict:
    """The same of a sharded run, on one rank of a world; every rank returns the whole tensors."""
    num_ranks = dist.get_world_size()
    wire_dtype = torch.float32 if case.wire_dtype == "float32" else torch.bfloat16
    model = shard(build(case), plan_of(case, num_ranks), wire_dtype=wire_dtype)
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    dense, losses = torch.optim.SGD([*model.hidden.parameters(), *model.out.parameters()], lr=0.1), []
    for batch in batches_of(case):
        begin, end = cut(case, rank, num_ranks)
        mine = batch.part(begin, end)
        if case.packed:
            routed = router.prepare(mine.packed(case.weighted, max(case.cuts or (end - begin,))))
            inputs, labels, valid, features = routed.dense, routed.labels, routed.valid, routed.features
            number = routed.num_labelled_global
        else:
            inputs, labels, valid = (torch.from_numpy(array) for array in (mine.dense, mine.labels, mine.valid))
            features = mine.jagged(case.weighted)
            if not case.inline:
                features = router.prepare(features).features
            number = int(batch.valid.sum())
        total = loss_sum(model, inputs, features, labels, valid) / max(number, 1)
        dense.zero_grad()
        total.backward()
        reducer.reduce()
        dense.step()
        all_losses = total.detach().double()
        dist.all_reduce(all_losses)
        losses.append(all_losses.item())
    tensors = gathered(model)
    tensors |= {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    programs = 0 if exchange_of(model) is None else router.stats.programs
    return {"losses": losses, "tensors": tensors, "stats": exchange_stats(model), "programs": programs}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every table and accumulator, put together from all ranks; each row must be written exactly once."""
    found: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for piece in checkpoint_pieces(model):
        whole = found.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=torch.float64))
        count = written.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=torch.float64))
        if piece.writes and not piece.global_shape:
            whole.copy_(piece.tensor)
            count += 1
        elif piece.writes and len(piece.tensor):
            last = piece.row_start + (len(piece.tensor) - 1) * piece.row_step
            rows = slice(piece.row_start, last + 1, piece.row_step)
            columns = (slice(*piece.columns),) if piece.columns else ()
            whole[(rows, *columns)] = piece.tensor.double()
            count[(rows, *columns)] += 1
    for name, whole in found.items():
        dist.all_reduce(whole)
        dist.all_reduce(written[name])
        assert (written[name] == 1).all(), f"{name}: some elements are written by no rank or by several"
    return found


__all__ = ["Case", "Table", "fused_collections", "replace", "sharded", "unsharded"]
