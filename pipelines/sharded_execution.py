"""How steps and evaluations are executed when the tables are sharded: on each rank as alone, with exchanges between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipelines.execution import DenseConfig, Execution, Forward
from pipelines.feed import Feed
from pipelines.routed_feed import RoutedFeed
from pipelines.step import ReduceGradients, TrainStep
from pipelines.world import World
from tpurec.embeddings.deferred import deferred_tables
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.config import WireDtype
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import exchange_of, exchange_stats, shard
from tpurec.sharding.plan import Plan

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ShardedExecution(Execution):
    """An execution whose model is spread over ranks; all of them call its methods at the same points.

    Args:
        inner: how this rank executes its part.
        plan: where the tables are.
        world: the ranks.
        wire_dtype: of pooled vectors and gradients between ranks.
    """

    def __init__(self, inner: Execution, plan: Plan, world: World, wire_dtype: WireDtype) -> None:
        self.device = inner.device
        self.compilations = inner.compilations
        self._inner, self._plan, self._world = inner, plan, world
        self._wire_dtype = WIRE_DTYPES[wire_dtype]
        self._model: nn.Module | None = None
        self._router: BatchRouter | None = None

    def building(self) -> AbstractContextManager[None]:
        """As `Execution.building`: the tables wait for `place`, which gives each rank its own part."""
        return deferred_tables()

    def place(self, model: nn.Module) -> nn.Module:
        """As `Execution.place`; shards the tables."""
        world = self._world
        self._model = shard(
            model,
            self._plan,
            world.device_group,
            device=self.device,
            wire_dtype=self._wire_dtype,
            host_group=world.host_group,
        )
        self._router = BatchRouter(self._model, world.train_group)
        return self._inner.place(self._model)

    def feed(self) -> Feed:
        """As `Execution.feed`; one rank alone has nothing to route."""
        assert self._router is not None, "place comes first"
        return self._inner.feed() if self._world.size == 1 else RoutedFeed(self._router)

    def evaluation_feed(self) -> Feed:
        """As `Execution.evaluation_feed`; of its own, because training batches may be under way meanwhile."""
        if self._world.size == 1:
            return self._inner.evaluation_feed()
        return RoutedFeed(BatchRouter(self._placed(), self._world.evaluation_group))

    def train_step(
        self, model: nn.Module, config: DenseConfig, reduce_gradients: ReduceGradients | None = None
    ) -> TrainStep:
        """As `Execution.train_step`; without `reduce_gradients` the gradients are added up over the ranks."""
        return self._inner.train_step(model, config, reduce_gradients or dense_gradient_reducer(model).reduce)

    def forward(self, model: nn.Module) -> Forward:
        """As `Execution.forward`."""
        return self._inner.forward(model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As `Execution.evaluating`; what is exchanged meanwhile is not counted: the result tells of training."""
        exchange = exchange_of(self._placed())
        if exchange is None:
            yield
            return
        counts = copy.deepcopy(exchange.wire.counts)
        try:
            yield
        finally:
            exchange.wire.counts = counts

    def _placed(self) -> nn.Module:
        assert self._model is not None, "place comes first"
        return self._model

    def statistics(self) -> dict[str, Any]:
        """What training exchanged, for the result.

        Returns:
            `world_size`; `exchange_bytes_per_step`, the mean over ranks of what leaves one; `padding_share` of what is
            exchanged; `collectives_per_step`; and `programs`, those compiled, or where nothing is compiled the
            distinct sets of shapes that steps had, each of which would be one.
        """
        assert self._router is not None, "place comes first"
        found, stats = exchange_stats(self._placed()), self._router.stats
        everyone = self._world.gather_json([found["exchange_bytes_per_step"], stats.padding_share])
        return {
            "world_size": self._world.size,
            "exchange_bytes_per_step": round(sum(sent for sent, _ in everyone) / len(everyone)),
            "padding_share": round(sum(padding for _, padding in everyone) / len(everyone), 4),
            "collectives_per_step": round(found["collectives_per_step"], 2),
            "programs": self.compilations.programs or max(1, stats.programs),
        }
