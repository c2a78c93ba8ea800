"""One way to read the rows of any file that a command takes."""

from __future__ import annotations

from collections.abc import Generator

from pipelines.data.inputs import InputFile
from pipelines.data.parquet_rows import open_parquet, read_parquet
from pipelines.data.raw_rows import RawRows
from pipelines.data.text_layout import find_layout
from pipelines.data.text_rows import read_text
from tpurec.features import Schema
from tpurec.features.arrow_columns import check_types


def check_file(file: InputFile, schema: Schema, *, labels: bool = True, keys: bool = True) -> None:
    """Check names and types of a file's columns; no row is read.

    Args:
        file: the file.
        schema: what its rows must have.
        labels: the label column is needed.
        keys: the key columns are needed.

    Raises:
        DataError: naming file and column.
    """
    if file.format == "text":
        find_layout(file, schema, labels=labels, keys=keys)
    else:
        with open_parquet(file) as parquet:
            check_types(parquet.schema_arrow, schema, str(file), labels=labels, keys=keys)


def read_rows(
    file: InputFile, schema: Schema, *, labels: bool = True, keys: bool = True, start: int = 0, stop: int | None = None
) -> Generator[RawRows]:
    """Read a file, or a part of it, in pieces; memory does not depend on its size.

    Args:
        file: the file.
        schema: says which columns to read, and how text files look.
        labels: read the label column.
        keys: read the key columns.
        start: first byte of a plain text file (of `line_ranges`), or first row group of a Parquet file.
        stop: behind the last; None for the end of the file.

    Returns:
        A generator of rows in the order of the file; close it if it is not read to its end.

    Raises:
        DataError: a column absent or of a wrong type, or a file that is broken.
    """
    columns = schema.columns(labels=labels, keys=keys)
    if file.format == "text":
        return read_text(file, find_layout(file, schema, labels=labels, keys=keys), columns, start=start, stop=stop)
    with open_parquet(file) as parquet:
        stop = parquet.metadata.num_row_groups if stop is None else stop
    return read_parquet(file, columns, range(start, stop))
