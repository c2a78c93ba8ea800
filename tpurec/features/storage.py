"""Raw columns (text from TSV and CSV, or typed ones) to the storage types of training Parquet.

Values stay raw: the transform runs when they are read, so that one converted file serves any change of transform.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpurec.features.arrow_columns import (
    Bags,
    check_types,
    empty_to_null,
    id_bags,
    integers_of_text,
    is_text,
    numbers,
    one_array,
    plain,
    split,
    weight_bags,
)
from tpurec.features.problems import Problem, integer_problem, refuse_infinite
from tpurec.features.schema import Schema
from tpurec.features.transform import label_values
from tpurec.features.weights import match_weights, refuse_bad_weights

# What Arrow's cast of text to float64 takes; "nan" is a blank like NaN, "inf" is then refused as infinite.
_NUMBER = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:nan|inf|infinity))$"


def to_storage(
    table: pa.Table | pa.RecordBatch, schema: Schema, source: str, *, labels: bool = True, keys: bool = True
) -> tuple[pa.Table, list[Problem]]:
    """Convert rows to the types of `schema.arrow_schema()`.

    Args:
        table: N rows; every column may be text (an empty one is a blank) or a type that the transform accepts.
        schema: what is needed; other columns are left out.
        source: file name for error texts.
        labels: convert the label column.
        keys: keep the key columns, in the type they have.

    Returns:
        N rows in storage types with the schema in their metadata, and the problems; a value at fault is null.

    Raises:
        DataError: a column absent or of a wrong type.
    """
    problems: list[Problem] = []
    table = _parse_text(table, schema, problems, labels)
    check_types(table.schema, schema, source, labels=labels, keys=keys)
    arrays: dict[str, pa.Array] = {}
    if labels:
        label_values(table.column(schema.label.column), schema.label, problems)  # only to judge them
        arrays[schema.label.column] = _stored_numbers(numbers(table.column(schema.label.column)))
    for dense in schema.dense:
        values = numbers(table.column(dense.column))
        refuse_infinite(dense.column, values, problems)
        arrays[dense.column] = _stored_numbers(values)
    for sparse in schema.sparse:
        bags = id_bags(table.column(sparse.column), sparse)
        if len(bags.faults):
            problems.append(integer_problem(bags, sparse))
        stored_ids = _stored(bags, pa.int64() if sparse.kind == "integer" else pa.string())
        arrays[sparse.column] = _in_bags(stored_ids, bags.lengths)
        if sparse.weights:
            weights = weight_bags(table.column(sparse.weights), sparse)
            matched, values = match_weights(Bags(stored_ids, bags.lengths), weights, sparse, problems)
            refuse_bad_weights(matched, ~_is_null(matched.values), values, sparse, problems)
            arrays[sparse.weights] = _in_bags(_stored_numbers(numbers(weights.values)), weights.lengths)
    order = schema.arrow_schema(labels)
    arrays = {name: arrays[name] for name in order.names}
    for key in schema.keys if keys else ():
        arrays.setdefault(key, one_array(table.column(key)))
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    return pa.Table.from_arrays(list(arrays.values()), schema=pa.schema(fields, metadata=order.metadata)), problems


def _parse_text(
    table: pa.Table | pa.RecordBatch, schema: Schema, problems: list[Problem], labels: bool
) -> pa.Table | pa.RecordBatch:
    """Replace text by numbers where the schema wants numbers."""
    # Ids first: a column that is an id and a number must not lose digits of the id.
    for sparse in schema.sparse:
        if sparse.kind == "integer" and not sparse.multi_valued and _has_text(table, sparse.column):
            bags = integers_of_text(one_array(table.column(sparse.column)), None)
            if len(bags.faults):
                problems.append(integer_problem(bags, sparse))
            table = _replaced(table, sparse.column, bags.values)
        if sparse.weights and sparse.separator and _has_text(table, sparse.weights):
            pieces, lengths = split(one_array(table.column(sparse.weights)), sparse.separator)
            values, bad = _numbers_of_text(pieces)
            _report(sparse.weights, Bags(values, lengths).row_of(bad), table, problems)
            table = _replaced(table, sparse.weights, _in_bags(values, lengths))
    wanted = [schema.label.column] if labels and schema.label is not None else []
    wanted += [dense.column for dense in schema.dense]
    wanted += [sparse.weights for sparse in schema.sparse if sparse.weights and not sparse.multi_valued]
    for column in dict.fromkeys(wanted):
        if _has_text(table, column):
            values, bad = _numbers_of_text(one_array(table.column(column)))
            _report(column, bad, table, problems)
            table = _replaced(table, column, values)
    return table


def _has_text(table: pa.Table | pa.RecordBatch, column: str) -> bool:
    found = table.schema.get_all_field_indices(column)
    return len(found) == 1 and is_text(plain(table.schema.field(found[0]).type))


def _replaced(table: pa.Table | pa.RecordBatch, column: str, values: pa.Array) -> pa.Table | pa.RecordBatch:
    return table.set_column(table.schema.get_field_index(column), column, values)


def _report(column: str, rows: np.ndarray, table: pa.Table | pa.RecordBatch, problems: list[Problem]) -> None:
    if len(rows):
        found = one_array(table.column(column)).take(pa.array(rows))
        message = lambda k: f"{found[k].as_py()!r} is not a number"  # noqa: E731
        problems.append(Problem(column, "not_a_number", rows, message, "Correct the value, or leave it blank."))


def _numbers_of_text(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """float64 values, null where blank or bad; and the positions of the bad ones."""
    texts = empty_to_null(texts.cast(pa.large_string()))
    try:
        return texts.cast(pa.float64()), np.empty(0, dtype=np.int64)
    except pa.ArrowInvalid:  # rare: only now is each value looked at
        good = pc.match_substring_regex(texts, _NUMBER)
        values = pc.if_else(good, texts, pa.scalar(None, texts.type)).cast(pa.float64())
        return values, np.flatnonzero(pc.equal(good, False).fill_null(False).to_numpy(zero_copy_only=False))


def _stored_numbers(values: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.float32), mask=~np.isfinite(values))


def _stored(bags: Bags, type_: pa.DataType) -> pa.Array:
    values = bags.values
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return (values if type_ == pa.int64() else empty_to_null(values)).cast(type_)


def _is_null(values: pa.Array) -> np.ndarray:
    return values.is_null().to_numpy(zero_copy_only=False)


def _in_bags(values: pa.Array, lengths: np.ndarray | None) -> pa.Array:
    if lengths is None:
        return values
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)
