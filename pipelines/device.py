"""The recipe's section [device]: where the training step runs, how it is executed, and with how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from tpurec.errors import ConfigError

MAX_THREADS = 1024

Execution = Literal["eager", "strict", "debug", "defer_and_fuse", "compile"]
# What each kind of device can do; the first is its default.
EXECUTIONS: dict[str, tuple[Execution, ...]] = {
    "cpu": ("eager",),
    "tpu": ("compile", "strict", "debug", "defer_and_fuse"),
}


@dataclass(frozen=True)
class DeviceConfig:
    """Where and how the step runs.

    Args:
        kind: `cpu` or `tpu`. Evaluation, export and scoring of a finished RUN always run on the CPU.
        execution: on a CPU `eager`: operations run as they are called. On a TPU `compile` (the default): the whole step
            is one program per shape; or torch_tpu's eager modes: `strict` (each operation is a program), `debug` (the
            same, and the host waits for each), `defer_and_fuse` (operations are collected and fused).
        on_recompile: what to do when `compile` makes a program that it should not need: again for a shape that has one,
            or for more ids than the ladder of capacities expects: `warn`, or `error` to end the run.
        check: look at every batch on the device, ids, lengths, weights, pooled vectors and gradients, and end the run
            with the first that is wrong (`tpurec.embeddings.check_on_device`). For finding an error: every step is
            slower and waited for.
        threads: torch threads of the step; 0 means the cores this process may use less those of the readers, one at
            least: a thread of the step that waits for a core holds up all others. Sums may differ in the last bit
            between thread counts, so runs on different machines that must agree bit for bit state it.
    """

    kind: Literal["cpu", "tpu"] = "cpu"
    execution: Execution | None = None
    on_recompile: Literal["warn", "error"] = "warn"
    check: bool = False
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:  # beyond what the system allows, torch ends the process
            raise ValueError(f"threads = {self.threads}: must be 0 (all cores) to {MAX_THREADS}")
        known = EXECUTIONS[self.kind]
        if self.execution is None:
            object.__setattr__(self, "execution", known[0])  # a resolved recipe says what it means
        if self.execution not in known:
            reasons = {
                "eager": "on a TPU the eager modes have names of their own",
                "compile": "on a CPU the tables run in FBGEMM's kernels, which compilation does not touch",
            }
            because = reasons.get(str(self.execution), "it is a mode of torch_tpu")
            raise ConfigError(
                f"execution = '{self.execution}' is not for device.kind = '{self.kind}': {because}.",
                f"Use {' or '.join(repr(name) for name in known)}, or leave device.execution out.",
            )
        if self.on_recompile == "error" and self.execution != "compile":
            raise ConfigError(
                f"on_recompile = 'error' needs execution = 'compile': under '{self.execution}' each operation is "
                "compiled, or run, when it first occurs.",
                "Leave device.on_recompile out.",
            )

    def num_threads(self, reader_workers: int, processes: int = 1) -> int:
        """Return the number of threads to use, with 0 resolved.

        Args:
            reader_workers: threads of each process that read ahead of the step.
            processes: training processes that share this machine.

        Returns:
            1 or more.
        """
        return self.threads or max(1, len(os.sched_getaffinity(0)) // processes - reader_workers)
