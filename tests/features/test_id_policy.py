"""Ids without a row: never another row, the policy's answer, counted per table, whatever Arrow type they come in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.errors import DataError
from tpurec.features import Schema, SparseFeature, Transformer
from tpurec.features.hashing import hash_rows, hex_codes, integer_codes, text_codes

BAD = [10, -1, 2**31, 2**33, -(2**63), 2**32 + 3]


def _schema(policy: str, **feature) -> Schema:
    return Schema(
        "s", sparse=(SparseFeature("f", **{"num_embeddings": 10, "table": "t", **feature}),), id_policy=policy
    )


def _transform(policy: str, ids: pa.Array, **feature):
    columns = Transformer(_schema(policy, **feature))(pa.table({"f": ids}), labels=False)
    return columns.sparse["f"], columns.counts.tables["t"]


@pytest.mark.parametrize("bad", BAD)
def test_skip_leaves_out_an_id_out_of_range(bad):
    """Case 7."""
    column, counts = _transform("skip", pa.array([3, bad, 5]), kind="integer", transform="identity")
    assert column.rows.tolist() == [3, 5]
    assert column.offsets.tolist() == [0, 1, 1, 2]
    assert counts == {"ids": 3, "out_of_range": 1}


@pytest.mark.parametrize("bad", BAD)
def test_hash_sends_an_id_out_of_range_to_its_documented_row(bad):
    """Case 7."""
    column, counts = _transform("hash", pa.array([3, bad, 5]), kind="integer", transform="identity", salt=9)
    assert column.rows.tolist() == [3, int(hash_rows(integer_codes(np.array([bad])), 10, 9)[0]), 5]
    assert counts == {"ids": 3, "out_of_range": 1}


@pytest.mark.parametrize("bad", BAD)
def test_error_names_feature_table_id_limit_row_and_remedy(bad):
    """Case 7."""
    transformer = Transformer(_schema("error", kind="integer", transform="identity"))
    table = pa.table({"f": [3, bad, 5]})
    with pytest.raises(DataError) as caught:
        transformer(table, labels=False, source="day.parquet", first_row=1000)
    for part in ("day.parquet", "row 1001", "'f'", "'t'", str(bad), "num_embeddings is 10", "skip or hash"):
        assert part in str(caught.value)


@pytest.mark.parametrize("policy", ["skip", "hash"])
@pytest.mark.parametrize("type_", [pa.int64(), pa.float64(), pa.dictionary(pa.int8(), pa.int64())])
def test_the_policy_is_the_same_for_every_arrow_type(policy, type_):
    ids = pa.array([3, -1, None, 12, 9])
    expected, counts = _transform(policy, ids, kind="integer", transform="identity")
    ids = ids.dictionary_encode() if pa.types.is_dictionary(type_) else ids.cast(type_)
    found, found_counts = _transform(policy, ids, kind="integer", transform="identity")
    assert found.rows.tolist() == expected.rows.tolist() and found.offsets.tolist() == expected.offsets.tolist()
    assert found_counts == counts == {"ids": 4, "out_of_range": 2}


def test_skip_drops_the_weight_with_its_id_and_keeps_later_ids():
    """Case 8: ids [3, -1, 5], weights [1, 2, 3] give E[3] + 3 E[5]."""
    schema = _schema("skip", kind="integer", transform="identity", multi_valued=True, weights="w")
    table = pa.table({"f": [[3, -1, 5], [], [4]], "w": [[1.0, 2.0, 3.0], [], [7.0]]})
    column = Transformer(schema)(table, labels=False).sparse["f"]
    assert column.rows.tolist() == [3, 5, 4]
    assert column.weights.tolist() == [1.0, 3.0, 7.0]
    assert column.offsets.tolist() == [0, 2, 2, 3]


def test_a_malformed_hex_id_follows_the_policy():
    """Case 30: 'xyz' in a hex column; hashed as text under `hash`."""
    ids = pa.array(["68fd1e64", "xyz", "", None, "0123456789abcdef0", "a"])
    good = hash_rows(hex_codes(pa.array(["68fd1e64", "a"]))[0], 10).tolist()
    text = hash_rows(text_codes(pa.array(["xyz", "0123456789abcdef0"])), 10).tolist()
    column, counts = _transform("hash", ids, kind="hex")
    assert column.rows.tolist() == [good[0], text[0], text[1], good[1]]
    assert column.offsets.tolist() == [0, 1, 2, 2, 2, 3, 4]
    assert counts == {"ids": 4, "malformed": 2}
    column, counts = _transform("skip", ids.dictionary_encode(), kind="hex")
    assert column.rows.tolist() == good and counts == {"ids": 4, "malformed": 2}
    with pytest.raises(DataError, match=r"row 1 .*'xyz' is not hexadecimal"):
        _transform("error", ids, kind="hex")


def test_hex_ids_as_row_numbers_are_compared_exactly():
    ids = pa.array(["9", "a", "ffffffffffffffff", "0000000000000003"])
    column, counts = _transform("skip", ids, kind="hex", transform="identity")
    assert column.rows.tolist() == [9, 3] and counts == {"ids": 4, "out_of_range": 2}


@pytest.mark.parametrize(
    ("kind", "entries", "ids", "expected"),
    [
        ("text", ("b", "a"), ["a", "zz", "b", None, ""], [1, None, 0]),
        ("integer", (7, -5), [-5, 8, 7, None, None], [1, None, 0]),
        ("hex", ("0F", "a0"), ["00a0", "b", "f", None, ""], [1, None, 0]),
    ],
)
def test_an_id_unseen_by_the_vocabulary_follows_the_policy_and_is_counted(kind, entries, ids, expected):
    """Case 34."""
    feature = {"kind": kind, "transform": "vocabulary", "vocabulary": entries}
    column, counts = _transform("skip", pa.array(ids), **feature)
    assert column.rows.tolist() == [row for row in expected if row is not None]
    assert counts == {"ids": 3, "unseen": 1}
    column, _ = _transform("hash", pa.array(ids), **feature)
    assert column.rows[[0, 2]].tolist() == [1, 0]
    assert 2 <= column.rows[1] < 10, "an unseen id must not take an entry's row"
    with pytest.raises(DataError, match=r"row 1 .*not in the vocabulary of 2 entries"):
        _transform("error", pa.array(ids), **feature)


def test_hex_vocabularies_that_cannot_be_meant_are_refused():
    from tpurec.errors import ConfigError

    for entries, message in ((("xyz",), "'xyz' is not hexadecimal"), (("0a", "A"), "the same hexadecimal number")):
        with pytest.raises(ConfigError, match=message):
            Transformer(_schema("skip", kind="hex", transform="vocabulary", vocabulary=entries))


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12) | st.none(), max_size=5), max_size=12))
def test_bags_of_any_ids_keep_exactly_the_ids_in_range_in_order(bags):
    feature = {"kind": "integer", "transform": "identity", "multi_valued": True}
    column, counts = _transform("skip", pa.array(bags, pa.list_(pa.int64())), **feature)
    expected = [[i for i in bag if i is not None and 0 <= i < 10] for bag in bags]
    assert [column.rows[a:b].tolist() for a, b in zip(column.offsets, column.offsets[1:], strict=False)] == expected
    met = [i for bag in bags for i in bag if i is not None]
    assert counts["ids"] == len(met)
    assert counts.get("out_of_range", 0) == sum(not 0 <= i < 10 for i in met)


def test_one_table_counts_what_all_its_features_met():
    features = (
        SparseFeature("a", 10, kind="integer", transform="identity", table="t"),
        SparseFeature("b", 10, kind="integer", transform="identity", table="t", id_policy="hash"),
    )
    schema = Schema("s", sparse=features, id_policy="skip")
    columns = Transformer(schema)(pa.table({"a": [1, 99], "b": [99, 98]}), labels=False)
    assert columns.counts.tables == {"t": {"ids": 4, "out_of_range": 3}}
    assert len(columns.sparse["a"].rows) == 1 and len(columns.sparse["b"].rows) == 2
