"""The values that sharded tables start with: those of the unsharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpurec.embeddings.deferred import initial_blocks
from tpurec.embeddings.fuse import FusedCollection
from tpurec.embeddings.sequence import FusedEmbeddingCollection
from tpurec.errors import ConfigError
from tpurec.sharding.pieces import TensorPiece

if TYPE_CHECKING:
    from tpurec.sharding.sharded_collection import ShardedCollection


def load_initial_values(
    collection: FusedCollection,
    device: torch.device,
    sharded: ShardedCollection | None = None,
) -> None:
    """Copy a collection's values to where they are to be, or draw them if it has none.

    Args:
        collection: its tables may be on `meta`, if it was built inside `deferred_tables`.
        device: where its tables go, if it stays.
        sharded: takes this rank's part; None if the collection stays.

    Raises:
        ConfigError: the tables are on `meta` and nothing is known of their values.
    """
    if collection.device.type == "meta":
        _draw(collection, device, sharded)
    elif sharded is None:
        collection.to(device)
    else:
        whole = {**collection.state_dict(), **collection.optimizer_state_dict()}
        for piece in [*sharded.weight_pieces(), *sharded.state_pieces()]:
            if piece.tensor.dim():
                _copy(piece, 0, whole[piece.name])
            else:
                piece.tensor.copy_(whole[piece.name])


def _draw(fused: FusedCollection, device: torch.device, sharded: ShardedCollection | None) -> None:
    collection = fused.bag_collection if isinstance(fused, FusedEmbeddingCollection) else fused
    if collection.initial_random_state is None:
        raise ConfigError(
            "the collection's tables are on meta, and nothing is known of their values.",
            "Build the model inside tpurec.embeddings.deferred_tables(), or on a device.",
        )
    pieces: dict[str, list[TensorPiece]] = {}
    if sharded is None:
        collection.to_empty(device=device)
        collection.reset_state()
        for name, bag in collection.embedding_bags.items():
            shape = (bag.weight.shape[0], bag.weight.shape[1])
            pieces[name] = [TensorPiece(name, shape, 0, 1, None, bag.weight.detach())]
    else:
        for piece in sharded.weight_pieces():
            pieces.setdefault(piece.name.split(".")[1], []).append(piece)
    for table, start, block in initial_blocks(collection.tables_in_stack_order(), collection.initial_random_state):
        for piece in pieces[table.name]:
            _copy(piece, start, block)
    collection.initial_random_state = None


def _copy(piece: TensorPiece, start: int, block: Tensor) -> None:
    """Copy what a block of whole rows, from row `start` on, has of a piece."""
    step = piece.row_step
    first = max(0, -(-(start - piece.row_start) // step))  # the piece's rows before it lie before the block
    begin = piece.row_start + first * step - start
    if begin < len(block) and first < len(piece.tensor):
        rows = block[begin::step]
        if piece.columns is not None:
            rows = rows[:, slice(*piece.columns)]
        count = min(len(rows), len(piece.tensor) - first)
        piece.tensor[first : first + count].copy_(rows[:count])
