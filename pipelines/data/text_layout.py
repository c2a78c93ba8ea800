"""Where the columns are in a text file: by its header line, or else by the schema."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipelines.data.inputs import InputFile
from pipelines.data.text_lines import first_line
from tpurec.errors import DataError
from tpurec.features import Schema
from tpurec.features.arrow_columns import check_types


@dataclass(frozen=True)
class TextLayout:
    """How the lines of a text file become columns.

    Args:
        columns: names of the fields, in their order.
        header: the first line names the columns.
        delimiter: between fields.
        quoted: fields may stand between double quotes (CSV, not TSV).
        min_fields: rows with fewer fields are rejected; if it is less than the number of columns, missing last fields
            of a row are blanks.
    """

    columns: tuple[str, ...]
    header: bool
    delimiter: str
    quoted: bool
    min_fields: int


def find_layout(file: InputFile, schema: Schema, *, labels: bool = True, keys: bool = True) -> TextLayout:
    """Find the layout of a text file and check that it has every column the schema needs.

    The first line is a header if the schema says so, or if it names more than half of the schema's columns.

    Args:
        file: a text file.
        schema: what is needed.
        labels: the label column is needed.
        keys: the key columns are needed.

    Returns:
        The layout.

    Raises:
        DataError: a column is absent or there twice, or holds lists though the schema has no separator to split at;
            names file and column.
    """
    look = schema.input
    delimiter = look.delimiter or file.delimiter
    quoted = delimiter != "\t"
    wanted = schema.columns(labels=labels and schema.label is not None, keys=keys)
    fields = _fields(first_line(file), delimiter, quoted)
    header = look.header
    if header is None:
        header = 2 * len(set(wanted) & set(fields)) > len(wanted)
    columns = tuple(fields) if header else look.columns
    if not columns:
        raise DataError(
            f"{file}: the first line names no columns (it begins with {', '.join(map(repr, fields[:4]))}), and the "
            f"schema {schema.name!r} does not say what they are.",
            "Set input.columns in the schema to the names of all fields in their order.",
        )
    _check(file, columns, schema, labels, keys)
    # Only files in the schema's own order can have lost trailing blanks: elsewhere a short row is a broken row.
    pads = look.short_rows == "blank" and not header
    return TextLayout(columns, header, delimiter, quoted, max(look.min_fields, 1) if pads else len(columns))


def _fields(line: bytes, delimiter: str, quoted: bool) -> list[str]:
    text = line.decode("utf-8", "replace")
    return next(csv.reader([text], delimiter=delimiter), []) if quoted else text.split(delimiter)


def _check(file: InputFile, columns: Sequence[str], schema: Schema, labels: bool, keys: bool) -> None:
    """Every field is text; say at once what cannot come out of text, by the same check that typed files pass."""
    types = {field.name: field.type for field in schema.arrow_schema()}
    for feature in schema.sparse:
        if feature.multi_valued and not feature.separator:  # text cannot be split: the check refuses it
            types |= dict.fromkeys([feature.column, feature.weights], pa.string())
    found = pa.schema([pa.field(name, types.get(name, pa.string())) for name in columns])
    check_types(found, schema, str(file), labels=labels, keys=keys)
