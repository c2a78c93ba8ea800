"""Tables of one dim, dtype and pooling, stacked in one storage, with the state of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.types import DataType

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
        features: the features that read these tables, in the order in which they are looked up.
        optimizer: decides the shape of the state.
        device: where to allocate; `meta` allocates nothing.
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
        self.embedding_dim: int = tables[0].embedding_dim
        self.pooling: str = pooling_of(tables[0])
        self.state_name = optimizer.state_name
        starts = [0]
        for table in tables:
            starts.append(starts[-1] + table.num_embeddings)
        self.row_starts = tuple(starts)
        self.weight: Tensor = torch.empty(starts[-1], self.embedding_dim, dtype=dtype_of(tables[0]), device=device)
        shape = optimizer.state_shape(starts[-1], self.embedding_dim)
        self.state: Tensor | None = None
        if shape is not None:
            self.state = torch.full(shape, optimizer.initial_accumulator, dtype=torch.float32, device=device)
        # What the ops and the jagged code ask for on every call.
        self.feature_names = [feature.name for feature in features]
        self.feature_tables = [feature.table for feature in features]
        self.feature_row_starts = [starts[feature.table] for feature in features]
        self.feature_num_rows = [tables[feature.table].num_embeddings for feature in features]

    @property
    def num_features(self) -> int:
        """How many features read this stack."""
        return len(self.features)

    def table_weight(self, table: int) -> Tensor:
        """A table's rows, as a view of the storage.

        Args:
            table: number within the stack.

        Returns:
            `[num_embeddings, embedding_dim]`.
        """
        return self.weight[self.row_starts[table] : self.row_starts[table + 1]]

    def table_state(self, table: int) -> Tensor | None:
        """A table's optimizer state, as a view.

        Args:
            table: number within the stack.

        Returns:
            `[num_embeddings, embedding_dim]`, `[num_embeddings]`, or None, as the optimizer has it.
        """
        return None if self.state is None else self.state[self.row_starts[table] : self.row_starts[table + 1]]

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or convert the storage and the state, as `Module.to` does; views taken before are stale afterwards.

        Args:
            function: maps a tensor to the new one.
        """
        self.weight = function(self.weight)
        if self.state is not None:
            moved = function(self.state)
            # Accumulators keep at least float32: in bfloat16 they stop growing after a few hundred steps.
            self.state = moved if moved.dtype.itemsize >= 4 else self.state.to(moved.device)


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
