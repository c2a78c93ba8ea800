"""Text files (TSV, CSV) in pieces of rows: bad lines are set apart, the rest is parsed by Arrow.

The rule for short rows: where the schema says `short_rows = "blank"` and the file has no header, a row with fewer
fields than columns, but at least `min_fields`, is padded with blanks, provided that its last field is not blank. What
strips trailing blanks leaves no trailing tab, so a short row that ends in one was broken otherwise, and is rejected.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Generator

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from pipelines.data.inputs import InputFile
from pipelines.data.raw_rows import RawRows, Unreadable
from pipelines.data.text_layout import TextLayout
from pipelines.data.text_lines import BLOCK_BYTES, line_blocks

_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_SHOWN_CHARACTERS = 60


def read_text(
    file: InputFile,
    layout: TextLayout,
    columns: list[str],
    *,
    start: int = 0,
    stop: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Generator[RawRows]:
    """Read a text file, or a range of a plain one.

    Args:
        file: the file.
        layout: of the file.
        columns: names of the columns wanted.
        start: first byte, of `line_ranges`.
        stop: behind the last byte, of `line_ranges`.
        block_bytes: about how much to read at a time; memory is a small multiple of it.

    Yields:
        Rows in the order of the file, text in every column, blank fields null. Line numbers count from `start`.

    Raises:
        DataError: compressed data that is broken or cut short, or a line that is too long.
    """
    first = 1
    blocks = line_blocks(file, start, stop, block_bytes)
    with contextlib.closing(blocks):
        for block in blocks:
            block = block if block.endswith(b"\n") else block + b"\n"
            num_lines = block.count(b"\n")
            if first == 1 and start == 0 and layout.header:
                block = block[block.index(b"\n") + 1 :]
                if block:
                    yield _Block(block, 2, layout).rows(columns)
            else:
                yield _Block(block, first, layout).rows(columns)
            first += num_lines


class _Block:
    """Whole lines of a file, of which the first has number `first`."""

    def __init__(self, block: bytes, first: int, layout: TextLayout) -> None:
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        self.layout = layout
        self.first = first
        self.bytes = np.frombuffer(block, np.uint8)
        self.ends = np.flatnonzero(self.bytes == _NEWLINE)
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        self.num_fields = self._count(ord(layout.delimiter)) + 1
        # Reason of each line that cannot be a row.
        self.faults: dict[int, tuple[str, str]] = {}

    def rows(self, columns: list[str]) -> RawRows:
        self._find_faults()
        clean, padded, kept = self._clean()
        try:
            table = self._parse(clean, columns)
        except pa.ArrowInvalid:  # Arrow checks UTF-8 but does not say where: look at every line
            self._find_undecodable(kept)
            clean, padded, kept = self._clean()
            table = self._parse(clean, columns)
        unreadable = tuple(
            Unreadable(self.first + line, reason, message) for line, (reason, message) in sorted(self.faults.items())
        )
        return RawRows(table, kept + self.first, True, unreadable, padded)

    def _count(self, byte: int) -> np.ndarray:
        positions = np.flatnonzero(self.bytes == byte)
        return np.diff(np.searchsorted(positions, self.ends), prepend=0)

    def _line(self, line: int) -> bytes:
        return self.bytes[self.starts[line] : self.ends[line]].tobytes()

    def _find_faults(self) -> None:
        if self.layout.quoted:
            self._count_quoted_fields()
        for line in np.flatnonzero(self._count(_RETURN)):
            self.faults[int(line)] = ("stray_carriage_return", "a carriage return in mid-line")
        wanted = len(self.layout.columns)
        empty = self.starts == self.ends
        blank_end = self.bytes[np.maximum(self.ends - 1, 0)] == ord(self.layout.delimiter)
        for line in np.flatnonzero(empty):
            self.faults.setdefault(int(line), ("empty_line", "the line is empty"))
        for line in np.flatnonzero(self.num_fields > wanted):
            self.faults.setdefault(int(line), ("too_many_fields", f"{self.num_fields[line]} fields, {wanted} expected"))
        short = self.num_fields < wanted
        self.pad = short & (self.num_fields >= self.layout.min_fields) & ~blank_end & ~empty
        for line in np.flatnonzero(short & ~self.pad):
            self.faults.setdefault(int(line), ("too_few_fields", self._complain_of_short(int(line), wanted)))

    def _complain_of_short(self, line: int, wanted: int) -> str:
        at_least = self.layout.min_fields
        found = self.num_fields[line]
        if at_least <= found:
            return f"{found} fields, {wanted} expected; it ends in a blank field, so no trailing blanks were stripped"
        return f"{found} fields, {wanted} expected" + (f" (at least {at_least})" if at_least < wanted else "")

    def _count_quoted_fields(self) -> None:
        for line in np.flatnonzero(self._count(_QUOTE)):
            text = self._line(line).decode("utf-8", "replace")
            try:
                self.num_fields[line] = len(next(csv.reader([text], delimiter=self.layout.delimiter, strict=True)))
            except (csv.Error, StopIteration):
                shown = text[:_SHOWN_CHARACTERS]
                self.faults[int(line)] = ("bad_quotes", f"a quoted field does not end on its line: {shown!r}")

    def _find_undecodable(self, lines: np.ndarray) -> None:
        for line in lines:
            raw = self._line(line)
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as error:
                shown = raw[max(error.start - 8, 0) : error.start + 8]
                self.faults[int(line)] = ("not_utf8", f"not UTF-8 near {shown!r}")

    def _clean(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Bytes without the faulty lines and with short rows padded; the number of these; the lines that are left."""
        kept = np.ones(self.ends.size, bool)
        kept[list(self.faults)] = False
        if kept.all() and not self.pad.any():
            return self.bytes, 0, np.arange(self.ends.size)
        lengths = self.ends + 1 - self.starts
        clean = self.bytes[np.repeat(kept, lengths)]
        lines = np.flatnonzero(kept)
        missing = np.where(self.pad, len(self.layout.columns) - self.num_fields, 0)[lines]
        ends = np.cumsum(lengths[lines]) - 1
        clean = np.insert(clean, np.repeat(ends, missing), ord(self.layout.delimiter))
        return clean, int(np.count_nonzero(missing)), lines

    def _parse(self, clean: np.ndarray, columns: list[str]) -> pa.Table:
        schema = pa.schema([pa.field(name, pa.string()) for name in columns])
        if clean.size == 0:
            return schema.empty_table()
        return pacsv.read_csv(
            pa.BufferReader(pa.py_buffer(clean)),
            pacsv.ReadOptions(use_threads=False, block_size=clean.size + 1, column_names=list(self.layout.columns)),
            pacsv.ParseOptions(
                delimiter=self.layout.delimiter,
                quote_char='"' if self.layout.quoted else False,
                double_quote=self.layout.quoted,
                ignore_empty_lines=False,
            ),
            pacsv.ConvertOptions(
                column_types=schema, include_columns=columns, null_values=[""], strings_can_be_null=True
            ),
        )
