"""Cumulative sums, places in bags, segment sums and means: the JAX functions equal FBGEMM's CPU ops, or a loop."""

import itertools

import fbgemm_gpu.sparse_ops  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tools.jagged import KINDS, make
from tpurec.kernels import jagged_positions, jagged_segments

fbgemm = torch.ops.fbgemm
SHAPES = [(1, 1, 1), (2, 5, 0), (1, 0, 4), (5, 13, 1001)]
_SUM = jax.jit(jagged_segments.segment_sum)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (1025,), (3, 5), (2, 0), (0, 3)])
def test_cumsums_equal_fbgemm(shape, dtype):
    lengths = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
    theirs = torch.from_numpy(lengths)
    found = jagged_positions.complete_cumsum(jnp.asarray(lengths))
    assert found.dtype == dtype
    assert np.array_equal(found, fbgemm.asynchronous_complete_cumsum(theirs))
    if len(shape) == 1:
        assert np.array_equal(jagged_positions.inclusive_cumsum(lengths), fbgemm.asynchronous_inclusive_cumsum(theirs))
        assert np.array_equal(jagged_positions.exclusive_cumsum(lengths), fbgemm.asynchronous_exclusive_cumsum(theirs))


def test_cumsum_of_int64_does_not_wrap_at_int32():
    """Case 07's kind: sizes beyond int32 stay what they are."""
    assert jagged_positions.complete_cumsum(jnp.array([2**31, 2**33]))[-1] == 2**31 + 2**33


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_places_and_values_of_bags(shape, dtype):
    """Places equal FBGEMM's; a value of a bag reaches exactly the bag's positions."""
    places = jax.jit(jagged_positions.offsets_range, static_argnums=1)
    of_segments = jax.jit(jagged_positions.of_segments, static_argnums=2)
    for kind in KINDS:
        case = make(kind, *shape, lengths_dtype=dtype)
        if case.used and case.lengths.size:  # FBGEMM numbers nothing otherwise
            theirs = fbgemm.offsets_range(torch.from_numpy(case.offsets), shape[2])
            assert np.array_equal(places(case.offsets, shape[2]), theirs), kind
        per_bag = (
            np.random.default_rng(1).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, case.lengths.size).astype(dtype)
        )
        found = of_segments(per_bag, case.offsets, shape[2])
        assert np.array_equal(found[: case.used], np.repeat(per_bag, case.lengths.reshape(-1))), kind


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_segment_sums_equal_fbgemm(shape, dtype):
    """Cases 03 and 14: empty segments are 0, NaN and garbage behind the last one do not count."""
    for kind in KINDS:
        case = make(kind, *shape)
        values = (case.values if np.issubdtype(dtype, np.integer) else case.weights).astype(dtype)
        found = np.asarray(_SUM(values, case.offsets))
        assert found.dtype == dtype
        pairs = itertools.pairwise(case.offsets)
        expected = np.array([values[begin:end].sum() for begin, end in pairs], dtype)
        tolerance = 0 if np.issubdtype(dtype, np.integer) else 1e-5
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=kind)
        if dtype != np.float64 and case.lengths.size and case.used:
            theirs = fbgemm.segment_sum_csr(1, torch.from_numpy(case.offsets), torch.from_numpy(values[: case.used]))
            np.testing.assert_allclose(found, theirs, rtol=tolerance, atol=tolerance, err_msg=kind)


def test_a_small_segment_behind_a_large_one_keeps_its_digits():
    values = jnp.concatenate([jnp.full(1000, 1e6, jnp.float32), jnp.full(3, 1e-3, jnp.float32)])
    sums = _SUM(values, jnp.array([0, 1000, 1003]))
    np.testing.assert_allclose(sums[1], 3e-3, rtol=1e-6)


def test_bfloat16_is_added_in_float32():
    ones = jnp.ones(1000, jnp.bfloat16)
    assert _SUM(ones, jnp.array([0, 1000])).tolist() == [1000.0]


def test_segment_means_and_gradients():
    values = np.random.default_rng(2).standard_normal((64, 5))
    gradient = np.random.default_rng(3).standard_normal((21, 5))

    @jax.jit
    def program(offsets):
        mean, pull_mean = jax.vjp(lambda x: jagged_segments.segment_mean(x, offsets), jnp.asarray(values))
        _, pull_sum = jax.vjp(lambda x: jagged_segments.segment_sum(x, offsets), jnp.asarray(values))
        ours = [jagged_segments.segment_gradient(jnp.asarray(gradient), offsets, 64, flag) for flag in (True, False)]
        return mean, ours, [pull(jnp.asarray(gradient))[0] for pull in (pull_mean, pull_sum)]

    for kind in KINDS:
        offsets = make(kind, 3, 7, 64).offsets
        mean, ours, theirs = program(offsets)
        pairs = itertools.pairwise(offsets)
        expected = [values[begin:end].sum(0) / max(end - begin, 1) for begin, end in pairs]
        np.testing.assert_allclose(mean, expected, atol=1e-12, err_msg=kind)
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-12, err_msg=kind)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-12, err_msg=kind)


def test_offsets_that_lie_are_cut_to_the_values():
    """Case 10's kind on a device, where nothing can be raised: no wrapped and no foreign sum."""
    sums = _SUM(jnp.arange(4), jnp.array([0, 2, 2**33, 2**40]))
    assert sums.tolist() == [1, 5, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=9, max_size=9), st.integers(0, 2**32 - 1))
def test_segment_sums_of_any_lengths(lengths, seed):
    values = np.random.default_rng(seed).integers(-(2**62), 2**62, 81)
    offsets = np.cumsum([0, *lengths])
    with jax.enable_x64(True):
        found = _SUM(values, offsets)
    assert np.array_equal(found, fbgemm.segment_sum_csr(1, torch.from_numpy(offsets), torch.from_numpy(values)))
