"""A batch that the host has routed: device tensors of agreed shapes, in place of a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from tpurec.sharding.host_batch import HostBatch
from tpurec.sharding.routing import Sizes

if TYPE_CHECKING:
    import torch.distributed as dist

    from tpurec.sharding.wire import Wire


@dataclass(frozen=True)
class StackConstants:
    """Index arrays that depend on the agreed sizes only.

    Args:
        row_numbers: int32 `[num_ranks * rows]`, 0, 1, ...
        bag_starts: int32 `[num_ranks]`, where each rank's ids begin.
        replicated_numbers: int32 `[replicated + 1]`, from the end of the ids on.
        ones: float32, the weights of distinct rows; None without weights.
    """

    row_numbers: Tensor
    bag_starts: Tensor
    replicated_numbers: Tensor
    ones: Tensor | None

    @classmethod
    def of(cls, sizes: Sizes, num_ranks: int, weighted: bool, device: torch.device) -> StackConstants:
        """Make them.

        Args:
            sizes: agreed.
            num_ranks: of the exchange.
            weighted: whether ids have weights.
            device: where.

        Returns:
            The arrays.
        """
        first = num_ranks * sizes.rows
        end = first + num_ranks * sizes.bag_ids
        return cls(
            torch.arange(first, dtype=torch.int32, device=device),
            first + torch.arange(num_ranks, dtype=torch.int32, device=device) * sizes.bag_ids,
            torch.arange(end, end + sizes.replicated + 1, dtype=torch.int32, device=device),
            torch.ones(first + sizes.replicated, device=device) if weighted else None,
        )


@dataclass(frozen=True)
class DeviceRoute:
    """`tpurec.sharding.routing.StackRoute` on the device; the message went into the batch's.

    Args:
        sizes: agreed.
        message_size: this stack's elements of the message to each rank.
        constants: index arrays.
        index: see `StackRoute`, as all that follow.
        offsets: as there.
        weights: as there.
        lines: as there.
        line_offsets: as there.
        line_weights: as there.
        replicated: as there.
        replicated_targets: the same with the spare line in place of -1.
        bag_scales: as there.
        local_scales: as there.
    """

    sizes: Sizes
    message_size: int
    constants: StackConstants
    index: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    lines: Tensor
    line_offsets: Tensor
    line_weights: Tensor | None
    replicated: Tensor
    replicated_targets: Tensor
    bag_scales: Tensor | None
    local_scales: Tensor | None


@dataclass(frozen=True)
class SequenceIds:
    """What the output of a sequence collection says beside the vectors.

    Args:
        capacities: places of each feature's sequences, agreed by the ranks.
        counts: ids of each feature, known on the host.
        lengths: int32 `[num_features, batch_size]`.
        ids: int32 or int64 `[sum of capacities]`, -1 where there is none; None if the collection does not need them.
    """

    capacities: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: Tensor
    ids: Tensor | None

    @classmethod
    def of(
        cls, batch: HostBatch, features: Sequence[str], capacities: Sequence[int], need_ids: bool, device: torch.device
    ) -> SequenceIds:
        """Take it from a batch.

        Args:
            batch: this rank's ids.
            features: of the outputs, in order.
            capacities: of the outputs.
            need_ids: whether the ids go along.
            device: where.

        Returns:
            It.
        """
        found = [batch.sequence(name) for name in features]
        ids = None
        if need_ids:
            padded = [
                np.concatenate([values, np.full(capacity - len(values), -1, values.dtype)])
                for (values, _), capacity in zip(found, capacities, strict=True)
            ]
            ids = torch.from_numpy(np.concatenate(padded)).to(device)
        lengths = torch.from_numpy(np.stack([lengths for _, lengths in found])).to(device)
        return cls(tuple(capacities), tuple(len(values) for values, _ in found), lengths, ids)


@dataclass(eq=False)
class RoutedFeatures:
    """The sparse features of a batch, for the sharded collections of a model.

    Args:
        routes: for each stack.
        message: int32 `[num_ranks, message_size]`.
        batch_size: this rank's examples.
        padded_size: examples of the rank that has most.
        areas: int64 `[num_areas + 1]`, see `tpurec.sharding.column_squares`.
        squares_size: all areas together.
        wire: carries the ids.
        collections: numbers of those that the ids are for; the others take no step.
        sequences: by number of collection, for sequence collections.
    """

    routes: tuple[DeviceRoute, ...]
    message: Tensor
    batch_size: int
    padded_size: int
    areas: Tensor
    squares_size: int
    wire: Wire
    collections: frozenset[int]
    sequences: Mapping[int, SequenceIds] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # of the collections that have not asked for theirs yet
    _received: Tensor | None = None
    _work: dist.Work | None = None

    def stride(self) -> int:
        """As of a KeyedJaggedTensor.

        Returns:
            This rank's examples.
        """
        return self.batch_size

    def capacities(self) -> dict[str, int]:
        """The agreed sizes that make a program: what the shapes of a step depend on.

        Returns:
            Name of the size to elements.
        """
        found = {"squares": self.squares_size, "padded rows": self.padded_size}
        for number, route in enumerate(self.routes):
            sizes = route.sizes
            found |= {
                f"stack {number} rows": sizes.rows,
                f"stack {number} bag ids": sizes.bag_ids,
                f"stack {number} replicated": sizes.replicated,
                f"stack {number} local ids": sizes.local_ids,
            }
            found |= {f"stack {number} sequence {slot}": size for slot, size in enumerate(sizes.sequences)}
        return found

    def start_id_exchange(self) -> None:
        """Send the ids now, and go on; all ranks must do so at the same point of their program."""
        if self._received is None:
            self.wire.counts.steps += 1
            self._received, self._work = self.wire.all_to_all("ids", self.message, async_op=True)

    def received(self) -> Tensor:
        """What the other ranks ask for.

        Returns:
            int32 `[num_ranks, message_size]`.
        """
        self.start_id_exchange()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


@dataclass(frozen=True, eq=False)
class RoutedBatch:
    """A batch that is ready for the model.

    Args:
        dense: float32 `[B, num_dense]`; None if the router was given a KeyedJaggedTensor.
        features: give them to the model in place of a KeyedJaggedTensor, which they are at world size 1.
        labels: float32 `[B]` or None.
        valid: bool `[B]` or None.
        num_labelled: this rank's examples that have a label; all of them if the router cannot know.
        num_labelled_global: the same of all ranks: divide the sum of losses by it.
    """

    dense: Tensor | None
    features: RoutedFeatures | KeyedJaggedTensor
    labels: Tensor | None
    valid: Tensor | None
    num_labelled: int
    num_labelled_global: int

    def start_id_exchange(self) -> None:
        """Send the ids of this batch while an earlier one computes; all ranks at the same point of their program."""
        if isinstance(self.features, RoutedFeatures):
            self.features.start_id_exchange()
