"""What happened to the rows of a file: read, kept, padded, rejected and why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

MAX_EXAMPLES = 10


@dataclass(frozen=True)
class RejectedRow:
    """A row that was not kept.

    Args:
        source: file name.
        number: line from 1 of a text file, or row from 0 of a Parquet file.
        is_line: tells which of the two.
        reason: one of a few words, to count by.
        message: what is wrong with it.
    """

    source: str
    number: int
    is_line: bool
    reason: str
    message: str

    def __str__(self) -> str:
        place = f"line {self.number}" if self.is_line else f"row {self.number} (from 0)"
        return f"{self.source}: {place}: {self.message}"


@dataclass
class RowCounts:
    """Counts that add up over pieces and files.

    Args:
        read: rows read.
        kept: rows kept.
        padded: rows kept whose missing last fields were taken as blanks.
        rejected: reason to number of rows.
        examples: the first rejected rows, at most `MAX_EXAMPLES`.
        missing_labels: kept rows without a label.
        lowest_label: lowest label of the kept rows that have one; infinity if none has.
        highest_label: highest label likewise; minus infinity if none has.
    """

    read: int = 0
    kept: int = 0
    padded: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[RejectedRow] = field(default_factory=list)
    missing_labels: int = 0
    lowest_label: float = math.inf
    highest_label: float = -math.inf

    @property
    def num_rejected(self) -> int:
        """Rows rejected for any reason."""
        return sum(self.rejected.values())

    def reject(self, reason: str, number: int = 1) -> None:
        """Count rejected rows.

        Args:
            reason: why.
            number: how many.
        """
        self.rejected[reason] = self.rejected.get(reason, 0) + number

    def add_example(self, row: RejectedRow) -> None:
        """Remember a rejected row, if there are not enough yet.

        Args:
            row: the row.
        """
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(row)

    def add_labels(self, labels: np.ndarray) -> None:
        """Note the labels of kept rows.

        Args:
            labels: float32 `[N]`, NaN where missing.
        """
        known = labels[~np.isnan(labels)]
        self.missing_labels += labels.size - known.size
        if known.size:
            self.lowest_label = min(self.lowest_label, float(known.min()))
            self.highest_label = max(self.highest_label, float(known.max()))

    def __iadd__(self, other: RowCounts) -> RowCounts:
        self.read += other.read
        self.kept += other.kept
        self.padded += other.padded
        for reason, number in other.rejected.items():
            self.reject(reason, number)
        for row in other.examples:
            self.add_example(row)
        self.missing_labels += other.missing_labels
        self.lowest_label = min(self.lowest_label, other.lowest_label)
        self.highest_label = max(self.highest_label, other.highest_label)
        return self

    def label_warning(self) -> str | None:
        """Say that these labels cannot train or judge a model, if so.

        Returns:
            A sentence, or None.
        """
        if self.kept == 0:
            return None
        if self.missing_labels == self.kept:
            return f"all {self.kept} labels are missing: nothing can be trained on, and AUC is undefined."
        if self.lowest_label == self.highest_label:
            return (
                f"all labels that are there equal {self.lowest_label:g}: a model that predicts them learns nothing, "
                "and AUC is undefined. (One that ranks an item among others needs no labels.)"
            )
        return None

    def to_plain(self) -> dict[str, Any]:
        """Write as plain values for JSON."""
        plain = asdict(self)
        plain["lowest_label"] = self.lowest_label if math.isfinite(self.lowest_label) else None
        plain["highest_label"] = self.highest_label if math.isfinite(self.highest_label) else None
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowCounts:
        """Read what `to_plain` wrote.

        Args:
            plain: the values.

        Returns:
            Equal counts.
        """
        counts = cls(**plain)
        counts.examples = [RejectedRow(**row) for row in plain["examples"]]
        counts.lowest_label = math.inf if plain["lowest_label"] is None else plain["lowest_label"]
        counts.highest_label = -math.inf if plain["highest_label"] is None else plain["highest_label"]
        return counts
