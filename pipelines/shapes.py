"""Few shapes for compiled programs: every feature keeps the largest capacity it has had."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pipelines.feed import Ready
from pipelines.reading import SourceBatch
from tpurec.embeddings import to_torch
from tpurec.features import PackedBatch
from tpurec.features.packing import PAD, PackedFeature


class GrowingShapes:
    """Pads batches to capacities that only grow.

    A batch's capacities are rungs of a ladder, each feature's for itself: features that waver between two rungs would
    give as many programs as there are combinations. Growing ones give one program a growth, and soon no more.
    """

    def __init__(self) -> None:
        self._capacities: dict[str, int] = {}

    def fit(self, packed: PackedBatch) -> PackedBatch:
        """Pad a batch.

        Args:
            packed: the batch.

        Returns:
            The same rows; no feature has less capacity than in any batch before.
        """
        sparse = {}
        for name, feature in packed.sparse.items():
            capacity = max(feature.capacity, self._capacities.get(name, 0))
            self._capacities[name] = capacity
            sparse[name] = _padded(feature, capacity - feature.capacity)
        return dataclasses.replace(packed, sparse=sparse)


class StaticFeed:
    """Moves batches to a device, in shapes that soon stay the same; shapes are remembered from call to call.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes = GrowingShapes()

    def __call__(self, batches: Iterable[SourceBatch]) -> Iterator[Ready]:
        """Make batches ready, as `pipelines.feed.Feed` says.

        Args:
            batches: as they are read.

        Yields:
            The same batches, in order.
        """
        for item in batches:
            packed = self._shapes.fit(item.packed)
            yield Ready(
                item, int(packed.valid.sum()), lambda packed=packed: to_torch(packed, self._device, static=True)
            )


def _padded(feature: PackedFeature, extra: int) -> PackedFeature:
    if extra == 0:
        return feature
    rows = np.pad(feature.rows, (0, extra), constant_values=PAD)
    weights = None if feature.weights is None else np.pad(feature.weights, (0, extra))
    return PackedFeature(rows, feature.lengths, weights)
