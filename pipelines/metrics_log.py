"""Where metrics of a run go: `metrics.jsonl` and TensorBoard events, without gaps or repeats when a run is resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tpurec import atomic

_NO_SCALARS = ("kind", "step", "epoch")


class MetricsLog:
    """Appends lines of metrics; what was logged after the checkpoint that a run resumes from is dropped first.

    Args:
        path: `metrics.jsonl`.
        tensorboard: folder of the events.
        step: steps done at the checkpoint; later lines are dropped.
    """

    def __init__(self, path: Path, tensorboard: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The test is evaluated after the last step, and again if the run was killed before it had written its result.
        kept = [line for line in read_metrics(path) if line["step"] <= step and line["kind"] != "test"]
        atomic.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._stream = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(tensorboard), purge_step=step + 1 if step else None)

    def add(self, line: dict[str, Any]) -> None:
        """Write one line.

        Args:
            line: `kind`, `step`, `epoch` and numbers; None where undefined.
        """
        self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()
        for name, value in line.items():
            if name not in _NO_SCALARS and isinstance(value, (int, float)) and math.isfinite(value):
                self._events.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def close(self) -> None:
        """Flush and close both."""
        self._stream.close()
        self._events.close()


class NoLog:
    """Takes the lines of a rank whose numbers another one writes."""

    def add(self, line: dict[str, Any]) -> None:
        """Take one line.

        Args:
            line: as of `MetricsLog`.
        """

    def close(self) -> None:
        """Nothing to close."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`; a last line that a kill cut short is left out.

    Args:
        path: the file; it may be missing.

    Returns:
        The lines.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
