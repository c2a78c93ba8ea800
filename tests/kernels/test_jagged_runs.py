"""Copies of runs by lines equal a loop over the runs, to the bit; what is built on them equals the gather of words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpurec.kernels import jagged_dense, jagged_permute, jagged_runs


def made(seed, num_values, capacity, num_runs):
    """Runs of 0 to 200 words that do not overlap, ascending, some of them beyond the capacity; and words with -0.0."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(num_values).astype(np.float32)
    values[::3] = -0.0
    starts = rng.integers(0, num_values, num_runs)
    sizes = np.minimum(rng.integers(0, 200, num_runs) * (rng.random(num_runs) < 0.7), num_values - starts)
    begins = np.cumsum(rng.integers(0, 5, num_runs) + np.concatenate([[0], sizes[:-1]]))
    return values, starts.astype(np.int32), begins.astype(np.int32), sizes.astype(np.int32)


_copy = jax.jit(jagged_runs.copy_runs, static_argnums=4)
_add = jax.jit(jagged_runs.add_runs, static_argnums=4)


@pytest.mark.parametrize(
    ("num_values", "capacity", "num_runs"), [(1, 1, 1), (700, 1, 3), (129, 900, 5), (1400, 1300, 11)]
)
def test_copies_equal_a_loop(num_values, capacity, num_runs):
    for seed in range(8):
        values, starts, begins, sizes = made(seed, num_values, capacity, num_runs)
        expected = np.zeros(capacity + 4000, np.float32)
        for start, begin, size in zip(starts, begins, sizes, strict=True):
            expected[begin : begin + size] = values[start : start + size]
        found = np.asarray(_copy(values, starts, begins, sizes, capacity))
        assert np.array_equal(found.view(np.int32), expected[:capacity].view(np.int32)), seed


@pytest.mark.parametrize(("num_values", "capacity", "num_runs"), [(1, 1, 1), (700, 64, 7), (1400, 1300, 11)])
def test_sums_equal_a_loop(num_values, capacity, num_runs):
    for seed in range(8):
        values, starts, _, sizes = made(seed, num_values, capacity, num_runs)
        sizes = np.minimum(sizes, num_values // num_runs)
        begins = np.random.default_rng(seed).integers(0, capacity + 1, num_runs).astype(np.int32)
        expected = np.zeros(capacity + 400, np.float64)
        for start, begin, size in zip(starts, begins, sizes, strict=True):
            expected[begin : begin + size] += values[start : start + size]
        np.testing.assert_allclose(_add(values, starts, begins, sizes, capacity), expected[:capacity], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_long_rows_are_permuted_by_lines_as_by_words(dtype, monkeypatch):
    """Repeated, missing and empty rows, lengths that lie about the values, a capacity that is too small."""
    rng = np.random.default_rng(5)
    lengths = np.array([700, 0, 1, 300, 128, 900], np.int32)
    values = (rng.standard_normal(1900) * 1000).astype(dtype)  # 129 fewer than the lengths say
    permute = np.array([3, 5, 1, 0, 5, 7, 2], np.int32)
    with jax.enable_x64(True):
        for capacity in (4000, 1500):
            assert jagged_runs.pays(len(permute), capacity, values.dtype)
            by_lines = jagged_permute.permute_jagged(permute, lengths, values, None, capacity)
            gradient = jnp.ones(capacity) * jnp.arange(capacity)
            back = jagged_permute.permute_jagged_gradient(gradient.astype(jnp.float32), permute, lengths, 1900)
            with monkeypatch.context() as patched:
                patched.setattr(jagged_runs, "pays", lambda *_: False)
                by_words = jagged_permute.permute_jagged(permute, lengths, values, None, capacity)
                same = jagged_permute.permute_jagged_gradient(gradient.astype(jnp.float32), permute, lengths, 1900)
            assert by_lines[1].dtype == dtype
            assert np.array_equal(by_lines[0], by_words[0]) and np.array_equal(by_lines[1], by_words[1])
            assert np.array_equal(back, same)  # whole numbers below 2^24


def test_rows_that_add_up_to_more_than_int32_holds_stop_at_the_capacity():
    lengths, values = np.array([1000], np.int32), np.arange(1000, dtype=np.int32)
    permute = np.zeros(3_000_000, np.int32)
    source, inside = jax.jit(jagged_permute.source_positions, static_argnums=(2, 3))(permute, lengths, 1000, 5000)
    assert bool(inside.all()) and np.array_equal(source, np.tile(values, 5))


@pytest.mark.parametrize(("max_length", "at_a_time"), [(1, 8192), (8, 4), (200, 8192), (200, 3)])
def test_padding_of_words_and_back(max_length, at_a_time, monkeypatch):
    monkeypatch.setattr(jagged_dense, "_BAGS_AT_A_TIME", at_a_time)
    rng = np.random.default_rng(6)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 260, 9))]).astype(np.int32)
    values = rng.integers(-9, 9, int(offsets[-1]) + 40).astype(np.int32)
    assert jagged_runs.pays(9, len(values), values.dtype)
    dense = jagged_dense.jagged_to_padded_dense(values, offsets, max_length, -7)
    back = jagged_dense.dense_to_jagged(dense, offsets, len(values))
    for bag in range(9):
        items = values[offsets[bag] : offsets[bag + 1]][:max_length]
        assert dense[bag].tolist() == [*items, *[-7] * (max_length - len(items))]
        expected = np.zeros(offsets[bag + 1] - offsets[bag], np.int32)
        expected[: len(items)] = items
        assert np.array_equal(back[offsets[bag] : offsets[bag + 1]], expected)
    assert not np.asarray(back[offsets[-1] :]).any()
    with monkeypatch.context() as patched:
        patched.setattr(jagged_runs, "pays", lambda *_: False)
        assert np.array_equal(dense, jagged_dense.jagged_to_padded_dense(values, offsets, max_length, -7))
        assert np.array_equal(back, jagged_dense.dense_to_jagged(dense, offsets, len(values)))
