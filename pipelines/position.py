"""Where a training run stands, and where its time went.

A `Position` is plain JSON, so a checkpoint of tensors and position resumes the run to the bit. A `Clock` is not saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Position:
    """Where a run stands; plain JSON.

    Args:
        step: optimizer steps done.
        epoch: of the next batch.
        batch: number in its epoch of the next batch.
        rows_seen: rows trained on, those without a label included.
        missing_labels: those among them without a label.
        label_range: lowest and highest label so far; None before the first.
        log_loss_sum: of the rows since the last line of training metrics.
        log_rows: number of those rows.
        best_score: of the best validation so far, higher is better; None before the first.
        best_step: its step.
        validations_without_better: in a row, up to now.
        finished: no step is left to do.
        stopped_early: because `patience` ran out.
        ids: table name to what became of its ids, as `tpurec.features.Counts` has it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    rows_seen: int = 0
    missing_labels: int = 0
    label_range: list[float] | None = None
    log_loss_sum: float = 0.0
    log_rows: int = 0
    best_score: float | None = None
    best_step: int | None = None
    validations_without_better: int = 0
    finished: bool = False
    stopped_early: bool = False
    ids: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Clock:
    """Where this process's time went, in seconds; not part of a checkpoint.

    Args:
        wait_seconds: waiting for batches.
        step_seconds: training steps.
        other_seconds: validation, checkpoints and logs.
        steady_rows: rows trained on in steps that compiled nothing.
        steady_seconds: waiting for and training these.
    """

    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    other_seconds: float = 0.0
    steady_rows: int = 0
    steady_seconds: float = 0.0

    def add_step(self, rows: int, wait: float, step: float, compiled: bool) -> None:
        """Count a step.

        Args:
            rows: trained on.
            wait: seconds for the batch.
            step: seconds in the step.
            compiled: the step compiled a program: it says nothing about the steps to come.
        """
        self.wait_seconds += wait
        self.step_seconds += step
        if not compiled:
            self.steady_rows += rows
            self.steady_seconds += wait + step

    @property
    def rows_per_second(self) -> float:
        """Rows trained on per second of reading and training, without compilation, validation and checkpoints."""
        return self.steady_rows / self.steady_seconds if self.steady_seconds > 0 else 0.0
