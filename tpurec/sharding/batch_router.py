"""`BatchRouter`: the host's part of a step, one batch ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tpurec.embeddings.jagged import to_torch
from tpurec.errors import DataError
from tpurec.features.packing import PackedBatch
from tpurec.sharding.host_batch import Batch, HostBatch, empty_batch, jagged_of, read_batch
from tpurec.sharding.modules import exchange_of, sharded_collections
from tpurec.sharding.routed import DeviceRoute, RoutedBatch, RoutedFeatures, SequenceIds, StackConstants
from tpurec.sharding.routing import Sizes, StackRoute, StackRouter, StackRouting, raise_to_rungs, sizes_of
from tpurec.sharding.sharded_collection import ShardedCollection

_REFUSED = -1  # in the place of a number of labelled examples


class RouterStats:
    """Counts of what a router prepared.

    Attributes:
        batches: batches.
        programs: distinct sets of sizes, each of which is a program on a compiling device.
        ids: ids of tables that exchange distinct rows, or that every rank has.
        unique_rows: distinct rows among them.
        message_elements: of ids, lengths and weights, padding included.
        vector_elements: that come back, padding included.
        padding_elements: of both, that are padding.
    """

    def __init__(self) -> None:
        self.batches = self.ids = self.unique_rows = 0
        self.message_elements = self.vector_elements = self.padding_elements = 0
        self._programs: set[tuple] = set()

    @property
    def programs(self) -> int:
        """Distinct sets of sizes."""
        return len(self._programs)

    @property
    def unique_share(self) -> float:
        """Distinct rows / ids."""
        return self.unique_rows / self.ids if self.ids else 1.0

    @property
    def padding_share(self) -> float:
        """Padding / all elements exchanged."""
        total = self.message_elements + self.vector_elements
        return self.padding_elements / total if total else 0.0


class BatchRouter:
    """Routes batches; every rank makes one at the same point of its program, and prepares the same number of batches.

    It may run in a thread, one batch ahead of the device. The sizes of the exchange never shrink, so that few programs
    are compiled.

    Args:
        model: of `shard`.
        host_group: a process group over the same ranks whose collectives work on the host; None makes one (gloo) if
            there are several ranks.

    Example:
        >>> router = BatchRouter(model)
        >>> routed = router.prepare(packed)
        >>> logits = model(routed.dense, routed.features)
    """

    def __init__(self, model: nn.Module, host_group: dist.ProcessGroup | None = None) -> None:
        self.stats = RouterStats()
        self._exchange = exchange_of(model)
        if self._exchange is not None:
            self._set_up(sharded_collections(model), host_group)

    @classmethod
    def of_collections(
        cls, collections: Sequence[ShardedCollection], host_group: dist.ProcessGroup | None
    ) -> BatchRouter:
        """Make a router of the collections of one model.

        Args:
            collections: all of them, by number.
            host_group: see the class.

        Returns:
            The router.
        """
        router = cls.__new__(cls)
        router.stats, router._exchange = RouterStats(), collections[0].exchange
        router._set_up(collections, host_group)
        return router

    def _set_up(self, collections: Sequence[ShardedCollection], host_group: dist.ProcessGroup | None) -> None:
        exchange = self._exchange
        self._collections = tuple(collections)
        self._weighted = [collection.is_weighted() for collection in collections]
        if host_group is None:
            members = dist.get_process_group_ranks(exchange.wire.group or dist.group.WORLD)
            host_group = dist.new_group(members, backend="gloo")
        self._group = host_group
        ranks = exchange.wire.num_ranks
        self._routers = [
            StackRouter(stack, exchange.tables, ranks, self._weighted[stack.collection]) for stack in exchange.stacks
        ]
        self._sizes = np.zeros(sum(router.num_needs for router in self._routers), dtype=np.int64)
        self._areas = np.zeros(len(exchange.area_tables), dtype=np.int64)
        self._padded_size = 0
        self._constants: dict[tuple, StackConstants] = {}

    def prepare(self, batch: Batch) -> RoutedBatch:
        """Route one batch of this rank.

        Args:
            batch: this rank's examples. A `TorchBatch` or KeyedJaggedTensor on a device is copied to the host first.

        Returns:
            What the model, the loss and the device need.

        Raises:
            DataError: the batch lacks a feature or weights, its parts do not fit together, or an id is not a row.
        """
        if isinstance(batch, KeyedJaggedTensor):
            dense = labels = valid = None
            num_labelled = batch.stride()
        elif isinstance(batch, PackedBatch):
            dense, labels, valid = (torch.from_numpy(_writable(a)) for a in (batch.dense, batch.labels, batch.valid))
            num_labelled = int(batch.valid.sum())
        else:
            dense, labels, valid = batch.dense, batch.labels, batch.valid
            num_labelled = int(batch.valid.sum())
        if self._exchange is None:
            features = to_torch(batch).features if isinstance(batch, PackedBatch) else jagged_of(batch)
            return RoutedBatch(dense, features, labels, valid, num_labelled, num_labelled)
        features, total = self.route(batch, num_labelled, range(len(self._collections)))
        if dense is not None:
            dense, labels, valid = (tensor.to(self._exchange.device) for tensor in (dense, labels, valid))
        return RoutedBatch(dense, features, labels, valid, num_labelled, total)

    def route(self, batch: Batch, num_labelled: int, collections: Sequence[int]) -> tuple[RoutedFeatures, int]:
        """Route the ids of some collections; the others find empty bags.

        Args:
            batch: see `prepare`.
            num_labelled: of this rank.
            collections: numbers of the collections.

        Returns:
            The features, and the examples with a label of all ranks.

        Raises:
            DataError: see `prepare`.
        """
        exchange, ranks = self._exchange, self._exchange.wire.num_ranks
        needed: dict[str, bool | None] = {}
        for number in collections:
            for name in self._collections[number].feature_names:
                if number in exchange.sequences:
                    needed.setdefault(name)
                else:
                    needed[name] = self._weighted[number] or bool(needed.get(name))
        try:
            host = read_batch(batch, needed)
            for router in self._routers:
                if router.stack.collection in collections:
                    router.check(host)
        except DataError:
            self._gather(np.full(self._num_needs, _REFUSED, dtype=np.int64))  # the others wait for this rank
            raise
        # A feature of several collections has no ids for those that are not meant.
        empty = empty_batch(host.num_examples, [name for one in self._collections for name in one.feature_names])
        hosts = [host if number in collections else empty for number in range(len(self._collections))]
        routings = [router.route(hosts[router.stack.collection]) for router in self._routers]
        areas = self._area_needs(hosts)
        mine = [num_labelled, host.num_examples, *(need for routing in routings for need in routing.needs), *areas]
        everyone = self._gather(np.array(mine, dtype=np.int64))
        refused = np.flatnonzero(everyone[:, 0] == _REFUSED)
        if len(refused):
            raise DataError(f"rank {refused[0]} refused its part of this batch.", "Its own message says why.")
        most = everyone.max(axis=0)
        num_sizes = len(self._sizes)
        self._padded_size = max(self._padded_size, int(most[1]))
        raise_to_rungs(self._sizes, most[2 : 2 + num_sizes])
        raise_to_rungs(self._areas, np.minimum(everyone[:, 2 + num_sizes :].sum(axis=0), self._area_limits()))
        sizes = sizes_of(self._routers, self._sizes)
        routes = [routing.fill(size, self._padded_size) for routing, size in zip(routings, sizes, strict=True)]
        message = routes[0].message if len(routes) == 1 else np.concatenate([r.message for r in routes], axis=1)
        starts = np.concatenate([[0], np.cumsum(self._areas)])
        features = RoutedFeatures(
            tuple(self._on_device(n, route, size) for n, (route, size) in enumerate(zip(routes, sizes, strict=True))),
            torch.from_numpy(np.ascontiguousarray(message)).to(exchange.device),
            host.num_examples,
            self._padded_size,
            torch.from_numpy(starts[:-1]).to(exchange.device),
            int(starts[-1]),
            exchange.wire,
            frozenset(collections),
            self._sequences(hosts, sizes),
        )
        self._count(host, routings, sizes, ranks)
        return features, int(everyone[:, 0].sum())

    def _sequences(self, hosts: Sequence[HostBatch], sizes: Sequence[Sizes]) -> dict[int, SequenceIds]:
        found = {}
        for number, arrangement in self._exchange.sequences.items():
            collection, capacities = self._collections[number], arrangement.capacities(sizes)
            features = [name for table in collection.tables for name in table.feature_names]
            need_ids = collection.need_indices()
            found[number] = SequenceIds.of(hosts[number], features, capacities, need_ids, self._exchange.device)
        return found

    @property
    def _num_needs(self) -> int:
        return 2 + self._sizes.size + len(self._areas)

    def _gather(self, mine: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(mine)
        found = [torch.empty_like(own) for _ in range(self._exchange.wire.num_ranks)]
        dist.all_gather(found, own, group=self._group)
        return torch.stack(found).numpy()

    def _area_needs(self, hosts: Sequence[HostBatch]) -> list[int]:
        tables = [self._exchange.tables[number] for number in self._exchange.area_tables]
        return [sum(len(hosts[one.collection].values[name]) for name in one.config.feature_names) for one in tables]

    def _area_limits(self) -> np.ndarray:
        tables = (self._exchange.tables[number].config for number in self._exchange.area_tables)
        return np.array([table.num_embeddings for table in tables], dtype=np.int64)

    def _on_device(self, number: int, route: StackRoute, sizes: Sizes) -> DeviceRoute:
        exchange, stack = self._exchange, self._exchange.stacks[number]
        weighted = self._weighted[stack.collection]
        key = (sizes, weighted)
        if key not in self._constants:
            self._constants[key] = StackConstants.of(sizes, exchange.wire.num_ranks, weighted, exchange.device)

        def moved(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array).to(exchange.device)

        replicated = moved(route.replicated)
        return DeviceRoute(
            sizes=sizes,
            message_size=route.message.shape[1],
            constants=self._constants[key],
            index=moved(route.index),
            offsets=moved(route.offsets),
            weights=moved(route.weights),
            lines=moved(route.lines),
            line_offsets=moved(route.line_offsets),
            line_weights=moved(route.line_weights),
            replicated=replicated,
            replicated_targets=torch.where(replicated < 0, stack.num_replicated, replicated),
            bag_scales=moved(route.bag_scales),
            local_scales=moved(route.local_scales),
        )

    def _count(self, host: HostBatch, routings: Sequence[StackRouting], sizes: Sequence[Sizes], ranks: int) -> None:
        stats = self.stats
        stats.batches += 1
        stats._programs.add((tuple(sizes), self._padded_size, tuple(self._areas), host.num_examples))
        for router, routing, size in zip(self._routers, routings, sizes, strict=True):
            unique, ids = routing.num_unique
            stats.unique_rows += unique
            stats.ids += ids
            message = ranks * router.message_size(size, self._padded_size)
            lines = ranks * (size.rows + router.stack.num_answers * self._padded_size)
            used_message, used_lines = routing.used(host.num_examples)
            stats.message_elements += message
            stats.vector_elements += lines * router.stack.width
            stats.padding_elements += message - used_message + (lines - used_lines) * router.stack.width


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()  # torch cannot mark a tensor read-only, and warns
