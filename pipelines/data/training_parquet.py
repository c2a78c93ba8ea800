"""Writes training Parquet: row groups of 65,536 rows, zstd, the schema in the metadata; files of bounded size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 1 << 16
FILE_ROWS = 8 * ROW_GROUP_ROWS
UNFINISHED = ".unfinished-"  # such names are left out by readers, and removed by the next run


@dataclass(frozen=True)
class WrittenFile:
    """A file that is complete.

    Args:
        name: in its folder.
        rows: in the file.
        bytes: of the file.
    """

    name: str
    rows: int
    bytes: int


class TrainingParquetWriter:
    """Context manager that writes rows into the files STEM-000.parquet, STEM-001.parquet and so on.

    Files get their names when the block ends well; if it ends by an exception, none is left.

    Args:
        folder: where; must exist.
        stem: of the file names.
        row_group_rows: rows of a row group, but for the last of a file.
        file_rows: rows of a file, but for the last; a multiple of `row_group_rows`.
    """

    def __init__(
        self, folder: Path, stem: str, *, row_group_rows: int = ROW_GROUP_ROWS, file_rows: int = FILE_ROWS
    ) -> None:
        self.folder, self.stem = folder, stem
        self.row_group_rows, self.file_rows = row_group_rows, file_rows
        self.files: list[WrittenFile] = []
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._discarded = False

    def __enter__(self) -> TrainingParquetWriter:
        return self

    def write(self, table: pa.Table) -> None:
        """Write rows.

        Args:
            table: any number of rows; every call with the same schema.
        """
        self._pending.append(table)
        self._pending_rows += table.num_rows
        while self._pending_rows >= self.row_group_rows:
            self._flush(self.row_group_rows)

    def discard(self) -> None:
        """Leave no file when the block ends, though it ends well."""
        self._discarded = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None or self._discarded
        try:
            if not failed and self._pending_rows:
                self._flush(self._pending_rows)
            self._close(keep=not failed)
        except BaseException:
            failed = True
            raise
        finally:
            for written in self.files:
                unfinished = self.folder / f"{UNFINISHED}{written.name}"
                if not failed:
                    os.replace(unfinished, self.folder / written.name)
                else:
                    unfinished.unlink(missing_ok=True)
            if failed:
                self.files.clear()

    def _flush(self, rows: int) -> None:
        table = pa.concat_tables(self._pending)
        if self._writer is None:
            self._name = f"{self.stem}-{len(self.files):03d}.parquet"
            path = self.folder / f"{UNFINISHED}{self._name}"
            self._writer = pq.ParquetWriter(path, table.schema, compression="zstd")
        self._writer.write_table(table.slice(0, rows), row_group_size=rows)
        self._rows += rows
        self._pending = [table.slice(rows)]
        self._pending_rows -= rows
        if self._rows >= self.file_rows:
            self._close(keep=True)

    def _close(self, keep: bool) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        path = self.folder / f"{UNFINISHED}{self._name}"
        try:
            writer.close()
        finally:
            if not keep:
                path.unlink(missing_ok=True)
        if keep:
            self.files.append(WrittenFile(self._name, self._rows, path.stat().st_size))
        self._rows = 0
