"""The collectives of a step, counted where they are called."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class WireCounts:
    """What left this rank since the counts began.

    Args:
        steps: exchanges of ids.
        collectives: calls by kind.
        bytes: that left this rank, by kind: an all-to-all sends all but its own share; an all-reduce counts as its ring
            form, 2 (num_ranks - 1) / num_ranks of the array.
    """

    steps: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)


class Wire:
    """Even collectives over a process group.

    Args:
        group: the process group; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.counts = WireCounts()
        self._buffers: dict[str, Tensor] = {}

    def all_to_all(
        self, kind: str, tensor: Tensor, async_op: bool = False, reuse: bool = False
    ) -> tuple[Tensor, dist.Work | None]:
        """Send line r of a tensor to rank r.

        Args:
            kind: what it counts as.
            tensor: `[num_ranks, size]` of any dtype, contiguous, of equal shape on all ranks.
            async_op: return at once.
            reuse: the array received is overwritten by the next call of this kind; new memory costs page faults.

        Returns:
            `[num_ranks, size]`: line r came from rank r; and what to wait for, if `async_op`.
        """
        received = self._buffers.get(kind) if reuse else None
        if received is None or received.shape != tensor.shape or received.dtype != tensor.dtype:
            received = torch.empty_like(tensor)
        if reuse:
            self._buffers[kind] = received
        self._count(kind, tensor.nbytes * (self.num_ranks - 1) / self.num_ranks)
        if not tensor.numel():
            return received, None
        work = dist.all_to_all_single(received, tensor, group=self.group, async_op=async_op)
        return received, work

    def all_reduce(self, kind: str, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place.

        Args:
            kind: what it counts as.
            tensor: of equal shape on all ranks.
        """
        self._count(kind, 2 * tensor.nbytes * (self.num_ranks - 1) / self.num_ranks)
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)

    def _count(self, kind: str, num_bytes: float) -> None:
        self.counts.collectives[kind] = self.counts.collectives.get(kind, 0) + 1
        self.counts.bytes[kind] = self.counts.bytes.get(kind, 0.0) + num_bytes
