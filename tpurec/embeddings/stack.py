"""Tables of one dim, dtype and pooling, stacked in one storage, with the state of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.types import DataType

from tpurec.embeddings.layout import Layout, OnePerRow, convert, layout_for
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.errors import ConfigError

_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
_POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


@dataclass(frozen=True)
class StackedFeature:
    """One feature's place in a stack.

    Args:
        name: key in the KeyedJaggedTensor.
        table: number of its table within the stack.
        output: number of its column group in the collection's output, in TorchRec's order.
    """

    name: str
    table: int
    output: int


class TableStack:
    """One storage for several tables of one dim, and the optimizer state beside it.

    Args:
        tables: configurations that agree in dim, data type and pooling; row 0 of a table follows the last row of the
            table before it.
        features: the features that read these tables, in the order in which they are looked up, grouped by table.
        optimizer: decides the shape of the state.
        device: where to allocate; `meta` allocates nothing. A TPU gets its tables from another device by `apply`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        features: Sequence[StackedFeature],
        optimizer: EmbeddingOptimizer,
        device: torch.device,
    ) -> None:
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.dim: int = tables[0].embedding_dim
        self.pooling: str = pooling_of(tables[0])
        self.optimizer = optimizer
        starts = [0]
        for table in tables:
            starts.append(starts[-1] + table.num_embeddings)
        self.row_starts = tuple(starts)
        self.num_rows = starts[-1]
        # What the ops and the jagged code ask for on every call.
        self.feature_names = [feature.name for feature in features]
        self.feature_tables = [feature.table for feature in features]
        self.feature_row_starts = [starts[feature.table] for feature in features]
        self.feature_num_rows = [tables[feature.table].num_embeddings for feature in features]

        self._layout = self._layout_on(device, dtype_of(tables[0]))
        self.parts: list[Tensor] = [self._layout.allocate(device)]
        self._state_layouts = self._state_layouts_on(device, torch.float32)
        # As the ops take it: the accumulators, then the number of updates if the optimizer counts them.
        self.state: list[Tensor] = [layout.allocate(device) for layout in self._state_layouts]
        if optimizer.counts_steps:
            self.state.append(torch.zeros((), dtype=torch.int32, device=device))

    def _layout_on(self, device: torch.device, dtype: torch.dtype) -> Layout:
        what = f"tables {', '.join(table.name for table in self.tables)}"
        return layout_for(device, self.num_rows, self.dim, dtype, what)

    def _state_layouts_on(self, device: torch.device, dtype: torch.dtype) -> list[Layout]:
        return [
            self._layout_on(device, dtype)
            if kind == "element"
            else OnePerRow(self.num_rows, dtype, packed=device.type == "tpu")
            for _, kind in self.optimizer.states
        ]

    @property
    def num_features(self) -> int:
        """How many features read this stack."""
        return len(self.features)

    @property
    def device(self) -> torch.device:
        """Where the stack is."""
        return self.parts[0].device

    def table_weight(self, table: int) -> Tensor:
        """A table's rows, as a view of the storage.

        Args:
            table: number within the stack.

        Returns:
            `[num_embeddings, embedding_dim]`.
        """
        return self._layout.rows(self.parts[0], self.row_starts[table], self.row_starts[table + 1])

    def table_states(self, table: int) -> dict[str, Tensor]:
        """A table's optimizer state, as views.

        Args:
            table: number within the stack.

        Returns:
            For each of `optimizer.state_names` a tensor: `[num_embeddings, embedding_dim]` or `[num_embeddings]`, and
            `[]` for the number of updates, which the tables of a stack have in common.
        """
        start, stop = self.row_starts[table], self.row_starts[table + 1]
        views = [layout.rows(one, start, stop) for layout, one in zip(self._state_layouts, self.state, strict=False)]
        return dict(zip(self.optimizer.state_names, [*views, *self.state[len(views) :]], strict=True))

    def reset_state(self) -> None:
        """Set every accumulator to its initial value, and the number of updates to 0."""
        for tensor in self.state:
            tensor.fill_(self.optimizer.initial_accumulator if tensor.dim() else 0)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or convert storage and state, as `Module.to` does; views taken before are stale afterwards.

        Args:
            function: maps a tensor to the new one.

        Raises:
            ConfigError: the new device cannot hold the stack.
        """
        probe = function(torch.empty(0, dtype=self._layout.dtype, device=self.device))
        layout = self._layout_on(probe.device, probe.dtype)
        if probe.dtype != self._layout.dtype and layout.packed:
            raise ConfigError(f"tables of {self._layout.dtype} cannot become {probe.dtype} on a TPU.", "Convert first.")
        self.parts = [convert(self.parts[0], self._layout, layout, function)]
        self._layout = layout
        layouts = self._state_layouts_on(probe.device, torch.promote_types(torch.float32, probe.dtype))
        moved = [
            convert(tensor, before, after, _no_less_than_float32(function))
            for tensor, before, after in zip(self.state, self._state_layouts, layouts, strict=False)
        ]
        self.state = [*moved, *(function(count) for count in self.state[len(moved) :])]
        self._state_layouts = layouts


def _no_less_than_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    # In bfloat16 an accumulator would stop growing after a few hundred steps.
    def moved(tensor: Tensor) -> Tensor:
        result = function(tensor)
        return result if result.dtype.itemsize >= 4 else tensor.to(result.device)

    return moved


def dtype_of(table: EmbeddingBagConfig) -> torch.dtype:
    """The torch dtype of a table.

    Args:
        table: its configuration.

    Returns:
        float32, float16 or bfloat16.

    Raises:
        ConfigError: a data type that cannot be trained.
    """
    if table.data_type not in _DTYPES:
        known = ", ".join(str(data_type) for data_type in _DTYPES)
        raise ConfigError(
            f"table {table.name!r}: data_type {table.data_type} cannot be trained.", f"Use one of {known}."
        )
    return _DTYPES[table.data_type]


def pooling_of(table: EmbeddingBagConfig) -> str:
    """The pooling of a table as the ops name it.

    Args:
        table: its configuration.

    Returns:
        `sum` or `mean`.

    Raises:
        ConfigError: another pooling.
    """
    if table.pooling not in _POOLINGS:
        raise ConfigError(f"table {table.name!r}: pooling {table.pooling} is not a pooled lookup.", "Use SUM or MEAN.")
    return _POOLINGS[table.pooling]
