"""The processes that train together: their ranks, process groups, and the few words they exchange on the host.

Every thread that calls collectives has a group of its own: on one group all ranks must call in the same order, which
holds within a thread but not between threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# A rank may wait for another's checkpoint or slow disk; one that waits longer waits for a process that is stuck.
# (torch's own limit is 30 minutes.)
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """One rank's view of the processes that train together.

    Args:
        rank: 0 to size - 1; rank 0 logs, and writes everything but its peers' pieces of checkpoints.
        size: processes.
        device_group: of the step's collectives; None without other processes.
        host_group: gloo, of the main thread.
        train_group: gloo, of the thread that prepares training batches.
        evaluation_group: gloo, of the thread that prepares batches of evaluation.
        processes_here: those of them that share this machine.
    """

    rank: int = 0
    size: int = 1
    device_group: ProcessGroup | None = None
    host_group: ProcessGroup | None = None
    train_group: ProcessGroup | None = None
    evaluation_group: ProcessGroup | None = None
    processes_here: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather_json(self, value: Any) -> list[Any]:
        """Give every rank what each of them has; all ranks call this together, in their main threads.

        Args:
            value: plain JSON values.

        Returns:
            The values by rank.
        """
        encoded = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return [json.loads(part.tobytes()) for part in self.gather_arrays(encoded)]

    def first_value(self, value: Any) -> Any:
        """Give every rank what rank 0 has; all ranks call this together, in their main threads.

        Args:
            value: plain JSON values; ignored on the other ranks.

        Returns:
            Rank 0's value.
        """
        return self.gather_json(value if self.is_first else None)[0]

    def gather_arrays(self, array: np.ndarray) -> list[np.ndarray]:
        """Give every rank the arrays of all; all ranks call this together, in their main threads.

        Args:
            array: one-dimensional; of the same dtype on all ranks, of any length.

        Returns:
            The arrays by rank.
        """
        return self._gathered(array, everywhere=True) or []

    def collect_arrays(self, array: np.ndarray) -> list[np.ndarray] | None:
        """Give rank 0 the arrays of all; all ranks call this together, in their main threads.

        Args:
            array: one-dimensional; of the same dtype on all ranks, of any length.

        Returns:
            The arrays by rank; None on the other ranks.
        """
        return self._gathered(array, everywhere=False)

    def _gathered(self, array: np.ndarray, everywhere: bool) -> list[np.ndarray] | None:
        if self.host_group is None:
            return [array]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(array)]), group=self.host_group)
        longest = max(int(length) for length in lengths)
        takes = everywhere or self.is_first
        if longest == 0:
            return [array for _ in lengths] if takes else None
        padded = np.zeros(longest, dtype=array.dtype)
        padded[: len(array)] = array
        own = torch.from_numpy(padded.view(np.uint8))
        parts = [torch.empty_like(own) for _ in range(self.size)] if takes else None
        if everywhere:
            dist.all_gather(parts, own, group=self.host_group)
        else:
            dist.gather(own, parts, dst=0, group=self.host_group)
        if parts is None:
            return None
        return [part.numpy().view(array.dtype)[: int(length)] for part, length in zip(parts, lengths, strict=True)]


SINGLE = World()


@contextmanager
def joined(rank: int, size: int, init_method: str, processes_here: int) -> Iterator[World]:
    """Join a world of CPUs, and leave it at the end of the block; after a failure the process is to end without.

    Args:
        rank: of this process.
        size: of the world.
        init_method: where the ranks meet, such as `file:///tmp/x/store`; the file must be fresh.
        processes_here: processes of the world on this machine.

    Yields:
        The world.
    """
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
    yield current_world(processes_here)
    dist.destroy_process_group()  # not after a failure: it could wait for peers that wait for this process


def current_world(processes_here: int) -> World:
    """Make the host groups of a process group that exists; all ranks call this together.

    Args:
        processes_here: processes of the world on this machine.

    Returns:
        The world of `torch.distributed`'s default group.
    """
    groups = [dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(3)]
    return World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, *groups, processes_here)
