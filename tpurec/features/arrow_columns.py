"""Arrow columns as they come in the world, made plain: numbers, ids and bags of ids; and the check of their types."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpurec.errors import DataError
from tpurec.features.feature_specs import SparseFeature
from tpurec.features.schema import Schema

# How an integer is written in text.
INTEGER_TEXT = "-?[0-9]+"


@dataclass(frozen=True)
class Bags:
    """Values of a column, flat.

    Args:
        values: Arrow array [num_values], perhaps dictionary-encoded, perhaps with nulls.
        lengths: int64 [N], values per example; None: exactly one value (or null) each.
        faults: int64 [n], ascending positions of values that are no int64 though the kind is integer; null in `values`.
        faulty: the values as they came, if there are faults.
    """

    values: pa.Array
    lengths: np.ndarray | None
    faults: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    faulty: pa.Array | None = None

    def row_of(self, positions: np.ndarray) -> np.ndarray:
        """Example numbers of values.

        Args:
            positions: int [n], positions in `values`.

        Returns:
            int64 [n].
        """
        if self.lengths is None:
            return positions.astype(np.int64, copy=False)
        return np.searchsorted(np.cumsum(self.lengths), positions, side="right")


def check_types(found: pa.Schema, schema: Schema, source: str, *, labels: bool = True, keys: bool = False) -> None:
    """Check that every column the schema needs is there, once, as a type it can have; run it before work begins.

    Args:
        found: Arrow schema of a file or table.
        schema: what is needed.
        source: file name for the error text.
        labels: the label column is needed.
        keys: the key columns are needed.

    Raises:
        DataError: naming source, column, the type found and the types expected.
    """
    if labels:
        if schema.label is None:
            raise DataError(f"{source}: the schema {schema.name!r} names no label.", "Add [label] column = ... to it.")
        _check_number(found, schema.label.column, source, "the label")
    for dense in schema.dense:
        _check_number(found, dense.column, source, f"dense feature {dense.name!r}")
    for sparse in schema.sparse:
        _check_ids(found, sparse, source)
        if sparse.weights:
            _check_weights(found, sparse, source)
    for key in schema.keys if keys else ():
        _type_of(found, key, source, "a key column")


def _type_of(found: pa.Schema, column: str, source: str, role: str) -> pa.DataType:
    positions = found.get_all_field_indices(column)
    if not positions:
        raise DataError(
            f"{source}: no column {column!r} ({role} of the schema); there are: {_names(found)}.",
            "Add the column, or use the schema that this data was made with.",
        )
    if len(positions) > 1:
        raise DataError(f"{source}: column {column!r} is there {len(positions)} times.", "Keep one of them.")
    return found.field(positions[0]).type


def _names(found: pa.Schema) -> str:
    return ", ".join(found.names[:8]) + (f", ... ({len(found.names)} columns)" if len(found.names) > 8 else "")


def _check_number(found: pa.Schema, column: str, source: str, role: str) -> None:
    type_ = _type_of(found, column, source, role)
    if not is_number(plain(type_)):
        raise _mismatch(source, column, type_, "a number (such as float32 or int32)", role)


def _check_ids(found: pa.Schema, feature: SparseFeature, source: str) -> None:
    role = f"sparse feature {feature.name!r}"
    type_ = _type_of(found, feature.column, source, role)
    one = "integers (such as int64)" if feature.kind == "integer" else f"strings ({feature.kind})"
    expected = one
    inner = plain(type_)
    if feature.multi_valued:
        expected = f"a list of {one}" + (f", or text split at {feature.separator!r}" if feature.separator else "")
        if _is_list(type_):
            inner = plain(type_.value_type)
        elif not (pa.types.is_null(inner) or (feature.separator and is_text(inner))):
            remedy = "Set the feature's separator." if is_text(inner) else ""
            raise _mismatch(source, feature.column, type_, expected, role, remedy)
        elif feature.separator:
            return
    if not (pa.types.is_null(inner) or (_is_id_number(inner) if feature.kind == "integer" else is_text(inner))):
        raise _mismatch(source, feature.column, type_, expected, role)


def _check_weights(found: pa.Schema, feature: SparseFeature, source: str) -> None:
    role = f"weights of sparse feature {feature.name!r}"
    type_ = _type_of(found, feature.weights, source, role)
    if feature.multi_valued and _is_list(type_) and is_number(plain(type_.value_type)):
        return
    if pa.types.is_null(type_) or (not feature.multi_valued and is_number(plain(type_))):
        return
    expected = "a list of numbers, one per id" if feature.multi_valued else "a number"
    raise _mismatch(source, feature.weights, type_, expected, role)


def _mismatch(source: str, column: str, found: pa.DataType, expected: str, role: str, remedy: str = "") -> DataError:
    return DataError(
        f"{source}: column {column!r} ({role}) is {found}, expected {expected}.",
        remedy or "Convert the column, or change the schema.",
    )


def numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A column of numbers, rounded to float32 as training Parquet stores them.

    Args:
        column: any Arrow number or bool type, or null type.

    Returns:
        float64 [N]; NaN where blank; infinite also where beyond float32.
    """
    array = _decoded(one_array(column))
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if pa.types.is_float32(array.type) or pa.types.is_float16(array.type):
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)


def id_bags(column: pa.Array | pa.ChunkedArray, feature: SparseFeature) -> Bags:
    """The ids of a sparse feature.

    Args:
        column: of a type that `check_types` lets pass.
        feature: tells kind and separator.

    Returns:
        Values as string or large_string, or as int64 for kind integer, or a dictionary of these; null where blank.

    Raises:
        DataError: binary values that are not UTF-8.
    """
    array = one_array(column)
    if not feature.multi_valued:
        return _bags(array, None, feature)
    if _is_list(array.type):
        return _bags(array.flatten(), _list_lengths(array), feature)
    array = _decoded(array)
    if pa.types.is_null(array.type):
        return _bags(array.slice(0, 0), np.zeros(len(array), dtype=np.int64), feature)
    pieces, lengths = split(array, feature.separator)
    return integers_of_text(pieces, lengths) if feature.kind == "integer" else Bags(pieces, lengths)


def split(texts: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray]:
    """Split text at a separator.

    Args:
        texts: Arrow text [N]; empty text and null have no piece.
        separator: what stands between two pieces.

    Returns:
        The pieces, flat, and int64 [N] pieces per text.
    """
    lists = pc.split_pattern(empty_to_null(_as_text(_decoded(texts))), pattern=separator)
    return lists.flatten(), _list_lengths(lists)


def integers_of_text(texts: pa.Array, lengths: np.ndarray | None) -> Bags:
    """Integer ids written as text.

    Args:
        texts: Arrow text [n]; empty text is a blank.
        lengths: of the bags.

    Returns:
        int64 values; what is no integer is a fault.
    """
    texts = empty_to_null(_as_text(_decoded(texts)))
    return _whole_numbers(texts, pc.match_substring_regex(texts, f"^{INTEGER_TEXT}$"), lengths)


def _bags(values: pa.Array, lengths: np.ndarray | None, feature: SparseFeature) -> Bags:
    if pa.types.is_dictionary(values.type):
        if feature.kind == "integer" or len(values.dictionary) > len(values):  # else a dictionary mapped for few rows
            values = values.dictionary_decode()
        else:
            return Bags(pa.DictionaryArray.from_arrays(values.indices, _as_text(values.dictionary)), lengths)
    if feature.kind != "integer":
        return Bags(_as_text(values), lengths)
    if not pa.types.is_floating(values.type):
        return _whole_numbers(values, None, lengths)
    # pandas writes integers with blanks as floats, and NaN for the blanks.
    values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values.cast(pa.float64()))
    # 2**63 is a float64, 2**63 - 1 is not.
    in_range = pc.and_(pc.greater_equal(values, -(2.0**63)), pc.less(values, 2.0**63))
    return _whole_numbers(values, pc.and_(in_range, pc.equal(pc.floor(values), values)), lengths)


def _whole_numbers(values: pa.Array, possible: pa.Array | None, lengths: np.ndarray | None) -> Bags:
    """Cast to int64; what cannot be becomes null and a fault. `possible` is false where a look already says so."""
    if possible is not None and not pc.all(possible).as_py():
        faults = np.flatnonzero(pc.equal(possible, False).fill_null(False).to_numpy(zero_copy_only=False))
        good = pc.if_else(possible, values, pa.scalar(None, values.type))
        rest = _whole_numbers(good, None, lengths)
        return Bags(rest.values, lengths, np.union1d(faults, rest.faults), values)
    try:
        return Bags(values.cast(pa.int64()), lengths)
    except pa.ArrowInvalid:  # beyond int64: uint64, or text
        inside = np.array([value is None or -(2**63) <= int(value) < 2**63 for value in values.to_pylist()])
        good = pc.if_else(pa.array(inside), values, pa.scalar(None, values.type))
        return Bags(good.cast(pa.int64()), lengths, np.flatnonzero(~inside), values)


def empty_to_null(texts: pa.Array) -> pa.Array:
    """Empty text is a blank.

    Args:
        texts: Arrow strings.

    Returns:
        The same with null for empty text.
    """
    lengths = pc.binary_length(texts)
    if not pc.any(pc.equal(lengths, 0)).as_py():
        return texts
    return pc.if_else(pc.equal(lengths, 0), pa.scalar(None, texts.type), texts)


def weight_bags(column: pa.Array | pa.ChunkedArray, feature: SparseFeature) -> Bags:
    """The weights of a sparse feature.

    Args:
        column: of a type that `check_types` lets pass.
        feature: tells whether it is multi-valued.

    Returns:
        Values as any number type.
    """
    array = one_array(column)
    if not feature.multi_valued:
        return Bags(array, None)
    if pa.types.is_null(array.type):
        return Bags(pa.nulls(0, pa.float32()), np.zeros(len(array), dtype=np.int64))
    return Bags(array.flatten(), _list_lengths(array))


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one contiguous array.

    Args:
        column: an array, or chunks of one type.

    Returns:
        One array; strings that together exceed 2 GB become large_string.
    """
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # Arrow splits what 32-bit offsets cannot address
        if combined.num_chunks != 1:
            combined = combined.cast(pa.large_string()).combine_chunks()
        combined = combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
    return combined


def is_number(type_: pa.DataType) -> bool:
    """Whether a type can hold a label, a dense value or a weight.

    Args:
        type_: an Arrow type, not a dictionary.

    Returns:
        True for integers, floats, decimals, bool and the null type.
    """
    return (
        pa.types.is_integer(type_)
        or pa.types.is_floating(type_)
        or pa.types.is_decimal(type_)
        or pa.types.is_boolean(type_)
        or pa.types.is_null(type_)
    )


def _as_text(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return array
    if pa.types.is_null(array.type):
        return array.cast(pa.string())
    try:
        return array.cast(pa.large_string())
    except pa.ArrowInvalid as error:
        raise DataError(f"a column of type {array.type} is not valid UTF-8: {error}.") from None


def _list_lengths(array: pa.Array) -> np.ndarray:
    return pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def _decoded(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def plain(type_: pa.DataType) -> pa.DataType:
    """The type of the values.

    Args:
        type_: an Arrow type.

    Returns:
        The value type of a dictionary; any other type itself.
    """
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)


def is_text(type_: pa.DataType) -> bool:
    """Whether a type holds text.

    Args:
        type_: an Arrow type, not a dictionary.

    Returns:
        True for strings, and for binary, which some writers use for text.
    """
    return (
        pa.types.is_string(type_)
        or pa.types.is_large_string(type_)
        or pa.types.is_string_view(type_)
        or pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
    )


def _is_id_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)
