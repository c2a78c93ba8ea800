"""Rows as a server gets them (one mapping per row), as an Arrow table: each is judged alone, and named if refused.

What passes has the storage types of training Parquet and goes through the same `Transformer`, so that online and
offline scores agree.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tpurec.features.arrow_columns import INTEGER_TEXT
from tpurec.features.columns import Columns
from tpurec.features.schema import Schema
from tpurec.features.transform import Transformer

_INT64 = range(-(2**63), 2**63)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NONE = type(None)


@dataclass(frozen=True)
class RowError:
    """Why one row was refused.

    Args:
        row: its number in the request, from 0.
        field: the field at fault; None if the row as a whole is.
        message: what is wrong and what is expected.
    """

    row: int
    field: str | None
    message: str


@dataclass(frozen=True)
class ParsedRows:
    """The good rows of a request.

    Args:
        table: their values in storage types, one column per field of the schema, label excluded.
        columns: the same, transformed; None from `table_from_rows`.
        good: int64 [num_good], their numbers in the request, ascending.
        errors: one or more per refused row, in order of rows.
    """

    table: pa.Table
    columns: Columns | None
    good: np.ndarray
    errors: list[RowError]


def table_from_rows(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> ParsedRows:
    """Check the fields of rows and put the good rows into a table.

    A field that is absent or None is a blank. The label and key columns may be among the fields; they are ignored.

    Args:
        schema: names and kinds of the fields.
        rows: one mapping of field to value per row: finite numbers; strings for kinds hex and text, whole numbers for
            kind integer; lists of these where multi-valued (or one string, if the schema has a separator).

    Returns:
        The good rows, and an error with row and field for each other one.
    """
    fields = _fields(schema)
    errors: list[RowError] = []
    rows = [_known(row, schema, fields, number, errors) for number, row in enumerate(rows)]
    arrays = {}
    for name, field in fields.items():
        arrays[name], found = field.parse([row.get(name) for row in rows])
        errors += [RowError(row, name, message) for row, message in found]
    table = pa.table(arrays)
    good = np.arange(len(rows))
    if errors:
        good = np.delete(good, sorted({error.row for error in errors}))
        table = table.take(pa.array(good))
    return ParsedRows(table, None, good, sorted(errors, key=lambda error: error.row))


def columns_from_rows(transformer: Transformer, rows: Sequence[Mapping[str, Any]]) -> ParsedRows:
    """Check rows and transform the good ones; an id without a row under policy `error` refuses its row only.

    Args:
        transformer: of the schema.
        rows: as for `table_from_rows`.

    Returns:
        The good rows, also transformed (without labels), and an error with row and field for each other one.
    """
    parsed = table_from_rows(transformer.schema, rows)
    columns, problems = transformer.collect(parsed.table, labels=False, source="request")
    if not problems:
        return ParsedRows(parsed.table, columns, parsed.good, parsed.errors)
    errors = list(parsed.errors)
    for problem in problems:
        for k, row in enumerate(problem.rows.tolist()):
            message = f"{problem.message(k)}. {problem.remedy}"
            errors.append(RowError(int(parsed.good[row]), problem.column, message))
    kept = np.setdiff1d(np.arange(columns.num_rows), np.concatenate([problem.rows for problem in problems]))
    columns = dataclasses.replace(columns.take(kept), counts=columns.counts)
    errors.sort(key=lambda error: error.row)
    return ParsedRows(parsed.table.take(pa.array(kept)), columns, parsed.good[kept], errors)


def _known(
    row: Any, schema: Schema, fields: Mapping[str, Any], number: int, errors: list[RowError]
) -> Mapping[str, Any]:
    """The row itself; an empty one, with an error noted, if it is no mapping or has a field that the schema lacks."""
    if not isinstance(row, Mapping):
        errors.append(RowError(number, None, f"a row is an object of fields, found {_shown(row)}"))
        return {}
    if row.keys() <= fields.keys():
        return row
    others = {*schema.keys, *([schema.label.column] if schema.label else [])}
    for name in row:
        if name not in fields and name not in others:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the fields are: {', '.join(fields)}"
            errors.append(RowError(number, str(name), f"the schema {schema.name!r} has no such field{hint}"))
    return row


@dataclass(frozen=True)
class _Field:
    """How the values of one field are checked and stored.

    Args:
        type: storage type.
        plain: Python types that Arrow may be given without a look at single values (it still checks their range).
        complain: judges one value that is not None; returns a message, or None if it is good.
        convert: makes a good value that is not None ready for Arrow.
    """

    type: pa.DataType
    plain: frozenset[type]
    complain: Callable[[Any], str | None]
    convert: Callable[[Any], Any]

    def parse(self, values: list[Any]) -> tuple[pa.Array, list[tuple[int, str]]]:
        """Values to storage; a bad value is null there and comes back as (row, message)."""
        if {*map(type, values)} <= self.plain:
            try:
                array = pa.array(values, type=self.type)
                if not pa.types.is_floating(self.type) or _all_finite(array):
                    return array, []
            except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
                pass  # the look at single values below says which and why
        found, converted = [], []
        for row, value in enumerate(values):
            message = None if value is None else self.complain(value)
            if message is not None:
                found.append((row, message))
            converted.append(None if value is None or message is not None else self.convert(value))
        return pa.array(converted, type=self.type), found


def _all_finite(array: pa.Array) -> bool:
    return bool(np.isfinite(array.drop_null().to_numpy(zero_copy_only=False)).all())


def _fields(schema: Schema) -> dict[str, _Field]:
    numeric = _Field(pa.float32(), frozenset({float, int, _NONE}), _complain_number, float)
    numeric_list = _Field(
        pa.list_(pa.float32()), frozenset({_NONE}), _list_complaint("a number", _complain_number, ""), _floats
    )
    fields = {dense.column: numeric for dense in schema.dense}
    for sparse in schema.sparse:
        if sparse.kind == "integer":
            one, what, complain, convert = pa.int64(), "a whole number", _complain_integer, int
            plain = frozenset({int, _NONE})
        else:
            one, what, complain, convert = pa.string(), f"a string ({sparse.kind})", _text_complaint(sparse.kind), str
            plain = frozenset({str, _NONE})
        fields[sparse.column] = _Field(one, plain, complain, convert)
        if sparse.multi_valued:
            complain_list = _list_complaint(what, complain, sparse.separator)
            fields[sparse.column] = _Field(
                pa.list_(one), frozenset({_NONE}), complain_list, _list_convert(sparse.separator, convert)
            )
        if sparse.weights:
            fields[sparse.weights] = numeric_list if sparse.multi_valued else numeric
    return fields


def _complain_number(value: Any) -> str | None:
    if not isinstance(value, (int, float)):
        return f"expected a number, found {_shown(value)}"
    if not abs(value) <= _FLOAT32_MAX:  # also false for NaN
        return (
            f"expected a finite number within float32, found {_cut(repr(value))}; leave it out, or null, if it is blank"
        )
    return None


def _complain_integer(value: Any) -> str | None:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool):
        return f"expected a whole number, found {_shown(value)}"
    return None if int(value) in _INT64 else f"expected a whole number within int64, found {_cut(repr(value))}"


def _text_complaint(kind: str) -> Callable[[Any], str | None]:
    def complain(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"expected a string ({kind}), found {_shown(value)}"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"expected text, found {value!r}, which is not valid Unicode"
        return None

    return complain


def _list_complaint(what: str, complain: Callable[[Any], str | None], separator: str) -> Callable[[Any], str | None]:
    expected = f"expected a list, each item {what}" + (f", or text split at {separator!r}" if separator else "")

    def complain_list(values: Any) -> str | None:
        if isinstance(values, str) and separator:
            values = _split(values, separator, complain is _complain_integer)
        if not isinstance(values, (list, tuple)):
            return f"{expected}; found {_shown(values)}"
        for position, value in enumerate(values):
            message = None if value is None else complain(value)
            if message is not None:
                return f"item {position}: {message}"
        return None

    return complain_list


def _list_convert(separator: str, convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def convert_list(values: Any) -> list[Any]:
        if isinstance(values, str):
            values = _split(values, separator, convert is int)
        return [None if value is None else convert(value) for value in values]

    return convert_list


def _split(text: str, separator: str, integers: bool) -> list[Any]:
    """Split as the offline path does: empty text has no piece, an empty piece is a blank."""
    pieces = text.split(separator) if text else []
    if not integers:
        return pieces
    return [(int(piece) if re.fullmatch(INTEGER_TEXT, piece) else piece) if piece else None for piece in pieces]


def _floats(values: Any) -> list[float | None]:
    return [None if value is None else float(value) for value in values]


def _shown(value: Any) -> str:
    names = {list: "list", tuple: "list", dict: "object", str: "string", bool: "boolean", _NONE: "null"}
    kind = names.get(type(value), "number" if isinstance(value, (int, float)) else type(value).__name__)
    return f"the {kind} {_cut(repr(value))}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
