"""`embedding_bag`: the specification against a loop in float64, and every implementation against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.tools.cases import DIMS, IDS, LENGTHS, Bags, brute_force, make_bags, make_table
from tpurec.errors import ConfigError
from tpurec.kernels.embedding_bag import embedding_bag, reference, weights_gradient
from tpurec.kernels.storage import Storage, pack, stack

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [(lengths, ids) for lengths in LENGTHS for ids in IDS]


def _program(storage):
    """Specification and plain implementation, sum and mean, in one compiled program."""

    @jax.jit
    def program(table, ids, offsets, weights):
        parts = pack(table, storage)
        return {
            pooling: (
                reference(table, ids, offsets, weights, pooling=pooling),
                embedding_bag(parts, ids, offsets, weights, storage=storage, pooling=pooling),
            )
            for pooling in ("sum", "mean")
        }

    return program


def _check(program, table, bags, weighted):
    weights = bags.weights if weighted else None
    for pooling, found in program(jnp.asarray(table), bags.ids, bags.offsets, weights).items():
        want, bound = brute_force(table, bags, weighted=weighted, pooling=pooling)
        for values in found:
            assert values.dtype == jnp.float32
            assert np.all(np.abs(np.asarray(values, np.float64) - want) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_reference_and_plain_equal_a_loop_in_float64(dim, dtype):
    """Cases 1-12 and 14 of lookups: every kind of bag and id, sum and mean; NaN weights behind the bags must not leak.

    The tolerance is the bound for float32 sums in any order that `brute_force` derives, not a guess.
    """
    table = make_table(157, dim, DTYPES[dtype], seed=dim)
    program = _program(Storage(157, dim, dtype))
    for k, (lengths, ids) in enumerate(KINDS):
        bags = make_bags(lengths, ids, num_bags=23, capacity=211, num_rows=157, seed=k)
        _check(program, table, bags, weighted=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_thousands_of_ids(weighted):
    table = make_table(997, 24, np.float32)
    bags = make_bags("one long", "uniform", num_bags=11, capacity=4999, num_rows=997)
    assert np.diff(bags.offsets).max() > 3000
    _check(_program(Storage(997, 24)), table, bags, weighted)


def test_a_table_in_several_parts():
    table = make_table(600, 16, np.float32)
    storage = Storage(600, 16, max_part_bytes=256 * 64)
    assert storage.num_parts == 3
    program = _program(storage)
    for ids in IDS:
        _check(program, table, make_bags("a few", ids, num_bags=37, capacity=599, num_rows=600), False)


def _pooled(table, ids, offsets, weights=None, pooling="sum"):
    table = jnp.asarray(table, jnp.float32)
    storage = Storage(*table.shape)
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    found = embedding_bag(
        pack(table, storage), np.asarray(ids), np.asarray(offsets), weights, storage=storage, pooling=pooling
    )
    if len(ids) and np.abs(ids).max() < 2**31:
        want = reference(table, jnp.asarray(ids, jnp.int32), jnp.asarray(offsets), weights, pooling=pooling)
        np.testing.assert_allclose(found, want, rtol=1e-6)
    return np.asarray(found)


ROWS = np.repeat(np.arange(8.0)[:, None], 8, axis=1)  # E[i] = [i, i, ...]


def test_no_bags_gives_no_rows():
    """Case 01."""
    assert _pooled(ROWS, np.zeros(0, int), [0]).shape == (0, 8)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_empty_bags_give_zeros(pooling):
    """Case 03."""
    assert not _pooled(ROWS, np.zeros(0, int), [0, 0, 0], pooling=pooling).any()
    assert not _pooled(ROWS, [3, 3], [0, 0, 0], pooling=pooling).any()


def test_weighted_mean_divides_by_the_weights():
    """Case 05."""
    found = _pooled(ROWS, [1, 2], [0, 2], [10, 100], "mean")
    np.testing.assert_allclose(found, np.full((1, 8), (10 * 1 + 100 * 2) / 110), rtol=1e-6)
    assert not _pooled(ROWS, [1, 2], [0, 2], [5, -5], "mean").any()


def test_weighted_sum():
    """Case 06."""
    assert (_pooled(ROWS, [1, 2], [0, 2], [10, 100]) == 210).all()


@pytest.mark.parametrize("bad", [8, -1, 2**31, 2**33, 2**32 + 3, -(2**40)])
def test_an_id_outside_of_the_table_is_never_another_row(bad):
    """Case 07: also beyond 32 bits, where a cast would wrap 2**32 + 3 to row 3."""
    assert (_pooled(ROWS, np.asarray([5, bad, 1], np.int64), [0, 3]) == 6).all()


def test_a_skipped_id_takes_its_weight_with_it():
    """Case 08."""
    assert (_pooled(ROWS, [3, -1, 5], [0, 3], [1, 2, 3]) == 3 + 15).all()
    np.testing.assert_allclose(_pooled(ROWS, [3, -1, 5], [0, 3], [1, 2, 3], "mean"), (3 + 15) / 4, rtol=1e-6)


@pytest.mark.parametrize("types", [(np.int32, np.int64), (np.int64, np.int32)])
def test_integer_widths_may_differ(types):
    """Case 09."""
    ids, offsets = np.asarray([1, 2], types[0]), np.asarray([0, 2], types[1])
    assert (_pooled(ROWS, ids, offsets) == 3).all()


def test_padding_has_no_effect():
    """Case 11."""
    plain = _pooled(ROWS, [1, 2, 3], [0, 2, 3], pooling="mean")
    padded = _pooled(ROWS, [-1, 1, -1, 2, 3, -1, -1, -1], [0, 4, 6], pooling="mean")
    np.testing.assert_array_equal(plain, padded)


def test_ids_behind_the_last_offset_are_ignored():
    """Case 14."""
    assert (_pooled(ROWS, [1, 2, 7, 7], [0, 2]) == 3).all()


def test_features_of_stacked_tables_in_one_call():
    """Two tables of one dim below one another; the second one's ids carry its row offset."""
    storage, row_offsets = stack([5, 7], dim=8)
    tables = np.concatenate([ROWS[:5], 100 + ROWS[:7]])
    ids = np.asarray([1, 4, 0 + row_offsets[1], 6 + row_offsets[1]])
    found = embedding_bag(pack(jnp.asarray(tables, jnp.float32), storage), ids, np.asarray([0, 2, 4]), storage=storage)
    assert found[:, 0].tolist() == [5, 206]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_N": np.ones(3, np.float32)}, r"weights are float32\(3,\): expected float32 \(2,\)"),
        ({"weights_N": np.ones(2, np.int32)}, "weights are int32"),
        ({"ids_N": np.ones(2, np.float32)}, "ids are float32"),
        ({"offsets": np.zeros(0, np.int32)}, "offsets are"),
        ({"parts": ()}, "the storage has"),
        ({"pooling": "max"}, "pooling 'max'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    storage = Storage(8, 8)
    arguments = {
        "parts": pack(jnp.asarray(ROWS, jnp.float32), storage),
        "ids_N": np.asarray([1, 2], np.int32),
        "offsets": np.asarray([0, 2], np.int32),
        "storage": storage,
    }
    with pytest.raises(ConfigError, match=message):
        embedding_bag(**(arguments | change))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", [8, 24, 288])
def test_weights_gradient_equals_finite_sums(dim, pooling):
    """The gradient with respect to per-id weights, against float64 and against jax's derivative of the specification.

    rtol 2e-5: a dot product of at most 288 terms, and for means the difference of two of them.
    """
    table = make_table(61, dim, np.float32)
    storage = Storage(61, dim)
    parts = pack(jnp.asarray(table), storage)
    gradient = np.random.default_rng(1).standard_normal((17, dim)).astype(np.float32)
    program = jax.jit(functools.partial(weights_gradient, storage=storage, pooling=pooling))
    for k, (lengths, ids) in enumerate(KINDS):
        bags = make_bags(lengths, ids, num_bags=17, capacity=83, num_rows=61, seed=k)
        if pooling == "mean":  # weights that nearly cancel would make the quotient anything
            bags = dataclasses.replace(bags, weights=np.abs(bags.weights) + np.float32(0.1))
        found = np.asarray(program(parts, bags.ids, bags.offsets, bags.weights, gradient))
        np.testing.assert_allclose(found, _weights_gradient(table, bags, gradient, pooling), rtol=2e-5, atol=2e-4)
        assert not found[~bags.counts()].any()
    clean = np.where(np.isnan(bags.weights), 0, bags.weights)

    @jax.jit
    @jax.grad
    def derivative(weights):
        return (reference(jnp.asarray(table), bags.ids, bags.offsets, weights, pooling=pooling) * gradient).sum()

    np.testing.assert_allclose(found, derivative(clean), rtol=2e-4, atol=2e-4)


def test_weights_gradient_of_a_mean_without_weight_is_zero():
    """Case 05, backwards: zeros, never NaN."""
    storage = Storage(8, 8)
    parts = pack(jnp.asarray(ROWS, jnp.float32), storage)
    weights, gradient = jnp.asarray([5.0, -5.0, 3.0]), jnp.ones((2, 8))
    found = weights_gradient(
        parts, np.asarray([1, 2, -1]), np.asarray([0, 2, 3]), weights, gradient, storage=storage, pooling="mean"
    )
    assert found.tolist() == [0, 0, 0]


def _weights_gradient(table: np.ndarray, bags: Bags, gradient: np.ndarray, pooling: str) -> np.ndarray:
    found = np.zeros(len(bags.ids))
    pooled, _ = brute_force(table, bags, weighted=True, pooling=pooling)
    counts = bags.counts()
    for bag in range(len(bags.offsets) - 1):
        positions = [n for n in range(bags.offsets[bag], bags.offsets[bag + 1]) if counts[n]]
        total = sum(float(bags.weights[n]) for n in positions)
        for n in positions:
            row = table[bags.ids[n]].astype(np.float64)
            if pooling == "sum":
                found[n] = row @ gradient[bag]
            elif total:
                found[n] = (row - pooled[bag]) @ gradient[bag] / total
    return found
