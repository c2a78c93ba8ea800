"""The recipe's section [device]: where the training step runs, and with how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeviceConfig:
    """Where the step runs.

    Args:
        kind: `cpu`.
        execution: `eager`: operations run as they are called.
        threads: torch threads of the step; 0 means every core this process may use. Sums may differ in the last bit
            between thread counts, so runs that must agree bit for bit state it.
    """

    kind: Literal["cpu"] = "cpu"
    execution: Literal["eager"] = "eager"
    threads: int = 0

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads = {self.threads}: must be 0 (all cores) or more")

    @property
    def num_threads(self) -> int:
        """The number of threads to use, with 0 resolved to the cores this process may run on."""
        return self.threads or len(os.sched_getaffinity(0))
