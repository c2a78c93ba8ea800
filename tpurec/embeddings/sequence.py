"""`FusedEmbeddingCollection`: TorchRec's unpooled collection, with the optimizer in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface, get_embedding_names_by_table

from tpurec.embeddings import jagged
from tpurec.embeddings.device_checks import DeviceChecks
from tpurec.embeddings.fused import FusedEmbeddingBagCollection
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.embeddings.stack import TableStack
from tpurec.errors import ConfigError, DataError
from tpurec.ops import embedding_update_, sequence_gather

_BAGS, _SEQUENCES = "embedding_bags.", "embeddings."  # TorchRec's names of the two kinds' tables


class FusedEmbeddingCollection(EmbeddingCollectionInterface):
    """A TorchRec `EmbeddingCollection` that updates the rows it read when the backward pass runs.

    Tables lie, and are trained, as those of `FusedEmbeddingBagCollection`; the names in `state_dict` are TorchRec's
    (`embeddings.NAME.weight`).

    Args:
        tables: TorchRec's configurations; a feature may read several tables and a table may serve several features.
        optimizer: of `tpurec.embeddings`.
        device: where the tables are; CPU by default.
        need_indices: put the ids into the output, as the weights of its JaggedTensors (TorchRec's place for them).
        optimizer_type: with `optimizer_kwargs`, TorchRec's form in place of `optimizer`.
        optimizer_kwargs: such as `{"lr": 0.1}`.

    Raises:
        ConfigError: no or duplicate tables, tables of different dims (as in TorchRec), or an optimizer or data type
            that cannot be fused.

    Example:
        >>> tables = [EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=100, feature_names=["clicks"])]
        >>> collection = FusedEmbeddingCollection(tables, Adam(lr=0.01))
        >>> clicks = KeyedJaggedTensor(["clicks"], torch.tensor([3, 5, 7]), lengths=torch.tensor([2, 1]))
        >>> collection(clicks)["clicks"].to_padded_dense(2).shape
        torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer: EmbeddingOptimizer | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer_type: type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for table in tables:
            if table.embedding_dim != tables[0].embedding_dim:
                raise ConfigError(
                    f"FusedEmbeddingCollection: table {table.name!r} has embedding_dim {table.embedding_dim}, "
                    f"{tables[0].name!r} has {tables[0].embedding_dim}.",
                    "Make a collection for each dim.",
                )
            if not table.feature_names:  # TorchRec's rule
                table.feature_names = [table.name]
        self._tables = tables
        self._need_indices = need_indices
        bags = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=table.feature_names,
                data_type=table.data_type,
                init_fn=table.init_fn,
                pooling=PoolingType.SUM,
            )
            for table in tables
        ]
        # It holds the tables. In a tuple, because it must be no submodule: its tables are found under `embeddings`.
        self._bags = (
            FusedEmbeddingBagCollection(
                bags, optimizer, False, device, optimizer_type=optimizer_type, optimizer_kwargs=optimizer_kwargs
            ),
        )
        self._names_by_table = get_embedding_names_by_table(tables)
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self.embeddings: nn.ModuleDict = self._bags[0].embedding_bags

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a batch.

        Args:
            features: values int32 or int64, feature-major; weights are not used. Keys may be more than the collection
                reads, in any order. Id -1 gives zeros. Elsewhere than on the CPU, a batch without `offset_per_key`
                costs one transfer of the lengths to the host, as in TorchRec.

        Returns:
            For each feature (`FEATURE@TABLE` if it reads several tables) a JaggedTensor: values float
            `[num_ids, embedding_dim]`, lengths those of the batch. Of a batch with unused capacity on a device the
            values have that capacity, zeros behind the last id.

        Raises:
            DataError: parts that do not fit together, or an id that is not a row.
        """
        bags = self._bags[0]
        jagged.check_sizes(features, bags.feature_names, features.weights_or_none() is not None)
        on_host = features.values().device.type == "cpu" and not torch.compiler.is_compiling()
        starts = features.offset_per_key_or_none()
        if starts is None:  # of no examples given by offsets TorchRec cannot tell where keys begin
            starts = features.offset_per_key() if features.stride() else [0] * (len(features.keys()) + 1)
        lengths = features.lengths().view(len(features.keys()), -1)
        used = lengths.sum(1).tolist() if on_host else [after - before for before, after in pairwise(starts)]
        found: dict[str, JaggedTensor] = {}
        for number, stack in enumerate(bags.stacks):
            ids = jagged.stack_ids(features, stack)
            checks = bags.device_checks
            if checks is not None:
                checks.check_features(features, stack, number)
            frozen = bags.frozen_tables(stack)
            trigger = bags.update_trigger() if len(frozen) < len(stack.tables) else bags.update_trigger().detach()
            vectors = _SequenceLookup.apply(trigger, stack, ids.rows, bags.learning_rate_tensor, frozen, checks)
            keys = [features.keys().index(name) for name in stack.feature_names]
            places = accumulate((used[key] for key in keys), initial=0)
            for feature, key, (first, last) in zip(stack.features, keys, pairwise(places), strict=True):
                values = features.values()[starts[key] : starts[key] + used[key]] if self._need_indices else None
                found[self._embedding_names[feature.output]] = JaggedTensor(
                    values=vectors[first:last], lengths=lengths[key], weights=values
                )
        return {name: found[name] for name in self._embedding_names}

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
        return self._names_by_table

    @property
    def bag_collection(self) -> FusedEmbeddingBagCollection:
        """What holds the tables: a pooled collection of the same tables, which is no submodule."""
        return self._bags[0]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._bags[0].device

    @property
    def optimizer(self) -> EmbeddingOptimizer:
        """The optimizer's specification; its `lr` is the one at construction, see `learning_rate`."""
        return self._bags[0].optimizer

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return self._bags[0].learning_rate

    @property
    def device_checks(self) -> DeviceChecks | None:
        """What `check_on_device` puts here; ids and lengths are looked at, vectors are not."""
        return self._bags[0].device_checks

    @device_checks.setter
    def device_checks(self, checks: DeviceChecks | None) -> None:
        self._bags[0].device_checks = checks

    def stack(self, number: int) -> TableStack:
        """As of `FusedEmbeddingBagCollection`."""
        return self._bags[0].stack(number)

    def set_learning_rate(self, lr: float) -> None:
        """As of `FusedEmbeddingBagCollection`."""
        self._bags[0].set_learning_rate(lr)

    def reset_parameters(self) -> None:
        """As of `FusedEmbeddingBagCollection`."""
        self._bags[0].reset_parameters()

    def update_trigger(self) -> Tensor:
        """As of `FusedEmbeddingBagCollection`."""
        return self._bags[0].update_trigger()

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """As of `FusedEmbeddingBagCollection`, under `embeddings.NAME.STATE`."""
        state = self._bags[0].optimizer_state_dict()
        return {_SEQUENCES + key.removeprefix(_BAGS): tensor for key, tensor in state.items()}

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As of `FusedEmbeddingBagCollection`.

        Args:
            state: exactly the keys of `optimizer_state_dict`.

        Raises:
            DataError: something does not fit.
        """
        own = self.optimizer_state_dict().keys()
        if own != state.keys():
            parts = {"missing": sorted(own - state.keys()), "extra": sorted(state.keys() - own)}
            found = "; ".join(f"{what} {names}" for what, names in parts.items() if names)
            raise DataError(f"optimizer state: {found}.")
        self._bags[0].load_optimizer_state_dict(
            {_BAGS + key.removeprefix(_SEQUENCES): tensor for key, tensor in state.items()}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedEmbeddingCollection:
        # The holder of the tables first: it ties the copied weights to the copied storage.
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        bags = copy.deepcopy(self._bags, memo)
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        assert result._bags[0] is bags[0]
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedEmbeddingCollection:
        self._bags[0]._apply(fn, recurse)
        return self


class _SequenceLookup(torch.autograd.Function):
    """As `tpurec.embeddings.lookup`'s, with a bag per id in the update."""

    @staticmethod
    def forward(
        ctx,
        hook: Tensor,
        stack: TableStack,
        rows: Tensor,
        lr: Tensor,
        frozen: Sequence[int],
        checks: DeviceChecks | None,
    ) -> Tensor:
        ctx.stack, ctx.rows, ctx.lr, ctx.frozen, ctx.checks = stack, rows, lr, frozen, checks
        return sequence_gather(stack.parts, rows, stack.num_rows, stack.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        stack, rows, optimizer = ctx.stack, ctx.rows, ctx.stack.optimizer
        for table in ctx.frozen:
            first, last = stack.row_starts[table], stack.row_starts[table + 1]
            rows = torch.where((rows >= first) & (rows < last), -1, rows)
        if ctx.checks is not None:
            rows = ctx.checks.allowed(rows)
        embedding_update_(
            stack.parts,
            stack.state,
            grad.contiguous(),
            rows,
            torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device),
            None,
            ctx.lr,
            optimizer.kind,
            optimizer.eps,
            optimizer.weight_decay,
            "sum",
            [0],
            stack.num_rows,
            stack.dim,
            **optimizer.arguments(),
        )
        return None, None, None, None, None, None
