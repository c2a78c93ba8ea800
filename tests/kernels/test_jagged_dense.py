"""Jagged and dense, and the id policy: the JAX functions equal FBGEMM's CPU ops and the host's hash."""

import itertools
from functools import partial

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.tools.jagged import KINDS, make
from tpurec.errors import ConfigError
from tpurec.features.hashing import hash_rows, integer_codes
from tpurec.kernels import jagged_bounds, jagged_dense

fbgemm = torch.ops.fbgemm


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def of(array):
    return torch.from_numpy(np.array(array))


_pad = jax.jit(jagged_dense.jagged_to_padded_dense, static_argnums=(2, 3))


@pytest.mark.parametrize(
    ("bags", "capacity", "max_length"), [(1, 1, 1), (7, 101, 3), (7, 101, 60), (0, 4, 2), (3, 5, 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_padding_equals_fbgemm(bags, capacity, max_length, dtype):
    """Cases 04, 11 and 14: longer bags are cut, empty ones are padding, capacity has no effect."""
    back = jax.jit(jagged_dense.dense_to_jagged, static_argnums=2)
    for kind in KINDS:
        case = make(kind, 1, bags, capacity, lengths_dtype=np.int32)
        values = (case.weights if dtype == np.float32 else case.values).astype(dtype)[:, None] * np.ones(3, dtype)
        used = case.used
        expected = fbgemm.jagged_to_padded_dense(of(values[:used]), [of(case.offsets)], [max_length], -7.0)
        dense = _pad(values, case.offsets, max_length, -7.0)
        assert dense.dtype == dtype
        assert np.array_equal(dense, expected), kind
        again = back(dense, case.offsets, capacity)
        if bags and max_length:
            theirs = fbgemm.dense_to_jagged_forward(expected, [of(case.offsets)], used)
            assert np.array_equal(again[:used], theirs), kind
        assert np.all(again[used:] == 0), kind


def test_padding_of_case_4():
    """Case 04, by its numbers; values of one dimension."""
    values, offsets = jnp.array([5, 3, 7, 1]), jnp.array([0, 1, 4])
    assert _pad(values, offsets, 3, 0).tolist() == [[5, 0, 0], [3, 7, 1]]
    assert _pad(values, offsets, 2, 0).tolist() == [[5, 0], [3, 7]]
    assert _pad(values, jnp.array([0, 0, 0]), 2, 9).tolist() == [[9, 9], [9, 9]]


def test_arithmetic_equals_fbgemm():
    dense = np.random.default_rng(1).standard_normal((7, 9, 3)).astype(np.float32)
    add, multiply = jax.jit(jagged_dense.jagged_dense_add), jax.jit(jagged_dense.jagged_dense_multiply)
    for kind in KINDS:
        case = make(kind, 1, 7, 101)
        used = case.used
        values = case.weights[:, None] * np.ones(3, np.float32)
        given = (of(values[:used]), [of(case.offsets)], of(dense))
        theirs = fbgemm.jagged_dense_elementwise_add_jagged_output(*given)[0]
        assert np.array_equal(add(values, case.offsets, dense)[:used], theirs), kind
        product = multiply(values, case.offsets, dense)
        assert np.array_equal(product[:used], fbgemm.jagged_dense_elementwise_mul(*given)[0]), kind
        assert np.all(product[used:] == 0), kind  # NaN there times anything


def test_gradients_are_those_of_jax():
    """Case 04: a cut item gets gradient 0."""
    values = jnp.asarray(np.random.default_rng(2).standard_normal((64, 3)))
    upstream = jnp.asarray(np.random.default_rng(3).standard_normal((7, 4, 3)))

    @jax.jit
    def program(offsets):
        _, pullback = jax.vjp(lambda x: jagged_dense.jagged_to_padded_dense(x, offsets, 4), values)
        return jagged_dense.dense_to_jagged(upstream, offsets, 64), pullback(upstream)[0]

    for kind in KINDS:
        case = make(kind, 1, 7, 64)
        ours, by_jax = program(case.offsets)
        np.testing.assert_allclose(ours, by_jax, atol=1e-12, err_msg=kind)
        cut = jagged_places(case) >= 4
        assert np.all(np.asarray(ours)[: case.used][cut] == 0)


def jagged_places(case):
    return np.concatenate([np.arange(length) for length in case.lengths.reshape(-1)] + [np.zeros(0)])


@pytest.mark.parametrize("policy", jagged_bounds.POLICIES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_id_policy(policy, dtype):
    """Cases 07 and 08: num_embeddings, -1, 2**31 and 2**33; the hash is the host's; capacity is not counted."""
    num_rows, check = np.array([700, 1000, 5]), jax.jit(partial(jagged_bounds.check_ids, policy=policy, salt=2**63 + 5))
    for kind in KINDS:
        case = make(kind, 3, 7, 203, values_dtype=dtype)
        case.values[::5] = -1
        case.values[1::7] = 700
        case.values[2::11] = np.iinfo(np.int32).max if dtype == np.int32 else 2**33
        rows, counts = check(case.values, case.offsets, num_rows)
        limit = np.repeat(num_rows, case.lengths.sum(1))
        ids = case.values[: case.used]
        outside = (ids < 0) | (ids >= limit)
        expected = np.where(outside, -1, ids).astype(np.int32)
        if policy == "hash":
            codes = integer_codes(ids)
            hashed = [hash_rows(codes[n : n + 1], int(limit[n]), 2**63 + 5)[0] for n in np.flatnonzero(outside)]
            expected[outside] = hashed
        assert rows.dtype == np.int32
        assert np.array_equal(rows[: case.used], expected), kind
        assert np.all(rows[case.used :] == -1), kind
        bounds = case.offsets[::7]
        assert counts.tolist() == [int(outside[a:b].sum()) for a, b in itertools.pairwise(bounds)], kind


def test_hash_needs_64_bits():
    """With 32 bits the product wraps, and an id would get another row than on the host."""
    with jax.enable_x64(False), pytest.raises(ConfigError, match="64-bit"):
        jagged_bounds.check_ids(jnp.array([9]), jnp.array([0, 1]), jnp.array([5]), "hash")
    with pytest.raises(ConfigError, match="'clip' is not known"):
        jagged_bounds.check_ids(jnp.array([9]), jnp.array([0, 1]), jnp.array([5]), "clip")


@pytest.mark.parametrize(
    "offsets", [[0, 2, 2, 3, 4], [0, 2, 1, 3, 9], [0, 0, 0, 0, 0], [0, 9, 9, 9, 9], [1, 2, 2, 3, 4], [-3, 2, 1, 1, 2]]
)
def test_fixed_bounds_equal_fbgemm(offsets):
    ids, offsets, num_rows = np.array([3, 10, -1, -5]), np.array(offsets), np.array([10, 5])
    ours = jax.jit(jagged_bounds.fix_bounds)(num_rows, ids, offsets, None)
    new_ids, new_offsets = of(ids), of(offsets)
    fbgemm.bounds_check_indices(of(num_rows), new_ids, new_offsets, 2, torch.zeros(1, dtype=torch.int64))
    assert np.array_equal(ours[0], new_ids)
    assert np.array_equal(ours[1], new_offsets)
    assert int(ours[2]) == (new_ids.numpy() != ids).sum() + (new_offsets.numpy() != offsets).sum()
