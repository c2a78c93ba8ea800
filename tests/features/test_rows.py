"""Rows of a request: each judged alone, and what passes gives the numbers that offline scoring gives."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.features import (
    DenseFeature,
    LabelColumn,
    Schema,
    SparseFeature,
    Transformer,
    columns_from_rows,
    table_from_rows,
    to_storage,
)

SCHEMA = Schema(
    "shop",
    LabelColumn("y"),
    (DenseFeature("price"), DenseFeature("age", transform="standardize", mean=30.0, std=9.0)),
    (
        SparseFeature("user", 50, kind="hex"),
        SparseFeature("item", 50, kind="integer", transform="identity"),
        SparseFeature("genre", 50, multi_valued=True, separator="|"),
        SparseFeature(
            "basket", 50, kind="integer", multi_valued=True, weights="amounts", table="item", transform="identity"
        ),
        SparseFeature("codes", 9, kind="integer", multi_valued=True, separator=";"),
    ),
    keys=("request_id",),
)
GOOD = {
    "price": 3,
    "age": 41.5,
    "user": "68fd1e64",
    "item": 7,
    "genre": ["War"],
    "basket": [1, 2],
    "amounts": [10, 100],
}


def test_the_good_rows_beside_a_malformed_one_are_answered():
    """Case 33: good, malformed, good."""
    parsed = columns_from_rows(Transformer(SCHEMA), [GOOD, {**GOOD, "price": "x"}, GOOD])
    assert parsed.good.tolist() == [0, 2] and parsed.columns.num_rows == 2 and parsed.table.num_rows == 2
    (error,) = parsed.errors
    assert (error.row, error.field) == (1, "price") and "expected a number, found the string 'x'" in error.message
    alone = columns_from_rows(Transformer(SCHEMA), [GOOD]).columns
    assert parsed.columns.dense.tolist() == alone.dense.tolist() * 2


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"price": float("nan")}, "price", "expected a finite number"),
        ({"price": float("inf")}, "price", "expected a finite number"),
        ({"price": 1e39}, "price", "within float32"),
        ({"price": 10**400}, "price", "within float32"),
        ({"price": [1.0]}, "price", r"expected a number, found the list \[1.0\]"),
        ({"user": 5}, "user", r"expected a string \(hex\), found the number 5"),
        ({"user": ["a"]}, "user", r"expected a string \(hex\), found the list"),
        ({"user": "\ud800"}, "user", "not valid Unicode"),
        ({"item": 1.5}, "item", "expected a whole number, found the number 1.5"),
        ({"item": "7"}, "item", "expected a whole number, found the string '7'"),
        ({"item": True}, "item", "expected a whole number, found the boolean True"),
        ({"item": 2**64}, "item", "within int64"),
        ({"item": 50}, "item", "id 50 is out of range, num_embeddings is 50"),
        ({"item": -1}, "item", "id -1 is out of range"),
        ({"user": "xyz"}, "user", "id 'xyz' is not hexadecimal"),
        ({"genre": 5}, "genre", "expected a list, each item a string"),
        ({"genre": {"a": 1}}, "genre", "found the object"),
        ({"genre": ["a", 5]}, "genre", "item 1: expected a string"),
        ({"genre": [["a"]]}, "genre", "item 0: expected a string"),
        ({"basket": 1}, "basket", "expected a list, each item a whole number; found the number 1"),
        ({"basket": "1|2"}, "basket", "expected a list, each item a whole number; found the string"),
        ({"basket": [1, 99]}, "basket", "id 99 is out of range"),
        ({"codes": "1;x"}, "codes", "item 1: expected a whole number, found the string 'x'"),
        ({"amounts": 1.0}, "amounts", "expected a list"),
        ({"amounts": [1.0]}, "amounts", "1 weights for 2 ids"),
        ({"amounts": None}, "amounts", "0 weights for 2 ids"),
        ({"amounts": [1.0, None]}, "amounts", "blank or not finite"),
        ({"amounts": [1.0, float("inf")]}, "amounts", "item 1: expected a finite number"),
        ({"prise": 3}, "prise", "no such field; did you mean 'price'"),
        ({"zzzzzz": 3}, "zzzzzz", "the fields are: price, age"),
    ],
)
def test_a_bad_field_is_named_and_refuses_its_row_only(change, field, message):
    """Cases 33, 34 (policy `error`) and 35."""
    parsed = columns_from_rows(Transformer(SCHEMA), [GOOD, {**GOOD, **change}, GOOD])
    assert parsed.good.tolist() == [0, 2] and parsed.columns.num_rows == parsed.table.num_rows == 2
    assert [(error.row, error.field) for error in parsed.errors] == [(1, field)]
    assert re.search(message, parsed.errors[0].message)


def test_what_is_no_row_is_refused():
    for bad in (None, 3, "x", [1]):
        parsed = table_from_rows(SCHEMA, [bad, GOOD])
        assert parsed.good.tolist() == [1] and parsed.errors[0].field is None


def test_absent_and_null_fields_are_blanks_and_label_and_keys_are_no_fields_of_the_model():
    parsed = columns_from_rows(Transformer(SCHEMA), [{}, dict.fromkeys(GOOD), {"request_id": "r", "y": 1}])
    assert not parsed.errors and parsed.columns.labels is None
    assert all(column.offsets.tolist() == [0] * 4 for column in parsed.columns.sparse.values())
    assert parsed.table.column_names == SCHEMA.arrow_schema(labels=False).names


def test_no_rows_and_only_bad_rows_give_empty_columns():
    for rows in ([], [3]):
        parsed = columns_from_rows(Transformer(SCHEMA), rows)
        assert parsed.columns.num_rows == 0 and parsed.good.tolist() == []


def test_the_policy_answers_an_unseen_id_and_counts_it():
    """Case 34."""
    for policy, length in (("skip", 0), ("hash", 1)):
        parsed = columns_from_rows(Transformer(SCHEMA.with_id_policy(policy)), [{**GOOD, "item": 2**33}])
        assert not parsed.errors and parsed.columns.sparse["item"].lengths.tolist() == [length]
        assert parsed.columns.counts.tables["item"]["out_of_range"] == 1


def test_every_bad_field_of_a_row_is_reported_and_an_id_only_of_rows_whose_fields_are_good():
    parsed = columns_from_rows(
        Transformer(SCHEMA), [{"price": "x", "user": 1}, GOOD, {"item": 99, "q": 1}, {"item": 99}]
    )
    assert sorted((e.row, e.field) for e in parsed.errors) == [(0, "price"), (0, "user"), (2, "q"), (3, "item")]
    assert parsed.good.tolist() == [1]


NUMBERS = st.none() | st.integers(-(10**6), 10**6) | st.floats(width=64, min_value=-1e30, max_value=1e30)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "price": NUMBERS,
            "age": NUMBERS,
            "user": st.none() | st.text(alphabet="0123456789abcdefXé", max_size=17),
            "item": st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 60),
            "genre": st.none() | st.lists(st.none() | st.text(alphabet="abcé", max_size=3), max_size=4),
            "codes": st.none() | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=4),
        }
    ),
    max_size=8,
)


@given(ROWS, st.sampled_from(["skip", "hash"]))
def test_online_equals_offline_from_parquet_types_and_from_text(rows, policy):
    """Case 36: one row, three ways in, the same numbers to the bit."""
    transformer = Transformer(SCHEMA.with_id_policy(policy))
    online = columns_from_rows(transformer, rows)
    assert not online.errors
    blank_weights = {"basket": pa.nulls(len(rows)), "amounts": pa.nulls(len(rows))}
    types = {"price": pa.float64(), "age": pa.float64(), "user": pa.large_string(), "item": pa.int64()}
    types |= {"genre": pa.list_(pa.string()), "codes": pa.large_list(pa.int64())}
    typed = pa.table(
        {name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()} | blank_weights
    )
    text = pa.table(
        {name: pa.array([_text(row[name], name) for row in rows], pa.string()) for name in types} | blank_weights
    )
    from_text, problems = to_storage(text, SCHEMA, "a.csv", labels=False, keys=False)
    stored, more = to_storage(typed, SCHEMA, "a.parquet", labels=False, keys=False)
    assert not problems and not more
    for table in (typed, from_text, stored):
        offline = transformer(table, labels=False)
        assert np.array_equal(offline.dense, online.columns.dense)
        assert offline.counts == online.columns.counts
        for name, column in online.columns.sparse.items():
            assert np.array_equal(offline.sparse[name].rows, column.rows), name
            assert np.array_equal(offline.sparse[name].offsets, column.offsets), name


def _text(value, name: str) -> str:
    if isinstance(value, list):
        return {"genre": "|", "codes": ";"}[name].join("" if item is None else str(item) for item in value)
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def test_a_whole_float_is_the_integer_it_is():
    parsed = columns_from_rows(Transformer(SCHEMA), [{"item": 7.0, "basket": [1.0], "amounts": [2]}])
    assert parsed.columns.sparse["item"].rows.tolist() == [7] and parsed.columns.sparse["basket"].rows.tolist() == [1]
    assert math.isclose(parsed.columns.sparse["basket"].weights[0], 2.0)
