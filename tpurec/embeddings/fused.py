"""`FusedEmbeddingBagCollection`: TorchRec's interface, with the optimizer in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table

from tpurec.embeddings import jagged
from tpurec.embeddings.deferred import are_tables_deferred, initial_blocks
from tpurec.embeddings.device_checks import DeviceChecks
from tpurec.embeddings.lookup import fused_lookup
from tpurec.embeddings.optimizers import EmbeddingOptimizer, check_learning_rate, from_torchrec
from tpurec.embeddings.stack import StackedFeature, TableStack, dtype_of, pooling_of
from tpurec.errors import ConfigError, DataError
from tpurec.kernels.limits import MAX_TENSOR_BYTES


class FusedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """A TorchRec `EmbeddingBagCollection` that updates the rows it read when the backward pass runs.

    No gradient as large as a table exists, and rows that a batch does not touch stay as they are, to the bit. The
    weights are in `state_dict` under TorchRec's names (`embedding_bags.NAME.weight`); they are views of one storage per
    dim, dtype and pooling. A table whose weight has `requires_grad=False` is frozen.

    Args:
        tables: TorchRec's configurations; a feature may read several tables and a table may serve several features.
        optimizer: `SGD`, `Adagrad`, `RowWiseAdagrad`, `Adam` or `RowWiseAdam` of `tpurec.embeddings`.
        is_weighted: whether batches carry one weight per id.
        device: where the tables are; CPU by default.
        optimizer_type: with `optimizer_kwargs`, TorchRec's form in place of `optimizer`:
            see `tpurec.embeddings.optimizers.from_torchrec`.
        optimizer_kwargs: such as `{"lr": 0.1, "eps": 1e-8}`.

    Raises:
        ConfigError: no or duplicate tables, an optimizer, data type or pooling that cannot be fused.

    Example:
        >>> tables = [EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=100, feature_names=["f"])]
        >>> collection = FusedEmbeddingBagCollection(tables, RowWiseAdagrad(lr=0.1))
        >>> out = collection(KeyedJaggedTensor(["f"], torch.tensor([3, 5, 7]), lengths=torch.tensor([2, 1])))
        >>> out.values().sum().backward()  # rows 3, 5 and 7 have moved
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer: EmbeddingOptimizer | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer_type: type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if (optimizer is None) == (optimizer_type is None):
            raise ConfigError("FusedEmbeddingBagCollection: give either optimizer or optimizer_type.")
        if optimizer is None:
            optimizer = from_torchrec(optimizer_type, optimizer_kwargs or {})
        if not isinstance(optimizer, EmbeddingOptimizer):
            raise ConfigError(
                f"FusedEmbeddingBagCollection: optimizer = {optimizer!r} is not a fused optimizer.",
                "Use an optimizer of tpurec.embeddings, such as RowWiseAdagrad; TorchRec's form takes optimizer_type= "
                "and optimizer_kwargs= by keyword.",
            )
        _check_tables(tables)
        self._tables = tables
        self._is_weighted = is_weighted
        self._optimizer = optimizer
        device = torch.device(device or "cpu")
        # Tables of a TPU are initialised on the CPU: the same seed gives the same tables everywhere.
        built_on = torch.device("cpu") if device.type == "tpu" else device
        self.initial_random_state: Tensor | None = None
        if are_tables_deferred():
            device = built_on = torch.device("meta")
            self.initial_random_state = torch.get_rng_state()
        self._learning_rate = torch.tensor(float(optimizer.lr), dtype=torch.float32, device=built_on)
        self.device_checks: DeviceChecks | None = None
        # What makes autograd run the backward pass. A weight would do, but it is a view of its storage: both would be
        # inputs of a compiled step, which torch then hands over as one flat tensor, and that is not donated.
        self._trigger = torch.zeros((), device=built_on, requires_grad=True)
        self._stacks = _build_stacks(tables, optimizer, built_on)
        self._embedding_names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._length_per_key = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._feature_names = list(dict.fromkeys(name for table in tables for name in table.feature_names))
        self._columns = _output_columns(self._stacks, self._length_per_key)
        self.embedding_bags = nn.ModuleDict({table.name: nn.Module() for table in tables})
        self._tie_weights()
        self.reset_parameters()
        if device != built_on:
            self.to(device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool a batch.

        Args:
            features: values int32 or int64, feature-major; lengths or offsets `[num_keys * batch_size (+ 1)]`, int32
                or int64; weights float32 exactly if the collection is weighted. Keys may be more than the collection
                reads, in any order. Id -1 is skipped.

        Returns:
            One group of `embedding_dim` float columns per feature and table, in TorchRec's order and names:
            `[batch_size, sum of dims]`.

        Raises:
            DataError: parts that do not fit together, or an id that is not a row.
        """
        jagged.check_sizes(features, self._feature_names, self._is_weighted)
        outputs = []
        for number, stack in enumerate(self._stacks):
            ids = jagged.stack_ids(features, stack)
            if self.device_checks is not None:
                self.device_checks.check_features(features, stack, number)
            frozen = self.frozen_tables(stack)
            trigger = self._trigger if len(frozen) < len(stack.tables) else self._trigger.detach()
            checks = None if self.device_checks is None else (self.device_checks, number)
            outputs.append(fused_lookup(stack, ids, trigger, self._learning_rate, frozen, checks))
        return KeyedTensor(
            keys=self._embedding_names, length_per_key=self._length_per_key, values=self._arrange(outputs)
        )

    @property
    def stacks(self) -> tuple[TableStack, ...]:
        """The storages that the tables lie in."""
        return tuple(self._stacks)

    @property
    def feature_names(self) -> list[str]:
        """Keys that a batch must have, each once."""
        return self._feature_names

    @property
    def learning_rate_tensor(self) -> Tensor:
        """The current learning rate as the ops take it, float32 `[]`."""
        return self._learning_rate

    def frozen_tables(self, stack: TableStack) -> list[int]:
        """The tables of a storage that are not to change.

        Args:
            stack: one of `stacks`.

        Returns:
            Their numbers within it.
        """
        return [
            place
            for place, table in enumerate(stack.tables)
            if not self.embedding_bags[table.name].weight.requires_grad
        ]

    def stack(self, number: int) -> TableStack:
        """One of the storages that the tables lie in.

        Args:
            number: from 0; tables of one dim, dtype and pooling share a storage.

        Returns:
            The storage.
        """
        return self._stacks[number]

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
        return self._stacks[0].device

    @property
    def optimizer(self) -> EmbeddingOptimizer:
        """The optimizer's specification; its `lr` is the one at construction, see `learning_rate`."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return float(self._learning_rate)

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of the following steps; nothing is recompiled.

        Args:
            lr: finite and >= 0.

        Raises:
            ConfigError: a value that is not.
        """
        check_learning_rate(lr)
        self._learning_rate.fill_(lr)

    def reset_parameters(self) -> None:
        """Initialise the tables with their `init_fn` and the accumulators with their initial value."""
        if self.initial_random_state is not None:
            for _ in initial_blocks(self.tables_in_stack_order()):
                pass  # what is built next is to find the random state as ever
        for stack in self._stacks:
            if stack.device.type == "meta":
                continue
            with torch.no_grad():
                for number, table in enumerate(stack.tables):
                    table.init_fn(stack.table_weight(number))
                stack.reset_state()

    def reset_state(self) -> None:
        """Set every accumulator to its initial value, and the learning rate to the optimizer's."""
        for stack in self._stacks:
            stack.reset_state()
        self._learning_rate.fill_(float(self._optimizer.lr))

    def tables_in_stack_order(self) -> list[EmbeddingBagConfig]:
        """The tables in the order in which they are initialised.

        Returns:
            Their configurations.
        """
        return [table for stack in self._stacks for table in stack.tables]

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The optimizer state by table, as plain tensors (no pickle needed); the learning rate is not part of it.

        Returns:
            `embedding_bags.NAME.STATE`, where STATE is one of `optimizer.state_names`, such as `sum`: float32
            `[num_embeddings]` (row-wise) or `[num_embeddings, embedding_dim]`, and `step`, int32 `[]`, the number of
            updates, of optimizers that count them; empty for SGD. The tensors are views: copy them if training goes on.
        """
        return {
            f"embedding_bags.{table.name}.{name}": tensor
            for stack in self._stacks
            for number, table in enumerate(stack.tables)
            for name, tensor in stack.table_states(number).items()
        }

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state_dict` gave; nothing changes if anything does not fit.

        Args:
            state: exactly the keys of `optimizer_state_dict`.

        Raises:
            DataError: naming the missing or extra key, the shape that does not fit, or tables of one stack that have
                made different numbers of updates.
        """
        own = self.optimizer_state_dict()
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        if missing or extra:
            parts = [f"missing {sorted(missing)}" if missing else "", f"extra {sorted(extra)}" if extra else ""]
            raise DataError(f"optimizer state: {'; '.join(part for part in parts if part)}.")
        for key, target in own.items():
            if state[key].shape != target.shape:
                raise DataError(
                    f"optimizer state {key!r}: shape {list(state[key].shape)}, {list(target.shape)} is expected."
                )
        for stack in self._stacks if self._optimizer.counts_steps else ():
            steps = {table.name: int(state[f"embedding_bags.{table.name}.step"]) for table in stack.tables}
            if len(set(steps.values())) > 1:
                raise DataError(f"optimizer state: tables of one stack have to agree in `step`; they have {steps}.")
        with torch.no_grad():
            for key, target in own.items():
                target.copy_(state[key])

    def update_trigger(self) -> Tensor:
        """The tensor whose gradient one has to ask of `torch.autograd.grad` so that the tables are updated.

        Returns:
            A scalar; its gradient is always None.
        """
        return self._trigger

    def _arrange(self, outputs: list[Tensor]) -> Tensor:
        if self._columns is None:
            return outputs[0]
        pieces = [outputs[stack].narrow(1, start, length) for stack, start, length in self._columns]
        return torch.cat(pieces, dim=1)

    def _tie_weights(self) -> None:
        for stack in self._stacks:
            for number, table in enumerate(stack.tables):
                view, bag = stack.table_weight(number), self.embedding_bags[table.name]
                old = bag._parameters.get("weight")
                if old is not None and torch._has_compatible_shallow_copy_type(old, view):
                    old.data = view  # keeps the identity of the parameter, as Module.to does
                else:
                    bag.weight = nn.Parameter(view, requires_grad=old is None or old.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedEmbeddingBagCollection:
        # Parameters copy themselves, which would cut the views off from their storage.
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for weight in self.parameters():
            memo[id(weight)] = nn.Parameter(weight.new_empty(0), requires_grad=weight.requires_grad)
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        result._tie_weights()
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedEmbeddingBagCollection:
        # Moving the parameters one by one would copy every view and cut it off from its storage.
        for stack in self._stacks:
            stack.apply(fn)
        self._trigger = fn(self._trigger.detach()).requires_grad_()
        if self.device_checks is not None:
            self.device_checks = DeviceChecks(self.device)
        moved = fn(self._learning_rate)
        self._learning_rate = self._learning_rate.to(moved.device) if moved.dtype != torch.float32 else moved
        self._tie_weights()
        return self


def _check_tables(tables: list[EmbeddingBagConfig]) -> None:
    if not tables:
        raise ConfigError("FusedEmbeddingBagCollection: no tables.")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ConfigError(f"FusedEmbeddingBagCollection: two tables are named {table.name!r}.")
        seen.add(table.name)
        if not table.feature_names:  # TorchRec's rule
            table.feature_names = [table.name]


def _build_stacks(
    tables: list[EmbeddingBagConfig], optimizer: EmbeddingOptimizer, device: torch.device
) -> list[TableStack]:
    groups: dict[tuple, list[EmbeddingBagConfig]] = {}
    features: dict[tuple, list[StackedFeature]] = {}
    output = 0
    for table in tables:
        kind = (table.embedding_dim, dtype_of(table), pooling_of(table))
        key = (*kind, _stack_number(table, [group for other, group in groups.items() if other[:3] == kind]))
        groups.setdefault(key, []).append(table)
        for name in table.feature_names:
            features.setdefault(key, []).append(StackedFeature(name, len(groups[key]) - 1, output))
            output += 1
    return [TableStack(groups[key], features[key], optimizer, device) for key in groups]


def _stack_number(table: EmbeddingBagConfig, stacks: list[list[EmbeddingBagConfig]]) -> int:
    """The stack of its kind that a table goes to: the last one, or a new one if that would get too large."""
    if not stacks:
        return 0
    num_rows = table.num_embeddings + sum(other.num_embeddings for other in stacks[-1])
    state_bytes = 4  # per value: Adagrad's accumulators are float32 whatever the table is
    # One tensor of a TPU takes no more; on other devices it costs nothing to keep to it, and a module can move.
    fits = num_rows * table.embedding_dim * state_bytes <= MAX_TENSOR_BYTES and num_rows < 2**31
    return len(stacks) - 1 if fits else len(stacks)


def _output_columns(stacks: list[TableStack], lengths: list[int]) -> list[tuple[int, int, int]] | None:
    """Stack, first column and number of columns of every output; None if the only stack's output is the output."""
    if len(stacks) == 1:
        return None
    columns: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
    for number, stack in enumerate(stacks):
        for place, feature in enumerate(stack.features):
            columns[feature.output] = (number, place * stack.dim, stack.dim)
    return columns
