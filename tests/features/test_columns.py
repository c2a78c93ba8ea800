"""Columns: take, slice and concat move whole examples, ids and weights together."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.features import Columns, Counts, SparseColumn


def _columns(bags: list[list[int]], weighted: bool) -> Columns:
    size = len(bags)
    flat = np.array([i for bag in bags for i in bag], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])]).astype(np.int32)
    weights = flat.astype(np.float32) / 2 if weighted else None
    dense = np.arange(2 * size, dtype=np.float32).reshape(size, 2)
    sparse = {"f": SparseColumn(flat, offsets, weights)}
    return Columns(dense, dense[:, 0].copy(), sparse, {"k": pa.array(range(size), pa.int64())}, Counts(rows=size))


def _bags(columns: Columns) -> list[list[int]]:
    column = columns.sparse["f"]
    assert column.rows.dtype == np.int32 and column.offsets.dtype == np.int32
    if column.weights is not None:
        assert np.array_equal(column.weights, column.rows.astype(np.float32) / 2)
    return [column.rows[a:b].tolist() for a, b in zip(column.offsets, column.offsets[1:], strict=False)]


BAGS = st.one_of(
    st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=12),
    st.lists(st.lists(st.integers(0, 99), max_size=1), max_size=12),
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=1), max_size=12),
)


@given(BAGS, st.booleans(), st.data())
def test_take_moves_whole_examples(bags, weighted, data):
    columns = _columns(bags, weighted)
    indices = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=20)) if bags else []
    taken = columns.take(indices)
    assert _bags(taken) == [bags[i] for i in indices]
    assert taken.dense[:, 0].tolist() == taken.labels.tolist() == [2.0 * i for i in indices]
    assert taken.keys["k"].to_pylist() == indices and taken.num_rows == len(indices)


@given(BAGS, st.booleans(), st.integers(-2, 14), st.integers(-2, 14))
def test_slice_is_take_of_a_range(bags, weighted, start, stop):
    columns = _columns(bags, weighted)
    part = columns.slice(start, stop)
    wanted = range(len(bags))[max(start, 0) : max(stop, 0)]
    assert _bags(part) == [bags[i] for i in wanted]
    assert part.keys["k"].to_pylist() == list(wanted)
    assert _bags(part.take(range(len(part))[::-1])) == [bags[i] for i in wanted][::-1]


@given(st.lists(BAGS, min_size=1, max_size=4), st.booleans())
def test_concat_puts_examples_one_behind_the_other(parts, weighted):
    whole = Columns.concat([_columns(bags, weighted) for bags in parts])
    assert _bags(whole) == [bag for bags in parts for bag in bags]
    assert whole.counts.rows == sum(map(len, parts))
    sliced = Columns.concat([_columns(bags, weighted).slice(1, 9) for bags in parts])
    assert _bags(sliced) == [bag for bags in parts for bag in bags[1:9]]


def test_an_index_out_of_range_is_refused_rather_than_wrapped():
    columns = _columns([[1], [2]], False)
    for bad in ([-1], [2]):
        with pytest.raises(IndexError, match="there are 2 rows"):
            columns.take(bad)


def test_slice_copies_no_ids():
    columns = _columns([[i] for i in range(100)], True)
    part = columns.slice(10, 90)
    assert np.shares_memory(part.sparse["f"].rows, columns.sparse["f"].rows)
    assert np.shares_memory(part.dense, columns.dense)


def test_counts_add_up_by_table_and_reason():
    a = Counts(2, 1, {"t": {"ids": 3, "unseen": 1}})
    b = Counts(5, 0, {"t": {"ids": 4, "malformed": 2}, "u": {"ids": 1}})
    assert a + b == Counts(7, 1, {"t": {"ids": 7, "unseen": 1, "malformed": 2}, "u": {"ids": 1}})
    assert a == Counts(2, 1, {"t": {"ids": 3, "unseen": 1}}), "adding must not change its operands"
