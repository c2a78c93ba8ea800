"""Rows of several matrices in one array: the JAX functions equal FBGEMM's CPU op, and its gradient."""

from functools import partial

import fbgemm_gpu.sparse_ops  # noqa: F401
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpurec.kernels.row_blocks import select_rows, select_rows_gradient

SIZES = {
    "one": ([1], [1], [1]),
    "many": ([7, 3, 101], [5, 1, 33], [4, 1, 9]),
    "repeated": ([64], [2], [3]),
}


def arguments(sizes, seed=0, dtype=np.int64):
    num_indices, num_rows, num_columns = sizes
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal(int(np.dot(num_rows, num_columns))).astype(np.float32)
    parts = [rng.integers(0, rows, size) for size, rows in zip(num_indices, num_rows, strict=True)]
    return inputs, np.concatenate(parts).astype(dtype)


def check(sizes, side_by_side, dtype=np.int64, seed=0):
    inputs, indices = arguments(sizes, seed, dtype)
    of_torch = torch.from_numpy(inputs).requires_grad_()
    lists = [list(size) for size in sizes]
    expected = torch.ops.fbgemm.batch_index_select_dim0(of_torch, torch.from_numpy(indices), *lists, side_by_side)
    static = {name: tuple(size) for name, size in zip(("num_indices", "num_rows", "num_columns"), sizes, strict=True)}
    found = jax.jit(partial(select_rows, **static, side_by_side=side_by_side))(inputs, indices)
    assert np.array_equal(found, expected.detach())
    upstream = np.random.default_rng(seed + 1).standard_normal(len(found)).astype(np.float32)
    expected.backward(torch.from_numpy(upstream))
    backwards = jax.jit(partial(select_rows_gradient, **static, side_by_side=side_by_side))
    np.testing.assert_allclose(backwards(upstream, indices), of_torch.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_fbgemm(sizes, dtype):
    check(SIZES[sizes], False, dtype)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_side_by_side_equals_fbgemm(num_indices, shapes, seed):
    check(([num_indices] * len(shapes), *zip(*shapes, strict=True)), True, seed=seed)


def of_small(sizes, indices):
    inputs = np.arange(1, 1 + np.dot(*sizes[1:]), dtype=np.float32)
    return select_rows(inputs, np.array(indices, np.int32), *map(tuple, sizes), False).tolist()


def test_nothing_to_choose():
    """Case 01; FBGEMM refuses a matrix of which no row is chosen, and one without columns."""
    assert of_small(([0, 1], [2, 2], [2, 2]), [1]) == [7, 8]
    assert of_small(([2, 1], [2, 2], [0, 2]), [0, 1, 1]) == [3, 4]
    assert of_small(([0, 0], [0, 0], [2, 2]), []) == []
    assert of_small(([], [], []), []) == []


def test_a_row_that_is_not_there_is_zero():
    sizes = ((2, 2), (2, 2), (2, 2))
    assert of_small(sizes, [0, 2, -1, 1]) == [1, 2, 0, 0, 0, 0, 7, 8]
    back = select_rows_gradient(np.ones(8, np.float32), np.array([0, 2, -1, 1], np.int32), *sizes, False)
    assert back.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
