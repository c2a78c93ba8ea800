"""Parquet files in pieces of rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data.inputs import InputFile
from pipelines.data.raw_rows import RawRows
from tpurec.errors import DataError

PIECE_ROWS = 1 << 15


def open_parquet(file: InputFile) -> pq.ParquetFile:
    """Open a Parquet file.

    Args:
        file: the file.

    Returns:
        The open file; close it, or use it as a context.

    Raises:
        DataError: it is not Parquet, or cannot be read.
    """
    try:
        return pq.ParquetFile(file.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: not a Parquet file: {error}.", "Check the path.") from None


def read_parquet(
    file: InputFile, columns: Sequence[str], row_groups: Sequence[int] | None = None, piece_rows: int = PIECE_ROWS
) -> Generator[RawRows]:
    """Read a Parquet file.

    Args:
        file: the file.
        columns: names of the columns wanted; all must be there.
        row_groups: which of its row groups, ascending; None for all.
        piece_rows: at most how many rows to give at a time.

    Yields:
        Rows in the order of the file.

    Raises:
        DataError: it is not Parquet, or is broken.
    """
    with open_parquet(file) as parquet:
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        for group in range(len(sizes)) if row_groups is None else row_groups:
            first = int(starts[group])
            try:
                for batch in parquet.iter_batches(piece_rows, [group], columns=list(columns), use_threads=False):
                    numbers = np.arange(first, first + batch.num_rows)
                    first += batch.num_rows
                    yield RawRows(pa.Table.from_batches([batch]), numbers, False)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: row group {group} cannot be read: {error}.", "The file is broken.") from None
