"""Permuting, inverting, selecting and distributing: the JAX functions equal FBGEMM's CPU ops, or a loop."""

from functools import partial

import fbgemm_gpu.sparse_ops  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tools.jagged import KINDS, make
from tpurec.kernels import jagged_bucketize, jagged_permute

fbgemm = torch.ops.fbgemm


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def of(array):
    return None if array is None else torch.from_numpy(np.array(array))


@partial(jax.jit, static_argnames="capacity")
def _permute(permute, lengths, values, weights, capacity):
    return jagged_permute.permute_jagged(permute, lengths, values, weights, capacity)


@pytest.mark.parametrize(
    ("shape", "lengths_dtype", "values_dtype", "order"),
    [
        ((1, 1, 1), np.int32, np.int64, "all"),
        ((3, 5, 0), np.int64, np.int32, "repeated"),
        ((2, 0, 4), np.int32, np.int32, "all"),
        ((5, 13, 1001), np.int32, np.int64, "repeated"),
        ((5, 13, 1001), np.int64, np.int32, "some"),
    ],
)
def test_permute_2d_equals_fbgemm(shape, lengths_dtype, values_dtype, order):
    """Cases 01, 03, 09, 11 and 14: capacity behind the last bag has no effect and becomes -1 and 0."""
    rows = shape[0]
    permute = {"all": np.arange(rows)[::-1], "repeated": np.resize([0, rows - 1], 2 * rows + 1), "some": np.arange(1)}
    permute = permute[order].astype(np.int32)
    capacity = (2 * rows + 1) * shape[2] if order == "repeated" else shape[2]
    for kind in KINDS:
        case = make(kind, *shape, lengths_dtype=lengths_dtype, values_dtype=values_dtype)
        lengths, values, weights = _permute(permute, case.lengths, case.values, case.weights, capacity)
        used = case.used
        theirs = fbgemm.permute_2D_sparse_data(
            of(permute), of(case.lengths), of(case.values[:used]), of(case.weights[:used])
        )
        assert lengths.dtype == lengths_dtype
        assert values.dtype == values_dtype
        assert np.array_equal(lengths, theirs[0]), kind
        size = len(theirs[1])
        assert np.array_equal(values[:size], theirs[1]), kind
        assert np.array_equal(weights[:size], theirs[2]), kind
        assert np.all(values[size:] == -1) and np.all(weights[size:] == 0), kind


@pytest.mark.parametrize("kind", ["mixed", "all in one bag"])
def test_permute_1d_equals_fbgemm(kind):
    case = make(kind, 1, 37, 201)
    lengths = case.lengths.reshape(-1)
    permute = np.random.default_rng(0).integers(0, 37, 37).astype(np.int32)
    theirs = fbgemm.permute_1D_sparse_data(of(permute), of(lengths), of(case.values), of(case.weights))
    new_lengths, values, weights = _permute(permute, lengths, case.values, case.weights, 37 * 201)
    size = len(theirs[1])
    assert np.array_equal(new_lengths, theirs[0])
    assert np.array_equal(values[:size], theirs[1])
    assert np.array_equal(weights[:size], theirs[2])


def test_a_row_that_is_not_there_is_empty():
    lengths, values = _permute(jnp.array([1, 7, -1, 0]), jnp.array([1, 2]), jnp.array([5, 6, 7]), None, 4)
    assert lengths.tolist() == [2, 0, 0, 1]
    assert values.tolist() == [6, 7, 5, -1]


def test_what_does_not_fit_is_dropped_and_shows():
    lengths, values = _permute(jnp.array([1, 0, 1]), jnp.array([1, 2]), jnp.array([5, 6, 7]), None, 2)
    assert values.tolist() == [6, 7]
    assert int(lengths.sum()) == 5 > len(values)


@pytest.mark.parametrize("lengths", [[2**33, 1], [2, 2**31 - 1]])
def test_lengths_that_lie_are_cut_to_the_values(lengths):
    """Case 10's kind on a device, where nothing can be raised: sizes do not wrap, no foreign memory is read."""
    _, values = _permute(jnp.array([0, 1]), jnp.array(lengths), jnp.array([5, 6, 7]), None, 3)
    assert values.tolist() == [5, 6, 7]


def test_gradient_of_repeated_rows_adds_up():
    values = jnp.asarray(np.random.default_rng(1).standard_normal((64, 3)))
    upstream = jnp.asarray(np.random.default_rng(2).standard_normal((192, 3)))
    permute = jnp.array([2, 0, 2])

    @jax.jit
    def program(lengths):
        _, pullback = jax.vjp(lambda x: jagged_permute.permute_jagged(permute, lengths, x, None, 192)[1], values)
        return jagged_permute.permute_jagged_gradient(upstream, permute, lengths, 64), pullback(upstream)[0]

    for kind in KINDS:
        ours, by_jax = program(make(kind, 3, 7, 64).lengths)
        np.testing.assert_allclose(ours, by_jax, atol=1e-12, err_msg=kind)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("size", [0, 1, 1001])
def test_invert_equals_fbgemm(size, dtype):
    permute = np.random.default_rng(3).permutation(size).astype(dtype)
    found = jagged_permute.invert_permute(jnp.asarray(permute))
    assert found.dtype == dtype
    assert np.array_equal(found, fbgemm.invert_permute(of(permute)))


@pytest.mark.parametrize("kind", ["mixed", "last only"])
def test_expand_equals_fbgemm(kind):
    case = make(kind, 1, 9, 80)
    permute = np.random.default_rng(4).permutation(9).astype(np.int32)
    inwards = case.offsets.astype(np.int32)
    outwards = np.concatenate([[0], np.cumsum(np.diff(inwards)[permute])]).astype(np.int32)
    theirs = fbgemm.expand_into_jagged_permute(of(permute), of(inwards), of(outwards), case.used)
    found = jax.jit(jagged_permute.expand_permute, static_argnums=3)(permute, inwards, outwards, 80)
    assert np.array_equal(found[: case.used], theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_selected_bags_equal_a_loop(kind):
    """FBGEMM has no CPU kernel for `keyed_jagged_index_select_dim1`."""
    case = make(kind, 3, 7, 64)
    chosen = np.array([6, 0, 0, 3])
    bags = np.split(case.values[: case.used], case.offsets[1:-1])
    weights = np.split(case.weights[: case.used], case.offsets[1:-1])
    picked = [key * 7 + bag for key in range(3) for bag in chosen]
    select = jax.jit(jagged_permute.select_bags, static_argnums=(4, 5))
    found = select(case.values, case.lengths.reshape(-1), chosen, case.weights, 7, 256)
    assert found[1].tolist() == [len(bags[bag]) for bag in picked]
    size = int(found[1].sum())
    assert np.array_equal(found[0][:size], np.concatenate([bags[bag] for bag in picked]))
    assert np.array_equal(found[2][:size], np.concatenate([weights[bag] for bag in picked]))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=15, max_size=15),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_permute_of_any_lengths_and_order(lengths, permute, seed):
    lengths = np.array(lengths).reshape(5, 3)
    values = np.random.default_rng(seed).integers(0, 2**40, 90)
    permute = np.array(permute, np.int32)
    with jax.enable_x64(True):
        found = _permute(permute, lengths, values, None, 90)
    theirs = fbgemm.permute_2D_sparse_data(of(permute), of(lengths), of(values))
    assert np.array_equal(found[0], theirs[0])
    assert np.array_equal(found[1][: len(theirs[1])], theirs[1])


# Row-wise buckets

_bucketize = jax.jit(jagged_bucketize.block_bucketize, static_argnums=(3, 9))
OPTIONS = {
    "blocks": {},
    "total blocks, one without size": {"sizes": np.array([9, 0, 30]), "total": np.array([4, 8, 12])},
    "boundaries": {"positions": [np.array([0, 100, 101, 400, 900]), np.array([0, 0, 0, 0, 9]), np.arange(5) * 250]},
    "boundaries, no size": {"sizes": np.array([0, 0, 0]), "positions": [np.arange(5) * 250] * 3},
    "batch sizes, ids kept per feature": {
        "batch_sizes": np.array([9, 0, 12]),
        "keep_of": np.array([True, False, False]),
    },
}


def _both(case, dtype, option, num_buckets, weighted=True):
    sizes = option.get("sizes", np.array([250, 100, 1])).astype(dtype)
    total, keep_of, batch_sizes = (option.get(name) for name in ("total", "keep_of", "batch_sizes"))
    positions = [array.astype(dtype) for array in option.get("positions", [])]
    batch_sizes = None if batch_sizes is None else batch_sizes.astype(case.lengths.dtype)
    total = None if total is None else total.astype(dtype)
    lengths, used = case.lengths.reshape(-1), case.used
    weights = case.weights if weighted else None
    ours = _bucketize(
        lengths,
        case.values,
        sizes,
        num_buckets,
        weights,
        batch_sizes,
        positions,
        total,
        keep_of,
        option.get("keep", False),
    )
    theirs = fbgemm.block_bucketize_sparse_features_inference(
        of(lengths),
        of(case.values[:used]),
        True,
        True,
        of(sizes),
        num_buckets,
        of(case.weights[:used]) if weighted else None,
        of(batch_sizes),
        -1 if batch_sizes is None else int(batch_sizes.max()),
        [of(array) for array in positions] or None,
        True,
        option.get("keep", False),
        of(total),
        of(keep_of),
    )
    return ours, [theirs[0], theirs[1], theirs[3], theirs[4], theirs[5], *([theirs[2]] if weighted else [])]


@pytest.mark.parametrize("option", OPTIONS)
def test_bucketize_equals_fbgemm(option):
    """Cases 07, 09, 11 and 14: negative ids and ids beyond all blocks included."""
    # Every other option with the dtypes the other way round; each has both kinds of rules.
    dtypes = [np.int32, np.int64]
    lengths_dtype, ids_dtype = dtypes if list(OPTIONS).index(option) % 3 else dtypes[::-1]
    for kind in KINDS:
        case = make(kind, 3, 7, 203, lengths_dtype=lengths_dtype, values_dtype=ids_dtype)
        case.values[: case.used : 5] *= -1
        case.values[1 : case.used : 7] = np.iinfo(ids_dtype).max
        ours, theirs = _both(case, ids_dtype, OPTIONS[option], 4)
        assert ours[0].dtype == lengths_dtype
        assert np.array_equal(ours[0], theirs[0]), kind
        for name, mine, other in zip(("ids", "places", "went", "bucket", "weights"), ours[1:], theirs[1:], strict=True):
            assert np.array_equal(mine[: case.used], other), (kind, name)
        assert all(np.all(ours[n][case.used :] == -1) for n in (1, 2, 4))
        assert np.array_equal(ours[3][case.used :], np.arange(case.used, 203))
        assert np.all(ours[5][case.used :] == 0)


def test_unbucketize_gives_back_what_was_distributed():
    num_buckets = 65
    case = make("mixed", 3, 7, 203)
    ours, theirs = _both(case, np.int64, {"keep": True}, num_buckets, weighted=False)
    assert np.array_equal(ours[1][: case.used], theirs[1])
    assert np.array_equal(np.asarray(ours[1])[np.asarray(ours[3])][: case.used], case.values[: case.used])


@pytest.mark.parametrize(("bags", "capacity"), [(0, 5), (7, 0)])
def test_bucketize_of_nothing(bags, capacity):
    """Case 01."""
    case = make("all empty", 3, bags, capacity)
    ours = _bucketize(case.lengths.reshape(-1), case.values, np.array([10, 10, 10]), 4, case.weights)
    assert ours[0].tolist() == [0] * (4 * 3 * bags)
    assert [len(array) for array in ours[1:]] == [capacity] * 5


def test_a_bucket_boundary_above_the_id_gives_the_first_bucket():
    """FBGEMM writes before the start of its memory here."""
    found = _bucketize(np.array([1]), np.array([3]), np.array([10]), 2, None, None, [np.array([5, 9, 20])])
    assert found[0].tolist() == [1, 0]
