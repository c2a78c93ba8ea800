"""From packed batches to what the model takes, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pipelines.reading import SourceBatch
from tpurec.embeddings import TorchBatch, to_torch

if TYPE_CHECKING:
    from tpurec.sharding.routed import RoutedBatch


@dataclass(frozen=True)
class Ready:
    """A batch that the model can take.

    Args:
        item: as it was read.
        num_labelled: labelled rows of the batch, over all ranks.
        batch: gives it on the model's device.
    """

    item: SourceBatch
    num_labelled: int
    batch: Callable[[], TorchBatch | RoutedBatch]


class Feed(Protocol):
    """Makes batches ready."""

    def __call__(self, batches: Iterable[SourceBatch]) -> Iterator[Ready]:
        """Make batches ready.

        Args:
            batches: as they are read.

        Yields:
            The same batches, in order.
        """


class DeviceFeed:
    """Moves batches to a device, when they are asked for.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device

    def __call__(self, batches: Iterable[SourceBatch]) -> Iterator[Ready]:
        """Make batches ready.

        Args:
            batches: as they are read.

        Yields:
            The same batches, in order.
        """
        for item in batches:
            packed = item.packed
            yield Ready(item, int(packed.valid.sum()), lambda packed=packed: to_torch(packed, self._device))
