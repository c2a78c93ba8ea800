"""The row rules: their root without a root, their state's layout, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpurec.errors import ConfigError
from tpurec.kernels.bfloat16_words import halves, word_of
from tpurec.kernels.optimizer_state import pack_state, unpack_state
from tpurec.kernels.optimizers import ACCUMULATORS, MOMENT_NAMES, NAMES, RowOptimizer, sqrt_without_root
from tpurec.kernels.storage import Storage


def test_root_without_a_root_is_within_one_unit_in_the_last_place():
    """Every exponent of float32 from 1e-30 on, with many mantissas; coarser below, and 0 gives 0."""
    x = np.random.default_rng(0).integers(0, 0x7F800000, 200_000, dtype=np.int32).view(np.float32)
    x[0] = 0
    found = np.asarray(sqrt_without_root(jnp.asarray(x), lax.bitcast_convert_type), np.float64)
    want = np.sqrt(x.astype(np.float64))
    error, large, small = np.abs(found - want), x >= 1e-30, x < 1e-36
    assert np.all(error[large] <= np.spacing(want.astype(np.float32))[large])
    assert np.all(error[~large & ~small] <= 1e-5 * want[~large & ~small])
    assert np.all(error[small] <= 2e-18)
    assert found[0] == 0


def test_bfloat16_words_round_as_xla_does():
    """Random bits: subnormals, infinities and NaN are among them; NaN must not become a number."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, (2, 300_000), dtype=np.uint32)
    bits[:, :4] = [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF]
    even, odd = jnp.asarray(bits.view(np.float32))
    word = word_of(even, odd, lax.bitcast_convert_type)
    for found, given in zip(halves(word, lax.bitcast_convert_type), (even, odd), strict=True):
        want = np.asarray(given.astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(np.asarray(found), want)


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_packing(name):
    storage, optimizer = Storage(300, 24, "bfloat16"), RowOptimizer(name)
    shape = optimizer.state_shape(300, 24)
    state = None if shape is None else jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    packed = pack_state(optimizer, state, storage)
    assert sum(one.nbytes for one in packed) == optimizer.state_bytes(storage)
    found = unpack_state(optimizer, packed, storage)
    assert found is state is None or np.array_equal(found, state)


@pytest.mark.parametrize("seed", [-1, 7])
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_state_of_several_arrays_survives_packing_in_parts(name, seed):
    """The step count is a part of it for Adam, and for every rule that rounds stochastically."""
    storage, optimizer = Storage(300, 24, "bfloat16", max_part_bytes=1 << 14), RowOptimizer(name, rounding_seed=seed)
    shapes = optimizer.state_shapes(300, 24)
    assert storage.num_parts > 1 and (() in shapes) == (seed >= 0 or name in MOMENT_NAMES)
    state = tuple(
        jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + number if shape else jnp.int32(5)
        for number, shape in enumerate(shapes)
    )
    packed = pack_state(optimizer, state, storage)
    assert [one.shape for one in packed] == optimizer.packed_shapes(storage)
    assert sum(one.nbytes for one in packed) == optimizer.state_bytes(storage)
    found = unpack_state(optimizer, packed, storage)
    found = () if found is None else found if isinstance(found, tuple) else (found,)
    assert len(found) == len(state) and all(map(np.array_equal, found, state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lamb",), "optimizer 'lamb' is not known"),
        (("adam", 0.0), "eps 0 divides by zero"),
        (("adam", 1e-8, 0.0, 1.0), "beta1 1.0: must lie in"),
        (("sgd", 1e-8, 0.0, 0.9, 0.999, False, -1.0), "max_norm -1.0"),
        (("sgd", 1e-8, 0.0, 0.9, 0.999, False, 0.0, 2**31), "rounding_seed 2147483648"),
        (("sgd", 1e-8, -0.1), "weight_decay -0.1"),
        (("adagrad", float("nan")), "eps nan"),
    ],
)
def test_rules_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RowOptimizer(*arguments)


def test_state_of_another_rule_is_refused():
    with pytest.raises(ConfigError, match="rowwise_adagrad: state"):
        pack_state(RowOptimizer("rowwise_adagrad"), jnp.ones((3, 8)), Storage(3, 8))
