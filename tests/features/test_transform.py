"""The transform: stated rules for dense values and labels, any Arrow type, and faults named with file, row, column."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.errors import DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, Transformer

CLICKS = Schema(
    "clicks",
    LabelColumn("y"),
    (DenseFeature("d"),),
    (SparseFeature("s", 100, kind="hex"), SparseFeature("m", 50, multi_valued=True)),
    keys=("k",),
)


def _dense(values, **feature) -> list[float]:
    schema = Schema("s", dense=(DenseFeature("d", **feature),))
    return Transformer(schema)(pa.table({"d": values}), labels=False).dense[:, 0].tolist()


def _labels(values, **label):
    schema = Schema("s", LabelColumn("y", **label), dense=(DenseFeature("d"),))
    columns = Transformer(schema)(pa.table({"y": values, "d": [0.0] * len(values)}), source="a.parquet")
    return columns.labels.tolist(), columns.counts.missing_labels


def test_log1p_keeps_the_sign_and_reads_a_blank_as_zero():
    """Case 30: negative integers and blanks of Criteo."""
    found = _dense([0.0, 1.0, -1.0, -2.0, None, float("nan"), 1e6])
    expected = [0, math.log(2), -math.log(2), -math.log(3), 0, 0, math.log(1e6 + 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_the_rules_for_blanks_and_negatives():
    values = [2.0, -3.0, None]
    assert _dense(values, transform="identity") == [2, -3, 0]
    assert _dense(values, transform="identity", negative="clip") == [2, 0, 0]
    assert _dense(values, transform="identity", negative="blank", blank=-7.0) == [2, -7, -7]
    assert _dense(values, transform="standardize", mean=1.0, std=2.0, blank=1.0) == [0.5, -2, 0]
    np.testing.assert_allclose(_dense(values, negative="clip", blank=1.0), np.log([3, 1, 2]), rtol=1e-7)


@pytest.mark.parametrize(
    "type_",
    [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2)],
)
def test_every_number_type_gives_the_same_values(type_):
    values = pa.array([3, None, 0, 100], pa.float64()).cast(type_)
    assert _dense(values) == _dense(pa.array([3.0, None, 0.0, 100.0]))
    if not pa.types.is_decimal(type_) and not pa.types.is_float16(type_):
        assert _dense(values.dictionary_encode()) == _dense(values)


@given(st.lists(st.floats(width=64, allow_nan=False, min_value=-1e30, max_value=1e30) | st.none(), max_size=20))
def test_float64_input_gives_the_bits_of_its_float32_storage(values):
    """Case 36: the number that training Parquet stores and the number in a request are one number."""
    doubles = pa.array(values, pa.float64())
    assert _dense(doubles) == _dense(doubles.cast(pa.float32(), safe=False))


def test_an_infinite_value_is_named():
    for bad in (float("inf"), float("-inf"), 1e39):
        schema = Schema("s", dense=(DenseFeature("d"),))
        with pytest.raises(DataError, match=r"x\.csv: row 6 .*column 'd'.*infinite"):
            Transformer(schema)(pa.table({"d": [0.0, bad]}), labels=False, source="x.csv", first_row=5)


def test_nan_and_null_labels_are_missing_and_counted():
    """Case 32: labels [1, NaN, 0]."""
    labels, missing = _labels([1.0, float("nan"), 0.0, None])
    assert labels[0] == 1 and labels[2] == 0 and math.isnan(labels[1]) and math.isnan(labels[3]) and missing == 2


def test_minus_one_is_a_missing_label_only_if_the_schema_says_so():
    """Case 31."""
    with pytest.raises(DataError, match=r"a\.parquet: row 1 .*'y': label -1 is outside \[0, 1\].*label.missing"):
        _labels([1.0, -1.0, 0.0])
    labels, missing = _labels([1, -1, 0], missing=-1.0)
    assert labels[0] == 1 and math.isnan(labels[1]) and labels[2] == 0 and missing == 1


def test_a_threshold_makes_labels_of_ratings():
    labels, missing = _labels([5.0, 4.0, 3.0, None, -1.0], threshold=4.0, missing=-1.0)
    assert labels[:3] == [1, 1, 0] and math.isnan(labels[3]) and math.isnan(labels[4]) and missing == 2
    assert _labels([True, False])[0] == [1, 0]


def _clicks(**columns) -> pa.Table:
    plain = {"y": [1.0, 0.0], "d": [1.0, None], "s": ["a", "b"], "m": [["x"], []], "k": [7, 8]}
    return pa.table({name: value for name, value in {**plain, **columns}.items() if value is not None})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"s": None}, r"day\.parquet: no column 's' \(sparse feature 's' of the schema\); there are: y, d, m, k"),
        ({"s": pa.array([1, 2])}, r"column 's' .*is int64, expected strings \(hex\)"),
        ({"d": ["1", "2"]}, r"column 'd' \(dense feature 'd'\) is string, expected a number"),
        ({"y": ["1", "0"]}, r"column 'y' \(the label\) is string, expected a number"),
        ({"m": ["x", "y"]}, r"column 'm' .*is string, expected a list of strings \(text\).*separator"),
        ({"m": pa.array([[1], [2]])}, r"column 'm' .*is list<.*int64>, expected a list of strings"),
        ({"s": [["a"], ["b"]]}, r"column 's' .*is list<.*string>, expected strings \(hex\)"),
        ({"k": None}, r"no column 'k' \(a key column of the schema\)"),
    ],
)
def test_an_absent_or_wrong_column_is_named_before_work_begins(columns, message):
    """Cases 29 and 35."""
    transformer = Transformer(CLICKS)
    with pytest.raises(DataError, match=message):
        transformer.check(_clicks(**columns).schema, "day.parquet", keys=True)
    with pytest.raises(DataError, match=message):
        transformer(_clicks(**columns), keys=True, source="day.parquet")


def test_a_column_that_is_there_twice_is_refused():
    table = _clicks().append_column("d", pa.array([1.0, 2.0]))
    with pytest.raises(DataError, match="column 'd' is there 2 times"):
        Transformer(CLICKS)(table)


def test_a_schema_without_label_cannot_train_but_can_score():
    import dataclasses

    unlabelled = Transformer(dataclasses.replace(CLICKS, label=None))
    assert unlabelled(_clicks(y=None), labels=False).labels is None
    with pytest.raises(DataError, match="names no label"):
        unlabelled(_clicks(y=None))


_STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("type_", _STRINGS, ids=str)
def test_every_string_type_gives_the_same_rows(type_):
    texts = pa.array(["68fd1e64", None, "", "0A", "68fd1e64"])
    table = pa.table({"y": [0.0] * 5, "d": [0.0] * 5, "s": texts, "m": [["q", None, "", "r"], None, [], ["q"], [None]]})
    expected = Transformer(CLICKS)(table)
    if pa.types.is_dictionary(type_):
        other = table.set_column(2, "s", texts.dictionary_encode())
    else:
        other = table.set_column(2, "s", texts.cast(type_))
        lists = table["m"].cast(pa.large_list(type_) if type_ != pa.string_view() else pa.list_(pa.string()))
        other = other.set_column(3, "m", lists)
    found = Transformer(CLICKS)(other)
    for name in ("s", "m"):
        assert found.sparse[name].rows.tolist() == expected.sparse[name].rows.tolist()
        assert found.sparse[name].offsets.tolist() == expected.sparse[name].offsets.tolist()
    assert expected.sparse["s"].offsets.tolist() == [0, 1, 1, 1, 2, 3]
    assert expected.sparse["m"].offsets.tolist() == [0, 2, 2, 2, 3, 3]
    assert found.counts == expected.counts


def test_columns_of_the_null_type_are_blank():
    table = _clicks(d=pa.nulls(2), s=pa.nulls(2), m=pa.nulls(2), y=pa.nulls(2))
    columns = Transformer(CLICKS)(table)
    assert columns.counts.missing_labels == 2 and columns.dense.tolist() == [[0], [0]]
    assert all(column.offsets.tolist() == [0, 0, 0] for column in columns.sparse.values())


def test_chunks_slices_and_record_batches_give_what_the_whole_table_gives():
    rng = np.random.default_rng(0)
    size = 500
    lists = [[f"t{j}" for j in rng.integers(0, 40, rng.integers(0, 4))] for _ in range(size)]
    hexes = [f"{v:08x}" if v % 5 else None for v in rng.integers(0, 2**32, size)]
    table = pa.table({"y": [0.0] * size, "d": rng.normal(size=size), "s": hexes, "m": lists, "k": range(size)})
    transformer = Transformer(CLICKS)
    whole = transformer(table, keys=True)
    chunked = pa.concat_tables([table.slice(0, 7), table.slice(7, 300), table.slice(307)])
    encoded = pa.concat_tables(
        [
            part.set_column(2, "s", part["s"].combine_chunks().dictionary_encode())
            for part in (table.slice(0, 99), table.slice(99))
        ]
    )
    pieces = [transformer(batch, keys=True) for batch in table.to_batches(max_chunksize=64)]
    for other in (transformer(chunked, keys=True), transformer(encoded, keys=True), type(whole).concat(pieces)):
        assert np.array_equal(other.dense, whole.dense) and other.counts == whole.counts
        assert other.keys["k"].to_pylist() == list(range(size))
        for name, column in whole.sparse.items():
            assert np.array_equal(other.sparse[name].rows, column.rows)
            assert np.array_equal(other.sparse[name].offsets, column.offsets)


def test_a_null_whose_bytes_are_still_in_the_buffer_is_blank():
    import pyarrow.compute as pc

    texts = pa.array(["aaaaaaaa", "bbbbbbbb", "cccccccc"])
    masked = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(b"\x05"), *texts.buffers()[1:]])
    assert pc.count(masked, mode="only_null").as_py() == 1
    schema = Schema("s", sparse=(SparseFeature("s", 1000, kind="hex"),))
    found = Transformer(schema)(pa.table({"s": masked}), labels=False).sparse["s"]
    expected = Transformer(schema)(pa.table({"s": ["aaaaaaaa", None, "cccccccc"]}), labels=False).sparse["s"]
    assert found.rows.tolist() == expected.rows.tolist() and found.offsets.tolist() == [0, 1, 1, 2]


def test_text_is_split_at_the_separator_and_empty_pieces_are_blanks():
    split = Schema("s", sparse=(SparseFeature("m", 50, multi_valued=True, separator=" "),))
    listed = Schema("s", sparse=(SparseFeature("m", 50, multi_valued=True),))
    found = Transformer(split)(pa.table({"m": ["Drama  War", "", None, "War"]}), labels=False).sparse["m"]
    expected = Transformer(listed)(pa.table({"m": [["Drama", "War"], [], None, ["War"]]}), labels=False).sparse["m"]
    assert found.rows.tolist() == expected.rows.tolist() and found.offsets.tolist() == [0, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("ids", "bad"),
    [
        (pa.array([1.0, 2.5]), "2.5"),
        (pa.array([1, 2**63], pa.uint64()), "9223372036854775808"),
        (pa.array([1.0, 2.0**63]), "9.2"),
        (pa.array([1.0, float("inf")]), "inf"),
    ],
)
def test_a_number_that_is_no_int64_is_refused_as_an_id(ids, bad):
    schema = Schema("s", sparse=(SparseFeature("i", 5, kind="integer"),), id_policy="hash")
    with pytest.raises(DataError, match=rf"row 1 .*'i'.*{bad}.*whole number within int64"):
        Transformer(schema)(pa.table({"i": ids}), labels=False)


def test_whole_floats_with_nan_are_the_integers_that_pandas_meant():
    schema = Schema("s", sparse=(SparseFeature("i", 5, kind="integer", transform="identity"),))
    column = Transformer(schema)(pa.table({"i": [3.0, float("nan"), 4.0]}), labels=False).sparse["i"]
    assert column.rows.tolist() == [3, 4] and column.offsets.tolist() == [0, 1, 1, 2]


WEIGHTED = Schema(
    "w", sparse=(SparseFeature("i", 9, kind="integer", transform="identity", multi_valued=True, weights="w"),)
)


def test_weights_follow_their_ids():
    """Case 6: ids [1, 2], weights [10, 100]."""
    table = pa.table({"i": [[1, 2], [None, 3]], "w": [[10, 100], [5, 6]]})
    column = Transformer(WEIGHTED)(table, labels=False).sparse["i"]
    assert column.rows.tolist() == [1, 2, 3] and column.weights.tolist() == [10, 100, 6]
    assert column.weights.dtype == np.float32
    single = Schema("w", sparse=(SparseFeature("i", 9, kind="integer", transform="identity", weights="w"),))
    column = Transformer(single)(pa.table({"i": [1, None, 2], "w": [10.0, None, 100.0]}), labels=False).sparse["i"]
    assert column.rows.tolist() == [1, 2] and column.weights.tolist() == [10, 100]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0], [1.0, 2.0]], "row 1 .*'w': 2 weights for 1 ids"),
        ([[1.0], [float("nan")]], "row 1 .*blank or not finite"),
        ([[1.0], [None]], "row 1 .*blank or not finite"),
        ([[1.0], None], "row 1 .*0 weights for 1 ids"),
        ([1.0, 2.0], "is double, expected a list of numbers, one per id"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Transformer(WEIGHTED)(pa.table({"i": [[3], [4]], "w": weights}), labels=False)


def test_all_problems_are_collected_by_row():
    table = pa.table({"i": [[3], [99], [4], [-1]], "w": [[1.0], [1.0], [1.0, 2.0], [1.0]]})
    _, problems = Transformer(WEIGHTED).collect(table, labels=False)
    found = {(problem.column, problem.reason): problem.rows.tolist() for problem in problems}
    assert found == {("w", "weights_mismatch"): [2], ("i", "out_of_range"): [1, 3]}


def test_no_rows_give_empty_columns():
    """Case 1: batch 0 with keys present."""
    columns = Transformer(CLICKS)(CLICKS.arrow_schema().empty_table())
    assert columns.dense.shape == (0, 1) and columns.labels.shape == (0,)
    assert all(c.offsets.tolist() == [0] and c.rows.dtype == np.int32 for c in columns.sparse.values())


def test_criteo_rows_of_the_real_sample(shared_data):
    """Case 30: the thousand real rows; 498 of them lack trailing fields, which are blanks."""
    from tpurec.features import to_storage

    schema = Schema.load("criteo")
    lines = (shared_data / "criteo_raw_1000.tsv").read_text().splitlines()
    fields = [line.split("\t") for line in lines]
    assert min(map(len, fields)) >= schema.input.min_fields
    padded = [row + [""] * (40 - len(row)) for row in fields]
    text = pa.table(dict(zip(schema.input.columns, map(list, zip(*padded, strict=True)), strict=True)))
    table, problems = to_storage(text, schema, "criteo_raw_1000.tsv")
    assert not problems and table.schema.equals(schema.arrow_schema())
    columns = Transformer(schema)(table)
    assert columns.counts.rows == 1000 and columns.counts.missing_labels == 0
    for position, feature in enumerate(schema.sparse):
        present = [row[14 + position] != "" for row in padded]
        assert columns.sparse[feature.name].lengths.tolist() == [int(p) for p in present]
    second = [float(row[2]) if row[2] else 0.0 for row in padded]
    expected = [math.copysign(math.log1p(abs(v)), v) for v in second]
    np.testing.assert_allclose(columns.dense[:, 1], expected, rtol=1e-6)
    assert min(second) < 0


def test_a_threshold_that_float32_cannot_hold_still_counts_its_own_value():
    for threshold in (0.7, 3.7, 0.1, 4.3):
        assert _labels([threshold, threshold - 0.01], threshold=threshold)[0] == [1, 0]


def test_an_infinite_value_is_a_fault_even_where_negatives_are_clipped_or_blank():
    for negative in ("clip", "blank", "keep"):
        with pytest.raises(DataError, match=r"row 0 .*infinite"):
            _dense([float("-inf")], negative=negative)
    with pytest.raises(DataError, match=r"row 1 .*'y'.*infinite"):
        _labels([5.0, float("inf")], threshold=4.0)
