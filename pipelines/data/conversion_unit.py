"""The piece of work that one process converts at a time: a file, or a range of a large one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.data.inputs import InputFile
from pipelines.data.parquet_rows import open_parquet
from pipelines.data.readers import read_rows
from pipelines.data.row_counts import RowCounts
from pipelines.data.stored_rows import StorageConverter
from pipelines.data.text_lines import count_lines, line_ranges
from pipelines.data.training_parquet import FILE_ROWS, TrainingParquetWriter, WrittenFile
from tpurec.errors import DataError
from tpurec.features import Schema

RANGE_BYTES = 256 << 20
# Without a stated limit a unit gives up early only where nothing can come of it.
HOPELESS_ROWS, HOPELESS_SHARE = 100_000, 0.1


@dataclass(frozen=True)
class ConversionUnit:
    """What to read.

    Args:
        file: the input.
        size: of the input, in bytes, when the work was planned.
        modified: of the input, in nanoseconds, likewise.
        start: first byte of a text file; first row group of a Parquet file.
        stop: behind the last; None for the end of a compressed file.
        stem: of the names of the files to write.
    """

    file: InputFile
    size: int
    modified: int
    start: int
    stop: int | None
    stem: str

    def identity(self) -> dict[str, Any]:
        """What must be unchanged for a finished unit to count as this one; plain values."""
        return {
            "path": os.path.abspath(self.file.path),
            "size": self.size,
            "modified": self.modified,
            "start": self.start,
            "stop": self.stop,
        }


@dataclass(frozen=True)
class UnitResult:
    """What came of a unit.

    Args:
        unit: the unit.
        files: written, complete.
        counts: of its rows.
        gave_up: too many bad rows: nothing was written.
    """

    unit: ConversionUnit
    files: tuple[WrittenFile, ...]
    counts: RowCounts
    gave_up: bool = False


def plan_units(index: int, file: InputFile) -> list[ConversionUnit]:
    """Cut an input into units.

    Args:
        index: position of the input among all.
        file: the input.

    Returns:
        The units, in the order of the rows.

    Raises:
        DataError: the file cannot be read.
    """
    status = file.path.stat()
    if file.format == "text":
        spans: list[tuple[int, int | None]] = line_ranges(file, RANGE_BYTES)
    else:
        spans = []
        start = rows = 0
        with open_parquet(file) as parquet:
            for group in range(parquet.metadata.num_row_groups):
                rows += parquet.metadata.row_group(group).num_rows
                if rows >= 2 * FILE_ROWS:
                    spans.append((start, group + 1))
                    start, rows = group + 1, 0
            if rows or not spans:
                spans.append((start, parquet.metadata.num_row_groups))
    return [
        ConversionUnit(file, status.st_size, status.st_mtime_ns, start, stop, f"{index:05d}-{number:04d}")
        for number, (start, stop) in enumerate(spans)
    ]


def convert_unit(
    unit: ConversionUnit,
    folder: Path,
    schema: Schema,
    max_bad_rows: int | None,
    progress: Callable[[int], None],
) -> UnitResult:
    """Convert a unit.

    Args:
        unit: what to read.
        folder: where to write.
        schema: of the rows; its label and keys are converted too.
        max_bad_rows: give up beyond this many rejected rows; None: only where it is hopeless.
        progress: called with the number of rows just read.

    Returns:
        Files and counts.

    Raises:
        DataError: the input is broken, or has changed since the work was planned.
    """
    labels = schema.label is not None
    converter = StorageConverter(schema, labels=labels)
    counts = RowCounts()
    gave_up = False
    pieces = read_rows(unit.file, schema, labels=labels, start=unit.start, stop=unit.stop)
    with contextlib.closing(pieces), TrainingParquetWriter(folder, unit.stem) as writer:
        for raw in pieces:
            table, piece = converter(raw, str(unit.file))
            counts += piece
            progress(piece.read)
            if _is_too_much(counts, max_bad_rows):
                gave_up = True
                writer.discard()
                break
            if table.num_rows:
                writer.write(table)
    status = unit.file.path.stat()
    if (status.st_size, status.st_mtime_ns) != (unit.size, unit.modified):
        raise DataError(f"{unit.file}: was changed while it was read.", "Run the command again when it is complete.")
    if unit.file.format == "text" and unit.start and counts.examples:
        before = count_lines(unit.file, unit.start)
        counts.examples = [dataclasses.replace(row, number=row.number + before) for row in counts.examples]
    return UnitResult(unit, tuple(writer.files), counts, gave_up)


def _is_too_much(counts: RowCounts, max_bad_rows: int | None) -> bool:
    if max_bad_rows is not None:
        return counts.num_rejected > max_bad_rows
    return counts.read >= HOPELESS_ROWS and counts.num_rejected > HOPELESS_SHARE * counts.read
