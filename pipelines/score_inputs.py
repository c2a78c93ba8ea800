"""What is to be scored: inputs found, checked before any work, cut into parts, and read in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tpurec.errors import DataError
from tpurec.features import Schema
from tpurec.features.transform import Transformer

PIECE_ROWS = 65_536


@dataclass(frozen=True)
class Part:
    """What one worker reads at a time.

    Args:
        path: the file.
        row_group: of a Parquet file; None for a text file, which is one part.
        first_row: number in the file of the part's first row.
    """

    path: str
    row_group: int | None
    first_row: int


@dataclass(frozen=True)
class Inputs:
    """All inputs, checked.

    Args:
        schema: what the rows must have.
        parts: in the order of the rows.
        key_types: key columns of the output, with their types; empty: a row number takes their place.
        num_rows: in all; None where text files do not tell.
        num_bytes: of the files.
    """

    schema: Schema
    parts: list[Part]
    key_types: Mapping[str, pa.DataType]
    num_rows: int | None
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """Some rows of a part.

    Args:
        table: raw rows, with the columns that scoring reads.
        keys: name to key column, of the same rows.
        source: the file, for error texts.
        first_row: number in the file of the first row.
        refused: rows that could not even be read, and why; by position in the piece.
        lines: line number, from 1, of every row of a text file.
    """

    table: pa.Table
    keys: Mapping[str, pa.ChunkedArray]
    source: str
    first_row: int
    refused: Mapping[int, str] = field(default_factory=dict)
    lines: Sequence[int] | None = None

    def name_of(self, position: int) -> str:
        """How people find a row.

        Args:
            position: in the piece.

        Returns:
            Such as `row 17 (from 0)` or `line 18`.
        """
        if self.lines is not None:
            return f"line {self.lines[position]}"
        return f"row {self.first_row + position} (from 0)"


def open_inputs(places: Sequence[str], schema: Schema, keys: Sequence[str]) -> Inputs:
    """Find the inputs and check names and types of their columns, before any row is read.

    Args:
        places: files, folders (searched in depth) or glob patterns; rows are numbered in this order, and by name within
            a place.
        schema: what the rows must have.
        keys: columns to carry to the scores.

    Returns:
        The inputs.

    Raises:
        DataError: nothing found, a file of another kind, one that lacks a column or has it as another type, or a key
            column whose type differs between files; names file and column.
    """
    transformer = Transformer(schema)
    parts: list[Part] = []
    key_types: dict[str, tuple[pa.DataType, Path]] = {}
    num_rows = num_bytes = 0
    for path in _find(places):
        with _parquet(path) as file:
            transformer.check(file.schema_arrow, str(path), labels=False)
            for key in keys:
                type_ = _key_type(file.schema_arrow, key, path)
                known, first = key_types.setdefault(key, (type_, path))
                if known != type_:
                    raise DataError(
                        f"{path}: key column {key!r} is {type_}, in {first} it is {known}.",
                        "Give it one type in all files, or leave it out of --keys.",
                    )
            first_row = 0
            for group in range(file.metadata.num_row_groups):
                parts.append(Part(str(path), group, first_row))
                first_row += file.metadata.row_group(group).num_rows
        num_rows += first_row
        num_bytes += path.stat().st_size
    return Inputs(schema, parts, {key: type_ for key, (type_, _) in key_types.items()}, num_rows, num_bytes)


def read_pieces(inputs: Inputs, part: Part) -> Iterator[Piece]:
    """Read a part.

    Args:
        inputs: what it is a part of.
        part: the part.

    Yields:
        Its rows, in order, at most `PIECE_ROWS` a piece.
    """
    schema, keys = inputs.schema, list(inputs.key_types)
    columns = schema.columns(labels=False)
    # Reading text as dictionaries means that an id that occurs often is parsed and hashed once.
    text = [f.column for f in schema.sparse if f.kind != "integer" and not f.multi_valued and f.column not in keys]
    first_row = part.first_row
    with _parquet(Path(part.path), text) as file:
        for batch in file.iter_batches(
            PIECE_ROWS, row_groups=[part.row_group], columns=list(dict.fromkeys([*columns, *keys])), use_threads=False
        ):
            table = pa.Table.from_batches([batch])
            yield Piece(table, {key: table.column(key) for key in keys}, part.path, first_row)
            first_row += len(table)


def _find(places: Sequence[str]) -> list[Path]:
    from pipelines.reading import find_files

    return [path for path, _ in find_files(list(places), "IN")]


def _parquet(path: Path, text: Sequence[str] = ()) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, read_dictionary=list(text))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file: {error}.") from None


def _key_type(found: pa.Schema, key: str, path: Path) -> pa.DataType:
    positions = found.get_all_field_indices(key)
    if len(positions) != 1:
        raise DataError(
            f"{path}: no column {key!r}, which is to be carried to the scores."
            if not positions
            else f"{path}: column {key!r} is there {len(positions)} times.",
            "Name the columns to carry with --keys.",
        )
    return found.field(positions[0]).type
