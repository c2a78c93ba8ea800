"""Where the ids lie that a rank looks up itself: bags slot after slot, or sequences with as much room as was agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpurec.sharding.host_batch import HostBatch


@dataclass(frozen=True)
class LocalLayout:
    """The places of a stack's ids, which are numbered slot after slot, without skipped ones.

    Args:
        size: places.
        spare: what an empty place holds.
        places: int64 `[num_ids]`, the place of each id; None if id i is at place i.
        gradients: int64 `[num_ids]`, the line of the slots' gradients that each id adds to its row.
        offsets: int32 `[num_slots * batch_size + 1]`, where the bags begin among the places; None for sequences.
    """

    size: int
    spare: int
    places: np.ndarray | None
    gradients: np.ndarray
    offsets: np.ndarray | None


def bag_layout(lengths: np.ndarray, size: int) -> LocalLayout:
    """Lay bags out: there are no gaps between ids.

    Args:
        lengths: int32 `[num_slots, batch_size]`.
        size: places.

    Returns:
        The layout; gradients come as one line per example and slot, slots side by side.
    """
    num_slots, batch_size = lengths.shape
    line_of_bag = np.arange(batch_size)[None, :] * num_slots + np.arange(num_slots)[:, None]
    offsets = np.zeros(lengths.size + 1, dtype=np.int32)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return LocalLayout(size, 0, None, np.repeat(line_of_bag.reshape(-1), lengths.reshape(-1)), offsets)


def sequence_layout(batch: HostBatch, features: Sequence[str], capacities: Sequence[int], spare: int) -> LocalLayout:
    """Lay sequences out: each slot has as many places as were agreed, and a skipped id keeps its own.

    Args:
        batch: this rank's ids.
        features: of the slots.
        capacities: places of each slot.
        spare: the line of zeros, which skipped ids and the places behind the last id get.

    Returns:
        The layout; gradients come as one line a place.
    """
    found, start = [], 0
    for name, capacity in zip(features, capacities, strict=True):
        ids, _ = batch.sequence(name)
        found.append(start + np.flatnonzero(ids >= 0))
        start += capacity
    places = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return LocalLayout(start, spare, places, places, None)
