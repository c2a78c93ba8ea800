"""What is to be scored: inputs found, checked before any work, and cut into parts that can be read apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipelines.data.inputs import InputFile, find_inputs
from pipelines.data.parquet_rows import open_parquet
from pipelines.data.raw_rows import RawRows
from pipelines.data.readers import check_file, read_rows
from pipelines.data.text_lines import count_lines, line_ranges
from tpurec.errors import ConfigError, DataError
from tpurec.features import Schema

RANGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """What one worker reads at a time: a row group of a Parquet file, or a range of lines of a text file.

    Args:
        file: the file.
        start: row group, or first byte of the range.
        stop: behind it; None for the end of the file.
    """

    file: InputFile
    start: int
    stop: int | None

    def lines_before(self) -> int:
        """Lines of a text file before the part; reads them, so ask only when a line must be named."""
        return count_lines(self.file, self.start) if self.file.format == "text" else 0


@dataclass(frozen=True)
class Inputs:
    """All inputs, checked.

    Args:
        schema: what the rows must have; its keys are the columns to carry.
        parts: in the order of the rows.
        key_types: the key columns with their types; empty: a row number takes their place.
        num_rows: in all; None where text files do not tell.
        num_bytes: of the files.
    """

    schema: Schema
    parts: list[Part]
    key_types: Mapping[str, pa.DataType]
    num_rows: int | None
    num_bytes: int


def open_inputs(places: Sequence[str], schema: Schema, keys: Sequence[str], unlabelled: bool = False) -> Inputs:
    """Find the inputs and check names and types of their columns, before any row is read.

    Args:
        places: files, folders or glob patterns, see `find_inputs`; rows are numbered in this order.
        schema: what the rows must have, but for the label.
        keys: columns to carry to the scores.
        unlabelled: text files without a header lack the label column that the schema lists.

    Returns:
        The inputs.

    Raises:
        DataError: nothing found, a file of unknown kind, one that lacks a column or has it as another type, or a key
            column whose type differs between files; names file and column.
        ConfigError: `unlabelled`, but the schema lists no label column.
    """
    schema = dataclasses.replace(schema, keys=tuple(keys))
    if unlabelled:
        schema = _without_label(schema)
    files = find_inputs(places, schema.input.delimiter)
    parts: list[Part] = []
    key_types: dict[str, pa.DataType] = {}
    num_rows: int | None = 0
    for file in files:
        check_file(file, schema, labels=False)
        if file.format == "text":
            parts += [Part(file, start, stop) for start, stop in line_ranges(file, RANGE_BYTES)]
            types, num_rows = dict.fromkeys(keys, pa.string()), None
        else:
            with open_parquet(file) as parquet:
                groups = parquet.metadata.num_row_groups
                types = {key: parquet.schema_arrow.field(key).type for key in keys}
                num_rows = None if num_rows is None else num_rows + parquet.metadata.num_rows
            parts += [Part(file, group, group + 1) for group in range(groups)]
        for key, type_ in types.items():
            if key_types.setdefault(key, type_) != type_:
                raise DataError(
                    f"{file}: key column {key!r} is {type_}, in {files[0]} it is {key_types[key]}.",
                    "Give it one type in all files, or choose the columns to carry with --keys.",
                )
    return Inputs(schema, parts, key_types, num_rows, sum(file.path.stat().st_size for file in files))


def read_part(inputs: Inputs, part: Part) -> Iterator[RawRows]:
    """Read a part.

    Args:
        inputs: what it is a part of.
        part: the part.

    Returns:
        An iterator of its rows, in order, with the columns that scoring reads and the key columns, in pieces of bounded
        size.

    Raises:
        DataError: the file is broken or cut short.
    """
    return read_rows(part.file, inputs.schema, labels=False, start=part.start, stop=part.stop)


def _without_label(schema: Schema) -> Schema:
    look, label = schema.input, schema.label.column if schema.label is not None else None
    if label not in look.columns:
        raise ConfigError(
            f"--unlabelled: the schema {schema.name!r} lists no label among the columns of text files.",
            "Leave it out: the label is read from no file that is scored.",
        )
    columns = tuple(name for name in look.columns if name != label)
    look = dataclasses.replace(look, columns=columns, min_fields=max(look.min_fields - 1, 1))
    return dataclasses.replace(schema, input=look)
