"""What `shard` puts in the place of fused collections: the same output, from tables that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

from tpurec.embeddings.fuse import FusedCollection
from tpurec.embeddings.fused import FusedEmbeddingBagCollection
from tpurec.embeddings.optimizers import EmbeddingOptimizer, check_learning_rate
from tpurec.embeddings.sequence import FusedEmbeddingCollection
from tpurec.errors import ConfigError
from tpurec.sharding.exchange import Exchange
from tpurec.sharding.pieces import TensorPiece, pieces_of_shard
from tpurec.sharding.placement import Place
from tpurec.sharding.routed import RoutedBatch, RoutedFeatures
from tpurec.sharding.storage import StackStorage

Features = RoutedFeatures | RoutedBatch | KeyedJaggedTensor


class ShardedCollection(nn.Module):
    """What the sharded collections have in common.

    The tables are no parameters and are not in its `state_dict`: `weight_pieces` and `state_pieces` give what this rank
    holds, under the unsharded model's names.

    Args:
        fused: the collection that it replaces; its tables may be on `meta`.
        tables: its configurations.
        exchange: of the whole model.
        number: of this collection among the model's.
    """

    tables_name: str  # TorchRec's, in names of the unsharded model's state_dict

    def __init__(
        self,
        fused: FusedCollection,
        tables: list[EmbeddingBagConfig] | list[EmbeddingConfig],
        exchange: Exchange,
        number: int,
    ) -> None:
        super().__init__()
        self._tables = tables
        self._optimizer = fused.optimizer
        self._exchange, self._number = exchange, number
        self._embedding_names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self.feature_names = list(dict.fromkeys(name for table in tables for name in table.feature_names))
        self._inline_router: Any = None
        self.train(fused.training)

    @property
    def number(self) -> int:
        """Of this collection among the model's."""
        return self._number

    @property
    def tables(self) -> list[EmbeddingBagConfig] | list[EmbeddingConfig]:
        """The tables' configurations."""
        return self._tables

    def is_weighted(self) -> bool:
        """As of TorchRec's pooled collections.

        Returns:
            Whether batches carry weights.
        """
        return False

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
        check_learning_rate(lr)
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
            Pieces named `embedding_bags.NAME.weight` (of sequences `embeddings.NAME.weight`), views; at least one for
            every table.
        """
        found = []
        for storage, place, config in self._places():
            name, shape = f"{self.tables_name}.{config.name}.weight", (config.num_embeddings, config.embedding_dim)
            tensors = storage.weight(place, self._rank, config.num_embeddings)
            found += pieces_of_shard(name, place.shard, self._rank, shape, tensors)
        return found

    def state_pieces(self) -> list[TensorPiece]:
        """This rank's optimizer state.

        Returns:
            Pieces named as the weights with the state, such as `sum`, in the end, views; at least one of each for every
            table, none for SGD. The number of updates, `step`, is whole on every rank.
        """
        found = []
        for storage, place, config in self._places():
            shape = (config.num_embeddings, config.embedding_dim)
            for state, tensors in storage.states(place, self._rank, config.num_embeddings).items():
                name, dims = f"{self.tables_name}.{config.name}.{state}", tensors[0].dim()
                if dims:
                    found += pieces_of_shard(name, place.shard, self._rank, shape[:dims], tensors)
                else:  # columns of another width are in a storage with a counter of its own, which is loaded, too
                    writes = place.shard.columns[0] == 0 and self._rank == place.shard.ranks[0]
                    found.append(TensorPiece(name, (), 0, 1, None, self._counter(place, tensors[0]), writes))
        return found

    def _counter(self, place: Place, own: Tensor) -> Tensor:
        """The number of updates of a place's table.

        A frozen table is in a storage that takes no step. Unsharded it shares one, and its counter, with the tables of
        its dim, dtype and pooling: so it does in checkpoints, which must be the same.
        """
        table = self._exchange.tables[place.table]
        for storage, other, config in self._places() if table.frozen else ():
            mate = self._exchange.tables[other.table]
            ours, theirs = ((one.config.embedding_dim, one.dtype, one.config.pooling) for one in (table, mate))
            if not mate.frozen and ours == theirs:
                (counter,) = storage.states(other, self._rank, config.num_embeddings)["step"]
                return counter
        return own

    def give_router(self, router: Callable[[], Any]) -> None:
        """Let the collection route KeyedJaggedTensors that it is given.

        Args:
            router: gives the `BatchRouter` of the model's collections.
        """
        self._inline_router = router

    def _routed(self, features: Features) -> RoutedFeatures:
        if isinstance(features, RoutedBatch):
            features = features.features
        if isinstance(features, RoutedFeatures):
            return features
        if self._inline_router is None:
            raise ConfigError("this sharded collection is not part of a model that `shard` returned.")
        return self._inline_router().route(features, 0, [self._number])[0]

    def _output(self, features: RoutedFeatures) -> Tensor:
        if self._number not in features.outputs:
            features.outputs.update(enumerate(self._exchange.lookup(features)))
        return features.outputs.pop(self._number)

    @property
    def _rank(self) -> int:
        return self._exchange.wire.rank

    def _places(self) -> Iterator[tuple[StackStorage, Place, EmbeddingBagConfig]]:
        exchange = self._exchange
        for stack, storage in zip(exchange.stacks, exchange.storages, strict=True):
            if stack.collection == self._number:
                for place in stack.places:
                    yield storage, place, exchange.tables[place.table].config

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedCollection:
        probe = fn(torch.empty(0, device=self.device))
        if probe.device != self.device or probe.dtype != torch.float32:
            raise ConfigError(
                f"sharded tables on {self.device} cannot be moved or converted.", "Give `shard` the device and dtype."
            )
        return self


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollectionInterface):
    """In the place of a `FusedEmbeddingBagCollection`; see `ShardedCollection`."""

    tables_name = "embedding_bags"

    def __init__(self, fused: FusedEmbeddingBagCollection, exchange: Exchange, number: int) -> None:
        super().__init__(fused, fused.embedding_bag_configs(), exchange, number)
        self._is_weighted = fused.is_weighted()
        self._length_per_key = [table.embedding_dim for table in self._tables for _ in table.feature_names]

    def forward(self, features: Features) -> KeyedTensor:
        """Look up and pool a batch; every rank must call it, at the same point of its program.

        Args:
            features: `RoutedBatch.features` of `BatchRouter.prepare`. A KeyedJaggedTensor is accepted, too: it is then
                routed here, for which the device waits; its keys must hold this collection's features.

        Returns:
            As of the unsharded collection: `[batch_size, sum of dims]`.

        Raises:
            DataError: a KeyedJaggedTensor that does not fit, or an id that is not a row.
        """
        values = self._output(self._routed(features))
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._length_per_key, values=values)

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


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollectionInterface):
    """In the place of a `FusedEmbeddingCollection`; see `ShardedCollection`."""

    tables_name = "embeddings"

    def __init__(self, fused: FusedEmbeddingCollection, exchange: Exchange, number: int) -> None:
        super().__init__(fused, fused.embedding_configs(), exchange, number)
        self._need_indices = fused.need_indices()

    def forward(self, features: Features) -> dict[str, JaggedTensor]:
        """Look up a batch; every rank must call it, at the same point of its program.

        Args:
            features: as of `ShardedEmbeddingBagCollection`; weights are not used, and id -1 gives zeros.

        Returns:
            As of the unsharded collection: for each feature (`FEATURE@TABLE` if it reads several tables) a JaggedTensor
            with values `[num_ids, embedding_dim]` and int32 lengths. Elsewhere than on the CPU the values have the
            places that the ranks agreed on, zeros behind the last id.

        Raises:
            DataError: as of `ShardedEmbeddingBagCollection`.
        """
        routed = self._routed(features)
        ids, found = routed.sequences[self._number], {}
        vectors = self._output(routed).split_with_sizes(list(ids.capacities))
        indices = [None] * len(vectors) if ids.ids is None else ids.ids.split_with_sizes(list(ids.capacities))
        on_host = self.device.type == "cpu"
        for number, name in enumerate(self._embedding_names):
            places = ids.counts[number] if on_host else ids.capacities[number]
            index = indices[number]
            found[name] = JaggedTensor(
                values=vectors[number][:places],
                lengths=ids.lengths[number],
                weights=None if index is None else index[:places],
            )
        return found

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """TorchRec's accessor: the tables' configurations."""
        return self._tables

    def need_indices(self) -> bool:
        """TorchRec's accessor: whether the ids are in the output."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """TorchRec's accessor: columns of the tables."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """TorchRec's accessor: names in the output, by table."""
        return get_embedding_names_by_table(self._tables)
