"""What is counted of the training rows on the way; each rank counts its own, and they are added up now and then."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pipelines.reading import SourceBatch


@dataclass
class Tally:
    """Counts of rows, and the range of their labels.

    Args:
        missing_labels: rows without a label.
        label_range: lowest and highest label; None before the first.
        ids: table name to what became of its ids, as `tpurec.features.Counts` has it.
    """

    missing_labels: int = 0
    label_range: list[float] | None = None
    ids: dict[str, dict[str, int]] = field(default_factory=dict)

    def count(self, item: SourceBatch) -> None:
        """Count a batch, or this rank's share of it.

        Args:
            item: the batch.
        """
        labels = item.packed.labels[item.packed.valid]
        self.add(
            Tally(
                item.packed.num_missing_labels,
                [float(labels.min()), float(labels.max())] if len(labels) else None,
                {} if item.counts is None else item.counts.tables,
            )
        )

    def add(self, other: Tally) -> None:
        """Add another tally to this one.

        Args:
            other: of other rows.
        """
        self.missing_labels += other.missing_labels
        ranges = [found for found in (self.label_range, other.label_range) if found is not None]
        if ranges:
            self.label_range = [min(low for low, _ in ranges), max(high for _, high in ranges)]
        for table, counts in other.ids.items():
            into = self.ids.setdefault(table, {})
            for reason, number in counts.items():
                into[reason] = into.get(reason, 0) + number

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: the arguments of the class.

        Returns:
            A mapping.
        """
        return dataclasses.asdict(self)
