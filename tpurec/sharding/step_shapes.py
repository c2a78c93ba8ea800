"""The static shapes of one training step on a slice: stacks as `shard` lays them out, and what one step exchanges.

Sizes come from the router that training uses (`tpurec.sharding.routing`), with ids drawn by the tables' statistics: the
plan's own rungs are one figure for all stacks together, a program needs one for each. Ranks are drawn until
`MOST_RANKS`; as every rank pads to the fullest pair of ranks, sizes of more ranks can be a rung larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torchrec import EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.types import DataType

from tpurec.embeddings.optimizers import SGD, Adagrad, Adam, EmbeddingOptimizer, RowWiseAdagrad, RowWiseAdam
from tpurec.embeddings.stack import dtype_of
from tpurec.sharding.drawn_ids import draw_batch
from tpurec.sharding.placement import ShardedTable, Stack, make_stacks, tables_of
from tpurec.sharding.plan import Plan
from tpurec.sharding.routing import Sizes, StackRouter, rung, sizes_of
from tpurec.sharding.tables import TableSpec

MOST_RANKS = 32
_OPTIMIZERS = {
    "sgd": SGD,
    "row_wise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "partial_rowwise_adam": RowWiseAdam,
    "adam": Adam,
}
_DATA_TYPES = {"float32": DataType.FP32, "bfloat16": DataType.BF16, "float16": DataType.FP16}
_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN, "none": PoolingType.NONE}


@dataclass(frozen=True)
class StackShapes:
    """One stack in one step, the same on every rank.

    Args:
        stack: the stack.
        tables: names of the tables with rows in it.
        sizes: agreed by the ranks.
        weighted: whether ids have weights.
        num_ranks: of the exchange.
        batch_size: examples of a rank.
    """

    stack: Stack
    tables: tuple[str, ...]
    sizes: Sizes
    weighted: bool
    num_ranks: int
    batch_size: int

    @property
    def request(self) -> tuple[int, int]:
        """Ids and bags of the lookup: what all ranks ask this one for, and its replicated rows."""
        ids, bags = self.gradients
        return ids + self.sizes.replicated, bags + self.sizes.replicated

    @property
    def gradients(self) -> tuple[int, int]:
        """Ids and bags of the update: what all ranks ask this one for."""
        rows = self.num_ranks * self.sizes.rows
        answers = self.num_ranks * self.stack.num_answers * self.batch_size
        return rows + self.num_ranks * self.sizes.bag_ids, rows + answers

    @property
    def request_bytes(self) -> int:
        """Ids, offsets and weights of the lookup as the kernels take them."""
        ids, bags = self.request
        return 4 * (ids * (2 if self.weighted else 1) + bags + 1)

    @property
    def message_bytes(self) -> int:
        """Of ids, lengths and weights, sent and received."""
        weighted = 2 if self.weighted else 1
        size = self.sizes.rows + self.stack.num_answers * self.batch_size + self.sizes.bag_ids * weighted
        return 2 * 4 * self.num_ranks * size

    @property
    def vector_elements(self) -> int:
        """Elements of rows and pooled vectors that a rank sends, and receives, one way."""
        lines = self.sizes.rows + self.stack.num_answers * self.batch_size
        return self.num_ranks * lines * self.stack.width

    @property
    def route_bytes(self) -> int:
        """Index arrays of the ids that a rank looks up itself, for one batch."""
        ids, lines = self.sizes.local_ids, self.num_ranks * self.sizes.rows + self.sizes.replicated
        if self.stack.unpooled:
            return 4 * (ids + sum(self.sizes.sequences) + lines + 1 + 2 * self.sizes.replicated)
        bags = len(self.stack.local_slots) * self.batch_size
        return 4 * (ids * (4 if self.weighted else 2) + lines + bags + 2 + 2 * self.sizes.replicated)

    @property
    def gathered_bytes(self) -> int:
        """Rows of the ids that a rank looks up itself, before they are added up, or as sequences."""
        return 4 * (sum(self.sizes.sequences) or self.sizes.local_ids) * self.stack.width

    @property
    def replicated_bytes(self) -> int:
        """Gradients of rows that every rank has, and how often each was touched."""
        return 4 * (self.stack.num_replicated + 1) * (self.stack.width + 1) if self.stack.num_replicated else 0


@dataclass(frozen=True)
class StepShapes:
    """All stacks in one step.

    Args:
        stacks: the stacks.
        batch_size: examples of a rank, the largest share.
        ranks_drawn: of how many ranks ids were drawn.
    """

    stacks: tuple[StackShapes, ...]
    batch_size: int
    ranks_drawn: int


def step_shapes(
    tables: Sequence[TableSpec],
    plan: Plan,
    batch_size: int,
    optimizer: EmbeddingOptimizer | None = None,
    most_ranks: int = MOST_RANKS,
) -> StepShapes:
    """Lay a plan out and find the shapes of one step.

    Args:
        tables: the tables.
        plan: where they are.
        batch_size: global examples.
        optimizer: of all tables, with its hyper-parameters; None for each table's own with defaults.
        most_ranks: ranks whose ids are drawn, evenly spread over the slice.

    Returns:
        The shapes.

    Raises:
        ConfigError: the plan is for other tables, or a table that sharded training cannot have.
    """
    kinds = [("" if optimizer else table.optimizer, table.pooling == "none") for table in tables]
    names = list(dict.fromkeys(kinds))
    optimizers = [optimizer or _OPTIMIZERS[name](lr=0.01) for name, _ in names]
    groups = [[table for table, kind in zip(tables, kinds, strict=True) if kind == name] for name in names]
    collections = []
    for group in groups:
        configs = [config_of(table) for table in group]
        collections.append((configs, [dtype_of(config) for config in configs], [False] * len(configs)))
    weighted = [
        not unpooled and any(feature.weighted for table in group for feature in table.features)
        for group, (_, unpooled) in zip(groups, names, strict=True)
    ]
    sharded = tables_of(plan, collections)
    num_ranks = plan.topology.num_ranks
    stacks = make_stacks(sharded, optimizers, num_ranks)
    share = -(-batch_size // num_ranks)
    ranks = np.unique(np.linspace(0, num_ranks - 1, min(num_ranks, most_ranks)).astype(int)).tolist()
    sizes = _sizes(tables, plan, sharded, stacks, weighted, share, ranks)
    found = tuple(
        StackShapes(
            stack,
            tuple(dict.fromkeys(sharded[place.table].config.name for place in stack.places)),
            size,
            weighted[stack.collection],
            num_ranks,
            share,
        )
        for stack, size in zip(stacks, sizes, strict=True)
    )
    return StepShapes(found, share, len(ranks))


def _sizes(
    tables: Sequence[TableSpec],
    plan: Plan,
    sharded: Sequence[ShardedTable],
    stacks: Sequence[Stack],
    weighted: Sequence[bool],
    share: int,
    ranks: Sequence[int],
) -> list[Sizes]:
    num_ranks = plan.topology.num_ranks
    routers = [StackRouter(stack, sharded, num_ranks, weighted[stack.collection]) for stack in stacks]
    needs = np.zeros(sum(router.num_needs for router in routers), dtype=np.int64)
    for rank in ranks:
        batch = draw_batch(tables, plan.assumptions, rank * share, share, any(weighted))
        np.maximum(needs, [need for router in routers for need in router.route(batch).needs], out=needs)
    return sizes_of(routers, np.array([rung(int(need)) for need in needs]))


def config_of(table: TableSpec) -> EmbeddingBagConfig:
    """TorchRec's form of a table.

    Args:
        table: the planner's.

    Returns:
        Its configuration.
    """
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=[feature.name for feature in table.features],
        pooling=_POOLINGS[table.pooling],
        data_type=_DATA_TYPES[table.dtype],
    )
