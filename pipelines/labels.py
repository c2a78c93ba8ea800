"""Training rows must have labels: looked for before a run starts, in the footers and in one column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.order import Manifest
from tpurec.errors import DataError
from tpurec.features import LabelColumn, Schema
from tpurec.features.transform import label_values


def check_labels(train: Manifest, schema: Schema) -> None:
    """Refuse training data without a label: a night of steps would change nothing.

    Reads the label column, row group by row group, up to the first label; row groups whose footer says that all of it
    is null are passed over.

    Args:
        train: the training data, of which every file has the label's column.
        schema: says which column, and what stands for a missing label.

    Raises:
        DataError: no row has a label; naming column, rows and files.
    """
    label = schema.label
    assert label is not None, "scanned with labels"
    try:
        if any(_has_label(Path(file.path), label) for file in train.files):
            return
    except (pa.ArrowException, OSError):
        return  # a damaged file: whoever reads its rows names it
    missing = "null, NaN" if label.missing is None else f"null, NaN or {label.missing:g}"
    raise DataError(
        f"data.train: column {label.column!r}: no label in any of {train.num_rows} rows of {len(train.files)} files "
        f"(all are {missing}): there is nothing to learn from.",
        "Give rows with labels, or name the column that has them in the schema (label.column).",
    )


def _has_label(path: Path, label: LabelColumn) -> bool:
    with pq.ParquetFile(path) as stream:
        for number in range(stream.num_row_groups):
            if _is_null(stream.metadata.row_group(number), label.column):
                continue
            column = stream.read_row_group(number, columns=[label.column]).column(label.column)
            if not np.isnan(label_values(column, label, [])).all():
                return True
    return False


def _is_null(group: pq.RowGroupMetaData, column: str) -> bool:
    """Whether the footer says so of a column; what it does not say, the values do."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema == column:
            statistics = chunk.statistics
            return statistics is not None and statistics.has_null_count and statistics.null_count == group.num_rows
    return False
