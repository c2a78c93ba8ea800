"""The recipe's section [device]: where the training step runs, and with how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

MAX_THREADS = 1024


@dataclass(frozen=True)
class DeviceConfig:
    """Where the step runs.

    Args:
        kind: `cpu`.
        execution: `eager`: operations run as they are called.
        threads: torch threads of the step; 0 means the cores this process may use less those of the readers, one at
            least: a thread of the step that waits for a core holds up all others. Sums may differ in the last bit
            between thread counts, so runs on different machines that must agree bit for bit state it.
    """

    kind: Literal["cpu"] = "cpu"
    execution: Literal["eager"] = "eager"
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:  # beyond what the system allows, torch ends the process
            raise ValueError(f"threads = {self.threads}: must be 0 (all cores) to {MAX_THREADS}")

    def num_threads(self, reader_workers: int, processes: int = 1) -> int:
        """Return the number of threads to use, with 0 resolved.

        Args:
            reader_workers: threads of each process that read ahead of the step.
            processes: training processes that share this machine.

        Returns:
            1 or more.
        """
        return self.threads or max(1, len(os.sched_getaffinity(0)) // processes - reader_workers)
