"""Raw text to storage types: what cannot be read is null, named with its row, and counted by reason."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tpurec.errors import DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, Transformer, to_storage

SCHEMA = Schema(
    "s",
    LabelColumn("y"),
    (DenseFeature("d"),),
    (
        SparseFeature("i", 9, kind="integer"),
        SparseFeature("h", 9, kind="hex"),
        SparseFeature("m", 9, kind="integer", multi_valued=True, separator="|", weights="w"),
    ),
    keys=("k",),
)


def _text(**columns) -> pa.Table:
    size = len(next(iter(columns.values())))
    plain = {"y": "1", "d": "2", "i": "3", "h": "a", "m": "", "w": "", "k": "key"}
    return pa.table({name: columns.get(name, [value] * size) for name, value in plain.items()})


def _faults(table: pa.Table) -> dict[tuple[str, str], list[int]]:
    _, problems = to_storage(table, SCHEMA, "a.tsv")
    return {(problem.column, problem.reason): problem.rows.tolist() for problem in problems}


def test_text_becomes_the_storage_types_with_the_schema_in_the_metadata():
    table, problems = to_storage(_text(d=["", "-3", "2.5e1"], m=["1|2", "", "|7"], w=["1|0.5", "", "|3"]), SCHEMA, "a")
    assert not problems
    assert table.drop_columns("k").schema.equals(SCHEMA.arrow_schema(), check_metadata=True)
    assert Schema.from_arrow(table.schema, "a") == SCHEMA
    assert table["d"].to_pylist() == [None, -3, 25]
    assert table["m"].to_pylist() == [[1, 2], [], [None, 7]] and table["w"].to_pylist() == [[1, 0.5], [], [None, 3]]
    assert table["k"].to_pylist() == ["key"] * 3
    column = Transformer(SCHEMA)(table).sparse["m"]
    assert column.lengths.tolist() == [2, 0, 1] and column.weights.tolist() == [1, 0.5, 3]


@pytest.mark.parametrize("bad", ["x", "1,5", "0x10", " 1", "1_000", "--1", "1e", "."])
def test_what_is_no_number_is_a_fault_and_null(bad):
    table, problems = to_storage(_text(d=["1", bad, ""]), SCHEMA, "a.tsv")
    assert [(p.column, p.reason, p.rows.tolist()) for p in problems] == [("d", "not_a_number", [1])]
    assert repr(bad) in problems[0].message(0)
    assert table["d"].to_pylist() == [1, None, None]


@pytest.mark.parametrize("good", ["1", "-1", "+1", "1.", ".5", "1e3", "1E-3", "007", "123456789012345678901234567890"])
def test_a_number_reads_the_same_beside_a_bad_one(good):
    alone, problems = to_storage(_text(d=[good]), SCHEMA, "a")
    assert not problems
    beside, _ = to_storage(_text(d=[good, "x"]), SCHEMA, "a")
    assert alone["d"][0] == beside["d"][0] == pa.scalar(float(good), pa.float32())


def test_nan_is_a_blank_and_infinity_is_refused():
    assert _faults(_text(d=["nan", "NaN", ""])) == {}
    assert _faults(_text(d=["inf", "1", "-Infinity", "1e39"])) == {("d", "infinite"): [0, 2, 3]}
    assert _faults(_text(d=["inf", "x"])) == {("d", "infinite"): [0], ("d", "not_a_number"): [1]}


def test_labels_are_judged_when_stored():
    """Case 31: a -1 that nobody declared is refused at conversion, not trained on."""
    assert _faults(_text(y=["1", "-1", "", "0", "x"])) == {
        ("y", "label_out_of_range"): [1],
        ("y", "not_a_number"): [4],
    }


def test_integers_of_text_are_digits_only():
    bad = ["1.0", "x", "0x1F", "9223372036854775808", "+1", "1 "]
    assert _faults(_text(i=["1", "-9223372036854775808", "", *bad])) == {("i", "not_an_integer"): [3, 4, 5, 6, 7, 8]}
    assert _faults(_text(m=["1|x", "2"], w=["1|1", "1"])) == {("m", "not_an_integer"): [0]}


def test_weights_are_judged_when_stored():
    table = _text(m=["1|2", "1", "1|2", "1", ""], w=["1", "", "1|x", "inf", ""])
    assert _faults(table) == {
        ("w", "not_a_number"): [2],
        ("w", "weights_mismatch"): [0, 1],
        ("w", "bad_weight"): [2, 3],
    }


def test_malformed_hex_is_stored_as_it_is_for_the_policy_to_answer():
    """Case 30: conversion changes no id."""
    table, problems = to_storage(_text(h=["xyz", "A"]), SCHEMA, "a")
    assert not problems and table["h"].to_pylist() == ["xyz", "A"]


def test_typed_columns_are_stored_too_and_others_left_out():
    typed = pa.table(
        {
            "extra": [1],
            "k": pa.array([5], pa.int16()),
            "y": [True],
            "d": pa.array([3], pa.int8()),
            "i": pa.array([2.0]),
            "h": pa.array(["b"]).dictionary_encode(),
            "m": pa.array([[1, None]], pa.large_list(pa.int32())),
            "w": pa.array([[1.5, None]], pa.list_(pa.float64(), 2)),
        }
    )
    table, problems = to_storage(typed, SCHEMA, "a.parquet")
    assert not problems and table.column_names == ["y", "d", "i", "h", "m", "w", "k"]
    assert table.to_pylist() == [{"y": 1, "d": 3, "i": 2, "h": "b", "m": [1, None], "w": [1.5, None], "k": 5}]
    assert table.schema.field("k").type == pa.int16()


def test_an_absent_or_wrong_column_is_named():
    """Cases 29 and 35."""
    with pytest.raises(DataError, match=r"a\.tsv: no column 'h'"):
        to_storage(_text(y=["1"]).drop_columns("h"), SCHEMA, "a.tsv")
    listed = Schema("s", sparse=(SparseFeature("m", 9, multi_valued=True),))
    with pytest.raises(DataError, match=r"column 'm' .*expected a list of strings.*Set the feature's separator"):
        to_storage(pa.table({"m": ["a|b"]}), listed, "a.csv", labels=False)


def test_the_real_csv_sample_converts(shared_data):
    """criteo_sample_200.csv writes integers as floats and has blanks."""
    import pyarrow.csv as pc

    schema = Schema.load("criteo")
    types = dict.fromkeys(schema.columns(), pa.string())
    text = pc.read_csv(shared_data / "criteo_sample_200.csv", convert_options=pc.ConvertOptions(column_types=types))
    table, problems = to_storage(text, schema, "criteo_sample_200.csv")
    assert not problems and table.num_rows == 200
    assert [value or "" for value in table["C3"].to_pylist()] == text["C3"].to_pylist()
    columns = Transformer(schema)(table)
    assert columns.counts.tables["C1"] == {"ids": 200} and set(columns.labels) == {0.0, 1.0}


def test_a_column_that_is_a_number_and_an_id_keeps_every_digit_of_the_id():
    schema = Schema("s", dense=(DenseFeature("n", column="x"),), sparse=(SparseFeature("x", 9, kind="integer"),))
    table, problems = to_storage(pa.table({"x": ["9007199254740993", "", "7"]}), schema, "a.csv", labels=False)
    assert not problems and table.schema.equals(schema.arrow_schema())
    assert table["x"].to_pylist() == [2**53 + 1, None, 7]
    _, problems = to_storage(pa.table({"x": ["7.5"]}), schema, "a.csv", labels=False)
    assert [(problem.column, problem.reason) for problem in problems] == [("x", "not_an_integer")]
