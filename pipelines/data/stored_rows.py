"""Raw rows of any file to rows in the storage types of training Parquet; rows at fault are left out and counted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipelines.data.raw_rows import RawRows
from pipelines.data.row_counts import RejectedRow, RowCounts
from tpurec.features import Problem, Schema, Transformer, to_storage
from tpurec.features.transform import label_values


class StorageConverter:
    """Applies one rule to every piece: what the schema's transform would refuse is rejected here, with its reason.

    Args:
        schema: of the rows.
        labels: the label column is needed; a piece is converted without it otherwise.
        keys: keep the key columns.
    """

    def __init__(self, schema: Schema, *, labels: bool = True, keys: bool = True) -> None:
        self.schema = schema
        self.labels = labels
        self.keys = keys
        # Under the other policies every id has a row or is skipped, so there is nothing to refuse.
        may_refuse_ids = any(schema.policy_of(feature) == "error" for feature in schema.sparse)
        self._transformer = Transformer(schema) if may_refuse_ids else None

    def __call__(self, raw: RawRows, source: str) -> tuple[pa.Table, RowCounts]:
        """Convert a piece.

        Args:
            raw: rows with the schema's columns.
            source: file name, for the examples of rejected rows.

        Returns:
            The good rows in storage types, in order, and the counts of the piece.

        Raises:
            DataError: a column absent or of a wrong type.
        """
        table, problems = to_storage(raw.table, self.schema, source, labels=self.labels, keys=self.keys)
        if self._transformer is not None:
            problems += self._transformer.collect(table, self.labels, source=source)[1]
        counts = RowCounts(read=table.num_rows + len(raw.unreadable))
        rejected = [(row.number, row.reason, row.message) for row in raw.unreadable]
        for row, problem, position in _first_problems(problems):
            message = f"column {problem.column!r}: {problem.message(position)}"
            rejected.append((int(raw.numbers[row]), problem.reason, message))
        for _, reason, _ in rejected:
            counts.reject(reason)
        for number, reason, message in sorted(rejected):
            counts.add_example(RejectedRow(source, number, raw.is_text, reason, message))
        if problems:
            bad = np.zeros(table.num_rows, bool)
            for problem in problems:
                bad[problem.rows] = True
            table = table.filter(pa.array(~bad))
        counts.kept = table.num_rows
        counts.padded = raw.padded
        if self.labels:
            counts.add_labels(label_values(table.column(self.schema.label.column), self.schema.label, []))
        return table, counts


def _first_problems(problems: list[Problem]) -> list[tuple[int, Problem, int]]:
    """Of every row at fault its first problem, so that a row is counted once: (row, problem, position in it)."""
    found: dict[int, tuple[Problem, int]] = {}
    for problem in problems:
        for position, row in enumerate(problem.rows.tolist()):
            found.setdefault(row, (problem, position))
    return [(row, *problem) for row, problem in found.items()]
