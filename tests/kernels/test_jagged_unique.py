"""Distinct ids: the JAX function equals a loop (FBGEMM has a kernel for GPUs only)."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tools.jagged import KINDS, make
from tpurec.kernels.jagged_unique import unique_ids

# Features 1 and 2 share a table.
STARTS, GROUPS = np.array([0, 1000, 1000, 3000]), np.array([0, 1, 3])
_unique = jax.jit(unique_ids)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def loop(starts, groups, offsets, ids):
    """Lengths, distinct ids and where each id is, group by group."""
    num_features = len(starts) - 1
    batch_size = (len(offsets) - 1) // num_features
    table = [int(np.searchsorted(np.unique(starts), start)) for start in starts]
    of_ids = [
        (table[t], int(one))
        for t in range(num_features)
        for one in ids[offsets[t * batch_size] : offsets[(t + 1) * batch_size]]
    ]
    of_ids += [(len(starts), -1)] * (len(ids) - len(of_ids))
    distinct = sorted(set(of_ids))
    lengths = []
    for begin, end in pairwise(groups):
        slots = (end - begin) * batch_size
        size = sum(table[begin] <= of < table[end] for of, _ in distinct)
        lengths += [size // slots + (slot < size % slots) for slot in range(slots)]
    return lengths, [one for _, one in distinct], [distinct.index(one) for one in of_ids]


def check(starts, groups, offsets, ids):
    lengths, distinct, reverse, count = _unique(starts, groups, offsets, ids)
    expected = loop(starts, groups, offsets, ids)
    assert lengths.dtype == offsets.dtype and distinct.dtype == ids.dtype and reverse.dtype == np.int64
    assert lengths.tolist() == expected[0]
    assert int(count) == len(expected[1])
    assert distinct.tolist() == expected[1] + [-1] * (len(ids) - len(expected[1]))
    assert reverse.tolist() == expected[2]


@pytest.mark.parametrize(("lengths_dtype", "ids_dtype"), [(np.int32, np.int64), (np.int64, np.int32)])
@pytest.mark.parametrize("shape", [(7, 101), (1, 1), (0, 4), (5, 0)])
def test_equals_a_loop(shape, lengths_dtype, ids_dtype):
    """Cases 01, 03, 09, 11, 12 and 14; ids repeat within bags, between features, and behind the last bag."""
    for kind in KINDS:
        case = make(kind, 3, *shape, lengths_dtype=lengths_dtype, values_dtype=ids_dtype)
        check(STARTS, GROUPS, case.offsets, case.values % 29)


def test_ids_out_of_range_are_nobody_elses():
    """Case 07: FBGEMM adds the table's begin, so that -1 of one table is the last row of the one before."""
    ids = np.array([999, 5, -1, -1, 2**33 + 5, 5, 2**33 + 5, 1000])
    check(STARTS, GROUPS, np.array([0, 2, 4, 8]), ids)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.lists(st.integers(-(2**40), 2**40) | st.integers(-1, 4), min_size=64, max_size=64),
    st.sampled_from([([0, 9, 9, 9, 20], [0, 1, 4]), ([0, 5, 6, 7, 8], [0, 1, 2, 3, 4]), ([0, 0, 0, 0, 8], [0, 4])]),
)
def test_of_any_lengths_and_ids(lengths, ids, tables):
    starts, groups = map(np.array, tables)
    with jax.enable_x64(True):
        check(starts, groups, np.concatenate([[0], np.cumsum(lengths)]), np.array(ids))
