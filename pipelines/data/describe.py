"""What is in a data set: per column counts, blanks, frequent ids, skew; in one pass and bounded memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.inputs import InputFile, find_inputs
from pipelines.data.parquet_rows import open_parquet
from pipelines.data.readers import check_file, read_rows
from pipelines.data.row_counts import RowCounts
from pipelines.data.stored_rows import StorageConverter
from tpurec.errors import DataError
from tpurec.features import Schema
from tpurec.features.arrow_columns import numbers
from tpurec.features.statistics import IdStatistics, IdSummary
from tpurec.features.transform import label_values


@dataclass
class NumberStatistics:
    """Adds up the statistics of a column of numbers.

    Args:
        rows: rows met.
        blanks: of these without a value.
        negatives: values below 0.
        zeros: values equal to 0.
        lowest: lowest value; infinity if there is none.
        highest: highest value; minus infinity if there is none.
        total: sum of the values.
    """

    rows: int = 0
    blanks: int = 0
    negatives: int = 0
    zeros: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    total: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add values.

        Args:
            values: floats `[N]`, NaN where blank.
        """
        known = values[~np.isnan(values)]
        self.rows += values.size
        self.blanks += values.size - known.size
        self.negatives += int(np.count_nonzero(known < 0))
        self.zeros += int(np.count_nonzero(known == 0))
        if known.size:
            self.lowest = min(self.lowest, float(known.min()))
            self.highest = max(self.highest, float(known.max()))
            self.total += float(known.sum(dtype=np.float64))

    @property
    def mean(self) -> float:
        """Mean of the values; NaN if there is none."""
        known = self.rows - self.blanks
        return self.total / known if known else math.nan

    def to_plain(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "count": self.rows - self.blanks,
            "blanks": self.blanks,
            "lowest": self.lowest,
            "highest": self.highest,
            "mean": self.mean,
            "negatives": self.negatives,
            "zeros": self.zeros,
        }


@dataclass
class Description:
    """What is in a data set.

    Args:
        schema: its schema.
        files: number of files.
        counts: of rows; rejected ones are left out of all else.
        label: statistics of the label, after the schema's threshold; None without label.
        dense: by dense feature.
        sparse: by sparse feature.
    """

    schema: Schema
    files: int
    counts: RowCounts
    label: NumberStatistics | None
    dense: dict[str, NumberStatistics]
    sparse: dict[str, IdSummary] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Values for JSON: `columns` maps each feature and the label to its statistics."""
        columns: dict[str, Any] = {}
        if self.label is not None:
            columns[self.schema.label.column] = {
                "role": "label",
                "count": self.label.rows - self.label.blanks,
                "blanks": self.label.blanks,
                "label_rate": self.label.mean,
            }
        for name, found in self.dense.items():
            columns[name] = {"role": "dense", **found.to_plain()}
        for name, ids in self.sparse.items():
            plain = dataclasses.asdict(ids)
            columns[name] = {"role": "sparse", "count": plain.pop("ids"), **plain}
        return {
            "schema": self.schema.name,
            "files": self.files,
            "rows": self.counts.kept,
            "rows_rejected": self.counts.rejected,
            "label_rate": None if self.label is None else self.label.mean,
            "columns": columns,
        }


def describe(
    places: Sequence[str | Path],
    schema: Schema | None = None,
    *,
    batch_size: int = 2048,
    progress: Callable[[int], None] = lambda rows: None,
) -> Description:
    """Describe a data set.

    Args:
        places: files, folders or glob patterns; see `find_inputs`.
        schema: of the rows; None to take the one that travels in the first Parquet file.
        batch_size: examples of the batches in which distinct ids are counted.
        progress: called with the number of rows just read.

    Returns:
        The description.

    Raises:
        DataError: no input, no schema, a column absent or of a wrong type, or a file that is broken.
    """
    files = find_inputs(places, None if schema is None else schema.input.delimiter)
    schema = schema or _schema_of(files[0])
    labels = schema.label is not None and _has_column(files[0], schema)
    for file in files:
        check_file(file, schema, labels=labels, keys=False)
    converter = StorageConverter(schema, labels=labels, keys=False)
    found = Description(
        schema,
        len(files),
        RowCounts(),
        NumberStatistics() if labels else None,
        {f.name: NumberStatistics() for f in schema.dense},
    )
    ids = {feature.name: IdStatistics(feature, batch_size) for feature in schema.sparse}
    for file in files:
        for raw in read_rows(file, schema, labels=labels, keys=False):
            table, counts = converter(raw, str(file))
            found.counts += counts
            if found.label is not None:
                found.label.add(label_values(table.column(schema.label.column), schema.label, []))
            for feature in schema.dense:
                found.dense[feature.name].add(numbers(table.column(feature.column)))
            for feature in schema.sparse:
                ids[feature.name].add(table.column(feature.column))
            progress(counts.read)
    found.sparse = {name: statistics.summary() for name, statistics in ids.items()}
    return found


def _schema_of(file: InputFile) -> Schema:
    if file.format == "parquet":
        return Schema.from_parquet(file.path)
    raise DataError(f"{file}: a text file carries no schema.", "Name it with --schema, such as --schema criteo.")


def _has_column(file: InputFile, schema: Schema) -> bool:
    """Whether the label is there; rows that are to be scored may lack it. Text files follow the schema."""
    if file.format == "text":
        return True
    with open_parquet(file) as parquet:
        return schema.label.column in parquet.schema_arrow.names
