"""`shard`: put a model's fused tables where a plan says, over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table

from tpurec.embeddings.fuse import fused_collections
from tpurec.embeddings.fused import FusedEmbeddingBagCollection
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.errors import ConfigError
from tpurec.sharding.exchange import Exchange
from tpurec.sharding.initial_values import load_initial_values
from tpurec.sharding.pieces import TensorPiece, piece_of_shard, pieces_of
from tpurec.sharding.placement import Place, make_stacks, tables_of
from tpurec.sharding.plan import Plan
from tpurec.sharding.routed import RoutedBatch, RoutedFeatures
from tpurec.sharding.storage import StackStorage
from tpurec.sharding.wire import Wire


class ShardedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """What `shard` puts in the place of a fused collection: the same output, from tables that are spread over ranks.

    The tables are no parameters and are not in its `state_dict`: `weight_pieces` and `state_pieces` give what this rank
    holds, under the unsharded model's names.

    Args:
        fused: the collection that it replaces; its tables may be on `meta`.
        exchange: of the whole model.
        number: of this collection among the model's.
    """

    def __init__(self, fused: FusedEmbeddingBagCollection, exchange: Exchange, number: int) -> None:
        super().__init__()
        self._tables = fused.embedding_bag_configs()
        self._is_weighted = fused.is_weighted()
        self._optimizer = fused.optimizer
        self._exchange, self._number = exchange, number
        self._embedding_names = [name for names in get_embedding_names_by_table(self._tables) for name in names]
        self._length_per_key = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        self.feature_names = list(dict.fromkeys(name for table in self._tables for name in table.feature_names))
        self._inline_router: Any = None
        self.train(fused.training)

    def forward(self, features: RoutedFeatures | RoutedBatch | KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool a batch; every rank must call it, at the same point of its program.

        Args:
            features: `RoutedBatch.features` of `BatchRouter.prepare`. A KeyedJaggedTensor is accepted, too: it is then
                routed here, for which the device waits; its keys must hold this collection's features.

        Returns:
            As of the unsharded collection: `[batch_size, sum of dims]`.

        Raises:
            DataError: a KeyedJaggedTensor that does not fit, or an id that is not a row.
        """
        if isinstance(features, RoutedBatch):
            features = features.features
        if isinstance(features, KeyedJaggedTensor):
            features = self._route(features)
        if self._number not in features.outputs:
            features.outputs.update(enumerate(self._exchange.lookup(features)))
        values = features.outputs.pop(self._number)
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._length_per_key, values=values)

    def _route(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        if self._inline_router is None:
            raise ConfigError("this sharded collection is not part of a model that `shard` returned.")
        return self._inline_router().route(features, 0, [self._number])[0]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """TorchRec's accessor.

        Returns:
            The tables' configurations.
        """
        return self._tables

    def is_weighted(self) -> bool:
        """TorchRec's accessor.

        Returns:
            Whether batches carry weights.
        """
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._exchange.device

    @property
    def optimizer(self) -> EmbeddingOptimizer:
        """The optimizer's specification; its `lr` is the one at construction, see `learning_rate`."""
        return self._optimizer

    @property
    def exchange(self) -> Exchange:
        """The exchange of the whole model."""
        return self._exchange

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return float(self._exchange.learning_rates[self._number])

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of the following steps.

        Args:
            lr: finite and >= 0.

        Raises:
            ConfigError: a value that is not.
        """
        if not 0 <= lr < float("inf"):
            raise ConfigError(f"learning rate {lr!r} must be a finite number >= 0.")
        self._exchange.learning_rates[self._number].fill_(lr)

    def update_trigger(self) -> Tensor:
        """The tensor whose gradient one has to ask of `torch.autograd.grad` so that the tables are updated.

        Returns:
            A scalar; its gradient is always None.
        """
        return self._exchange.hook

    def weight_pieces(self) -> list[TensorPiece]:
        """This rank's weights.

        Returns:
            Pieces named `embedding_bags.NAME.weight`, views; at least one for every table.
        """
        found = []
        for storage, place, config in self._places():
            name, shape = f"embedding_bags.{config.name}.weight", (config.num_embeddings, config.embedding_dim)
            tensor = storage.weight(place, self._rank, config.num_embeddings)
            found.append(piece_of_shard(name, place.shard, self._rank, shape, tensor))
        return found

    def state_pieces(self) -> list[TensorPiece]:
        """This rank's optimizer state.

        Returns:
            Pieces named `embedding_bags.NAME.STATE`, such as `sum`, views; at least one of each for every table, none
            for SGD. The number of updates, `step`, is whole on every rank.
        """
        found = []
        for storage, place, config in self._places():
            shape = (config.num_embeddings, config.embedding_dim)
            for state, tensor in storage.states(place, self._rank, config.num_embeddings).items():
                name = f"embedding_bags.{config.name}.{state}"
                if tensor.dim():
                    found.append(piece_of_shard(name, place.shard, self._rank, shape[: tensor.dim()], tensor))
                elif place.shard.columns[0] == 0:
                    writes = self._rank == place.shard.ranks[0]
                    found.append(TensorPiece(name, (), 0, 1, None, tensor, writes))
        return found

    @property
    def _rank(self) -> int:
        return self._exchange.wire.rank

    def _places(self) -> Iterator[tuple[StackStorage, Place, EmbeddingBagConfig]]:
        exchange = self._exchange
        for stack, storage in zip(exchange.stacks, exchange.storages, strict=True):
            if stack.collection == self._number:
                for place in stack.places:
                    yield storage, place, exchange.tables[place.table].config

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbeddingBagCollection:
        probe = fn(torch.empty(0, device=self.device))
        if probe.device != self.device or probe.dtype != torch.float32:
            raise ConfigError(
                f"sharded tables on {self.device} cannot be moved or converted.", "Give `shard` the device and dtype."
            )
        return self


def shard(
    model: nn.Module,
    plan: Plan,
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    wire_dtype: torch.dtype = torch.float32,
    host_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Replace every fused collection of a model by a sharded one; every rank must call it.

    The tables keep their values and optimizer state. A collection whose tables are on `meta` (build the model inside
    `tpurec.embeddings.deferred_tables`) gets the values that the unsharded model would have, without any
    rank ever holding a whole table. At world size 1 the fused collections stay, so that results are the same to the
    bit.

    Args:
        model: with fused collections; changed in place, and the same on every rank.
        plan: for as many ranks as the group has.
        process_group: None for the default one. Rank r of the group is rank r of the plan.
        device: of the tables; by default where the model's are, or the CPU for tables on `meta`.
        wire_dtype: of vectors and gradients between ranks: float32, or bfloat16 (half the bytes; each is rounded to 8
            bits once, see `docs/sharded_training.md`). Tables of float64 send float64.
        host_group: for KeyedJaggedTensors that the model is given directly; None makes one when it is needed.

    Returns:
        The model; or the sharded collection, if `model` is itself a collection.

    Raises:
        ConfigError: no fused collection, a plan for another number of ranks or other tables, or another wire_dtype.

    Example:
        >>> model = shard(fuse(model, RowWiseAdagrad(lr=0.1)), Plan.load("plan.json"))
        >>> router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    """
    fused = list(fused_collections(model))
    for path, collection in fused:
        if not isinstance(collection, FusedEmbeddingBagCollection):
            raise ConfigError(
                f"{path or type(collection).__name__}: sequence collections are not sharded.",
                "Train the model with one worker, or pool the feature.",
            )
    if not fused:
        raise ConfigError(f"{type(model).__name__} contains no FusedEmbeddingBagCollection to shard.", "Fuse it first.")
    if wire_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"wire_dtype = {wire_dtype}.", "Use torch.float32 or torch.bfloat16.")
    num_ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if plan.topology.num_ranks != num_ranks:
        raise ConfigError(
            f"the plan is for {plan.topology.num_ranks} ranks ({plan.slice}), the process group has {num_ranks}.",
            f"Plan for {num_ranks} ranks, or start {plan.topology.num_ranks} processes.",
        )
    collections = [collection for _, collection in fused]
    tables = tables_of(plan, [_described(collection) for collection in collections])
    given = collections[0].device
    device = torch.device(device or ("cpu" if given.type == "meta" else given))
    if num_ranks == 1:
        for collection in collections:
            load_initial_values(collection, device)
        return model
    stacks = make_stacks(tables, [collection.optimizer for collection in collections], num_ranks)
    widths = [
        sum(table.embedding_dim * len(table.feature_names) for table in collection.embedding_bag_configs())
        for collection in collections
    ]
    exchange = Exchange(tables, stacks, widths, Wire(process_group), device, wire_dtype)
    sharded: dict[int, ShardedEmbeddingBagCollection] = {}
    for number, collection in enumerate(collections):
        replacement = ShardedEmbeddingBagCollection(collection, exchange, number)
        replacement.set_learning_rate(collection.learning_rate if given.type != "meta" else collection.optimizer.lr)
        load_initial_values(collection, device, replacement)
        sharded[id(collection)] = replacement
    result = _replaced(model, sharded)
    _give_router(result, host_group)
    return result


def _described(
    collection: FusedEmbeddingBagCollection,
) -> tuple[list[EmbeddingBagConfig], list[torch.dtype], list[bool]]:
    configs = collection.embedding_bag_configs()
    weights = [collection.embedding_bags[config.name].weight for config in configs]
    return configs, [weight.dtype for weight in weights], [not weight.requires_grad for weight in weights]


def _replaced(model: nn.Module, sharded: dict[int, ShardedEmbeddingBagCollection]) -> nn.Module:
    if id(model) in sharded:
        return sharded[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in sharded:
                setattr(parent, name, sharded[id(child)])
    return model


def _give_router(model: nn.Module, host_group: dist.ProcessGroup | None) -> None:
    """Let the collections share a router for KeyedJaggedTensors, which is made when the first one comes."""
    from tpurec.sharding.batch_router import BatchRouter

    made: list[BatchRouter] = []
    collections = sharded_collections(model)

    def router() -> BatchRouter:
        if not made:
            made.append(BatchRouter.of_collections(collections, host_group))
        return made[0]

    for collection in collections:
        collection._inline_router = router


def sharded_collections(model: nn.Module) -> list[ShardedEmbeddingBagCollection]:
    """The sharded collections of a model.

    Args:
        model: any module.

    Returns:
        Each once, in the order of their numbers.
    """
    found = [module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    return sorted(found, key=lambda collection: collection._number)


def exchange_of(model: nn.Module) -> Exchange | None:
    """The exchange of a model.

    Args:
        model: of `shard`.

    Returns:
        It; None at world size 1, where nothing is exchanged.

    Raises:
        ConfigError: the model has no tables that `shard` has seen.
    """
    collections = sharded_collections(model)
    if collections:
        return collections[0].exchange
    if next(fused_collections(model), None) is None:
        raise ConfigError(f"{type(model).__name__} has no sharded collection.", "Call shard first.")
    return None


def exchange_stats(model: nn.Module) -> dict[str, Any]:
    """Count what the collectives of a model carried, measured where they are called.

    Args:
        model: of `shard`.

    Returns:
        steps; exchange_bytes_per_step, the mean that left this rank; bytes_per_step and collectives_per_kind by kind;
        collectives_per_step.
    """
    exchange = exchange_of(model)
    counts = None if exchange is None else exchange.wire.counts
    steps = counts.steps if counts else 0
    per_step = max(steps, 1)
    bytes_by_kind = {kind: size / per_step for kind, size in counts.bytes.items()} if counts else {}
    calls = {kind: number / per_step for kind, number in counts.collectives.items()} if counts else {}
    return {
        "steps": steps,
        "exchange_bytes_per_step": sum(bytes_by_kind.values()),
        "bytes_per_step": bytes_by_kind,
        "collectives_per_kind": calls,
        "collectives_per_step": sum(calls.values()),
    }


def checkpoint_pieces(model: nn.Module) -> list[TensorPiece]:
    """What this rank holds of a model's tables and their optimizer state, as views.

    Args:
        model: of `shard`, or unsharded.

    Returns:
        Pieces under the unsharded model's names: `model.PATH.embedding_bags.NAME.weight` and
        `optimizer.PATH.embedding_bags.NAME.sum`.
    """
    return pieces_of(model, "model.", "optimizer.")
