"""What a rank holds of the tensors of a checkpoint, under names that depend on neither plan nor world size.

The names are those of the unsharded model: `model.` + its state_dict's name, `optimizer.` + the name in
`tpurec.embeddings.fused_optimizer_state_dict`. A module whose tables are sharded gives its pieces by `weight_pieces`
and `state_pieces`; `pieces_of` collects them from a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tpurec.sharding.plan import Shard
from tpurec.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """Some rows and columns of a tensor that is spread over ranks.

    A rank gives at least one piece of every tensor, so that each rank knows all the names; one that holds nothing of a
    tensor gives an empty one (`tensor` with 0 rows).

    Args:
        name: of the whole tensor, the unsharded model's.
        global_shape: of the whole tensor.
        row_start: the first row that the piece holds.
        row_step: distance of its rows: `row_start, row_start + row_step, ...`.
        columns: first column, and the one behind the last; None for all, and for tensors with less than 2 dimensions.
        tensor: `[rows held, columns held, ...]`, a view of where they live; loading writes into it. Any device.
        writes: whether it goes into a checkpoint. Among copies exactly one does; all of them are loaded.

    Raises:
        ValueError: the tensor's shape is not that of the rows and columns, or these are not within `global_shape`.

    Example:
        >>> rows = torch.zeros(250, 64)  # rank 1 of 4 holds rows 1, 5, 9, ... of 1,000
        >>> TensorPiece("model.embedding_bags.t.weight", (1000, 64), 1, 4, None, rows)
    """

    name: str
    global_shape: tuple[int, ...]
    row_start: int
    row_step: int
    columns: tuple[int, int] | None
    tensor: Tensor
    writes: bool = True

    def __post_init__(self) -> None:
        region, shape = self.region, self.global_shape
        expected = shape
        if shape:
            expected = (region.num_rows, *((region.num_columns, *shape[2:]) if len(shape) > 1 else ()))
        fits = tuple(self.tensor.shape) == expected
        inside = region.row_step >= 1 and region.row_start >= 0 and region.column_start >= 0
        if shape:
            inside = inside and (not region.num_rows or region.row_last < shape[0])
        if len(shape) > 1:
            inside = inside and region.column_start <= region.column_stop <= shape[1]
        if not fits or not inside or (self.columns is not None and len(shape) < 2):
            raise ValueError(
                f"{self.name!r}: a tensor {list(self.tensor.shape)} cannot hold {region} of a tensor {list(shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor, here and in the checkpoint."""
        return self.tensor.dtype

    @property
    def region(self) -> Region:
        """The rows and columns it holds."""
        if not self.global_shape:
            return Region(0, 1, 1)
        columns = (0, self.global_shape[1]) if len(self.global_shape) > 1 else (0, 1)
        return Region(self.row_start, self.row_step, self.tensor.shape[0], *(self.columns or columns))


def whole(name: str, tensor: Tensor) -> TensorPiece:
    """A piece that is all of a tensor.

    Args:
        name: of the tensor.
        tensor: any shape.

    Returns:
        The piece.
    """
    return TensorPiece(name, tuple(tensor.shape), 0, 1, None, tensor)


def pieces_of_shard(
    name: str, shard: Shard, rank: int, global_shape: tuple[int, ...], tensors: Sequence[Tensor]
) -> list[TensorPiece]:
    """A rank's pieces of a table, or of its optimizer state, as a plan places it.

    Args:
        name: of the whole tensor.
        shard: of the plan.
        rank: this rank. One that is not an owner gives a tensor of 0 rows.
        global_shape: `[num_embeddings, embedding_dim]`; `[num_embeddings]` for one number a row, of which every column
            shard has a copy and the first writes its own.
        tensors: the rank's rows, padding left out; in order, if they lie in several tensors.

    Returns:
        A piece for each tensor.
    """
    first, step = 0, 1
    if shard.rule == "modulo" and rank in shard.ranks:
        step = len(shard.ranks)
        first = (shard.ranks.index(rank) - shard.shift) % step
    by_row = len(global_shape) < 2
    writes = (shard.rule != "replicated" or rank == shard.ranks[0]) and (not by_row or shard.columns[0] == 0)
    columns, pieces = None if by_row else shard.columns, []
    for tensor in tensors:
        pieces.append(TensorPiece(name, global_shape, first, step, columns, tensor, writes))
        first += step * len(tensor)
    return pieces


@runtime_checkable
class Sharded(Protocol):
    """A module that holds pieces of its tables. Its own `state_dict` does not go into checkpoints."""

    def weight_pieces(self) -> list[TensorPiece]:
        """Give this rank's weights.

        Returns:
            Pieces named `embedding_bags.NAME.weight`, at least one for every table.
        """

    def state_pieces(self) -> list[TensorPiece]:
        """Give this rank's optimizer state.

        Returns:
            Pieces named `embedding_bags.NAME.sum`, at least one for every table; empty for SGD.
        """


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, Sharded]]:
    """The modules of a model that hold pieces, each once.

    Args:
        model: any module.

    Yields:
        Path (empty if the model is itself such a module) and module.
    """
    for path, module in model.named_modules():
        if isinstance(module, Sharded):
            yield path, module


def pieces_of(model: nn.Module, weights: str, states: str) -> list[TensorPiece]:
    """Collect this rank's pieces of a model, under the unsharded model's names.

    Args:
        model: any module.
        weights: put before the names of weights, such as `model.`.
        states: put before the names of optimizer states, such as `optimizer.`.

    Returns:
        The pieces; empty if nothing is sharded.
    """
    pieces = []
    for path, module in sharded_modules(model):
        inner = f"{path}." if path else ""
        pieces += [replace(piece, name=weights + inner + piece.name) for piece in module.weight_pieces()]
        pieces += [replace(piece, name=states + inner + piece.name) for piece in module.state_pieces()]
    return pieces


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of a model without its sharded modules: what every rank has alike.

    Args:
        model: any module.

    Returns:
        state_dict name to tensor.
    """
    sharded = [f"{path}." if path else "" for path, _ in sharded_modules(model)]
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(name.startswith(prefix) for prefix in sharded)
    }
