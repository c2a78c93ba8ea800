"""`embedding_update`: the specification against a loop in float64, and every implementation against it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.tools.cases import DIMS, IDS, LENGTHS, make_bags, make_table
from tests.kernels.tools.update_cases import LR, check_update, make_state, positive, run_update
from tpurec.errors import ConfigError
from tpurec.kernels.dispatch import KernelLimit
from tpurec.kernels.embedding_update import reference, update
from tpurec.kernels.optimizers import NAMES, RowOptimizer
from tpurec.kernels.storage import Storage, pack, stack, unpack
from tpurec.topology.chips import chip

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [(lengths, ids) for lengths in LENGTHS for ids in IDS]
# Together they cover every optimizer with every pooling, with and without decay.
RULES = [
    (RowOptimizer("sgd"), "mean"),
    (RowOptimizer("sgd", weight_decay=0.3), "sum"),
    (RowOptimizer("adagrad"), "sum"),
    (RowOptimizer("adagrad", eps=1e-3, weight_decay=0.3), "mean"),
    (RowOptimizer("rowwise_adagrad"), "sum"),
    (RowOptimizer("rowwise_adagrad", eps=1e-3, weight_decay=0.3), "mean"),
]


ONE_OF_EACH = RULES[1::2]


def _program(storage, rules):
    """Specification and plain implementation under each rule, in one compiled program."""

    @jax.jit
    def program(table, states, grads, ids, offsets, weights):
        return [
            (
                reference(table, state, grads, ids, offsets, weights, jnp.float32(LR), optimizer, pooling),
                run_update(table, state, grads, ids, offsets, weights, optimizer, pooling, storage),
            )
            for (optimizer, pooling), state in zip(rules, states, strict=True)
        ]

    return program


def _check_rules(program, table, grads, bags, weighted, rules):
    states = [make_state(optimizer, *table.shape) for optimizer, _ in rules]
    weights = bags.weights if weighted else None
    found = program(jnp.asarray(table), states, grads, bags.ids, bags.offsets, weights)
    for (optimizer, pooling), state, both in zip(rules, states, found, strict=True):
        for one in both:
            check_update(one, table, state, grads, bags, optimizer, pooling, weighted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_reference_and_plain_equal_a_loop_in_float64(dim, dtype):
    """Cases 1-12, 14, 16 of updates: every kind of bag and id; NaN weights behind the bags must not leak.

    The tolerance is derived in `brute_force_update`. Each dim takes two of the rules, with weights or without, so that
    ten dims of two dtypes take every rule both ways; large dims take a sample of the kinds.
    """
    case = DIMS.index(dim) + list(DTYPES).index(dtype)
    rules = [RULES[2 * case % len(RULES)], RULES[(2 * case + 3) % len(RULES)]]
    program = _program(Storage(97, dim, dtype), rules)
    table = make_table(97, dim, DTYPES[dtype], seed=dim)
    grads = np.random.default_rng(dim).standard_normal((13, dim), dtype=np.float32)
    for k, (lengths, ids) in enumerate(KINDS[:: 1 if dim <= 32 else 7]):
        bags = positive(make_bags(lengths, ids, num_bags=13, capacity=111, num_rows=97, seed=k))
        _check_rules(program, table, grads, bags, case % 2 == 1, rules)


def test_thousands_of_ids_in_one_bag_and_one_hot_row():
    table = make_table(301, 24, np.float32)
    grads = np.random.default_rng(0).standard_normal((7, 24), dtype=np.float32)
    bags = positive(make_bags("one long", "one hot row", num_bags=7, capacity=3999, num_rows=301))
    assert np.bincount(bags.ids[bags.counts()]).max() > 1500
    _check_rules(_program(Storage(301, 24), ONE_OF_EACH), table, grads, bags, True, ONE_OF_EACH)


def test_a_table_in_several_parts():
    table = make_table(600, 16, np.float32)
    storage = Storage(600, 16, max_part_bytes=256 * 64)
    assert storage.num_parts == 3
    program = _program(storage, ONE_OF_EACH)
    grads = np.random.default_rng(0).standard_normal((11, 16), dtype=np.float32)
    for ids in IDS:
        bags = positive(make_bags("a few", ids, num_bags=11, capacity=299, num_rows=600))
        _check_rules(program, table, grads, bags, False, ONE_OF_EACH)


# ---- cases by hand ----

ONES = np.ones((8, 8), np.float32)


def _update_ones(ids, offsets, optimizer, weights=None, pooling="sum", state=None, grads=None, lr=1.0):
    num_bags = len(offsets) - 1
    grads = np.ones((num_bags, 8), np.float32) if grads is None else grads
    weights = None if weights is None else np.asarray(weights, np.float32)
    ids, offsets = np.asarray(ids, np.int32), np.asarray(offsets, np.int32)
    found = run_update(ONES, state, grads, ids, offsets, weights, optimizer, pooling, Storage(8, 8), lr)
    want = reference(
        jnp.asarray(ONES), state, grads, ids, offsets, weights, jnp.float32(lr), optimizer, pooling
    )  # fmt: skip
    for a, b in zip(found, want, strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)
    return tuple(None if one is None else np.asarray(one) for one in found)


def test_one_step_per_row_after_duplicates_are_combined():
    """Case 12: an id three times in one bag, and once more in another feature that shares the table."""
    state = np.zeros(8, np.float32)
    new, grown = _update_ones([7, 7, 7, 7], [0, 3, 4], RowOptimizer("rowwise_adagrad", eps=0.0), state=state)
    assert grown.tolist() == [0] * 7 + [16]  # (3 + 1)^2 once, not 1 + 1 + 1 + 1
    np.testing.assert_allclose(new[7], 0.0, atol=1e-6)  # 1 - 4 / sqrt(16)
    assert (new[:7] == 1).all()


def test_two_features_of_stacked_tables_do_not_meet():
    storage, row_offsets = stack([5, 3], dim=8)
    ids = np.asarray([2, 2 + row_offsets[1]], np.int32)
    grads = np.stack([np.full(8, 1.0), np.full(8, 2.0)]).astype(np.float32)
    new, _ = run_update(ONES, None, grads, ids, np.asarray([0, 1, 2]), None, RowOptimizer("sgd"), "sum", storage, 1.0)
    assert new[:, 0].tolist() == [1, 1, 0, 1, 1, 1, 1, -1]


def test_no_bags_and_empty_bags_touch_nothing():
    """Cases 01 and 03."""
    sgd = RowOptimizer("sgd", weight_decay=0.5)
    for offsets in ([0], [0, 0, 0]):
        assert np.array_equal(_update_ones([3, 3], offsets, sgd)[0], ONES)
        assert np.array_equal(_update_ones(np.zeros(0), offsets, sgd)[0], ONES)


def test_weighted_mean_divides_by_the_weights():
    """Case 05; weights that add up to 0 give no gradient, and never NaN."""
    sgd = RowOptimizer("sgd")
    new, _ = _update_ones([1, 2], [0, 2], sgd, [10, 100], "mean")
    np.testing.assert_allclose(new[1:3, 0], [1 - 10 / 110, 1 - 100 / 110], rtol=1e-6)
    assert np.array_equal(_update_ones([1, 2], [0, 2], sgd, [5, -5], "mean")[0], ONES)


def test_weights_scale_the_gradient():
    """Case 06."""
    assert _update_ones([1, 2], [0, 2], RowOptimizer("sgd"), [10, 100])[0][1:3, 0].tolist() == [-9, -99]


@pytest.mark.parametrize("bad", [8, -1, -7, 2**31 - 1])
def test_an_id_outside_of_the_table_is_never_scattered(bad):
    """Cases 07 and 08: its weight goes with it, and later ids still count."""
    new, _ = _update_ones([3, bad, 5], [0, 3], RowOptimizer("sgd"), [1, 2, 3])
    assert new[:, 0].tolist() == [1, 1, 1, 0, 1, -2, 1, 1]
    new, _ = _update_ones([3, bad, 5], [0, 3], RowOptimizer("sgd"), pooling="mean")
    assert new[:, 0].tolist() == [1, 1, 1, 0.5, 1, 0.5, 1, 1]


def test_ids_behind_the_last_offset_are_never_scattered():
    """Cases 11 and 14: with decay and weights that are not numbers, too."""
    new, _ = _update_ones([1, 6, 6, 6], [0, 1], RowOptimizer("sgd", weight_decay=0.5), [1, np.nan, np.inf, 1])
    assert new[:, 0].tolist() == [1, -0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_first_step_from_zero_accumulators_is_finite(name):
    """Case 15, with gradients from 0 over those whose square vanishes in float32 to large ones."""
    optimizer = RowOptimizer(name, eps=1e-8)
    state = np.zeros(optimizer.state_shape(8, 8), np.float32)
    sizes = np.asarray([0, 1e-30, 1e-20, 1e-8, 1, 1e4, 1e15, -1], np.float32)
    grads = np.repeat(sizes[:, None], 8, axis=1)
    new, grown = _update_ones(np.arange(8), np.arange(9), optimizer, state=state, grads=grads)
    assert np.isfinite(new).all() and np.isfinite(grown).all()
    np.testing.assert_allclose(new[4:, 0], [0, 0, 0, 2], atol=1e-6)
    without_eps, _ = _update_ones(np.arange(8), np.arange(9), RowOptimizer(name, 0.0), state=state, grads=grads)
    assert np.isfinite(without_eps).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_occur_keep_their_bits(name):
    """Case 16: minus zero, NaN payloads and subnormals included, also in lines that other rows share."""
    words = np.full((64, 24), 0x80000000, np.uint32)
    words[1::3], words[2::3] = 0x7FC12345, 0x00000001
    table = words.view(np.float32)
    optimizer = RowOptimizer(name, weight_decay=0.1)
    shape = optimizer.state_shape(64, 24)
    state = None if shape is None else np.full(shape, -0.0, np.float32)
    ids, touched = np.asarray([5, 30, 5, 63], np.int32), [5, 30, 63]
    grads = np.ones((4, 24), np.float32)
    new, grown = run_update(table, state, grads, ids, np.arange(5), None, optimizer, "sum", Storage(64, 24))
    rest = np.setdiff1d(np.arange(64), touched)
    assert np.array_equal(np.asarray(new).view(np.uint32)[rest], words[rest])
    assert shape is None or np.signbit(np.asarray(grown)[rest]).all()


def test_another_learning_rate_compiles_nothing():
    storage, optimizer = Storage(8, 8), RowOptimizer("sgd")
    parts = pack(jnp.asarray(ONES), storage)
    step = jax.jit(
        lambda parts, lr: update(parts, (), ONES[:1], ids, ends, None, lr, storage=storage, optimizer=optimizer)
    )
    ids, ends = np.asarray([1], np.int32), np.asarray([0, 1], np.int32)
    for lr in (0.1, 0.2, 0.3):
        (new,), _ = step(parts, jnp.float32(lr))
        assert unpack([new], storage)[1, 0] == np.float32(1) - np.float32(lr)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads_BD": np.ones((2, 8), np.float32)}, r"grads are float32\(2, 8\): expected float32 \(1, 8\)"),
        ({"lr": jnp.ones(2)}, "lr is float32"),
        ({"state": (jnp.ones(8),)}, "state of sgd"),
        ({"optimizer": RowOptimizer("adagrad")}, "state of adagrad"),
        ({"weights_N": np.ones(3, np.float32)}, "weights are float32"),
        ({"parts": ()}, "the storage has"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    storage = Storage(8, 8)
    arguments = {
        "parts": pack(jnp.asarray(ONES), storage),
        "state": (),
        "grads_BD": np.ones((1, 8), np.float32),
        "ids_N": np.asarray([1, 2], np.int32),
        "offsets": np.asarray([0, 2], np.int32),
        "weights_N": None,
        "lr": jnp.float32(1),
        "storage": storage,
        "optimizer": RowOptimizer("sgd"),
    }
    with pytest.raises(ConfigError, match=message):
        update(**(arguments | change))


@pytest.mark.parametrize(
    ("generation", "implementation", "dim", "num_bags", "message"),
    [
        ("v5e", "sparsecore", 8, 1, "v5e has no SparseCore"),
        ("v5e", "tensorcore", 128, 1 << 18, "bytes of VMEM"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_with_the_limit(generation, implementation, dim, num_bags, message):
    storage, sgd = Storage(16, dim), RowOptimizer("sgd")

    def call(parts, grads, ids, offsets, lr):
        return update(
            parts, (), grads, ids, offsets, None, lr,
            storage=storage, optimizer=sgd, chip=chip(generation), implementation=implementation,
        )  # fmt: skip

    shapes = [
        (storage.part_shape, "float32"),
        ((num_bags, dim), "float32"),
        ((8,), "int32"),
        ((num_bags + 1,), "int32"),
    ]
    part, grads, ids, offsets = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    with pytest.raises(KernelLimit, match=message):
        jax.eval_shape(call, (part,), grads, ids, offsets, jax.ShapeDtypeStruct((), "float32"))
