"""The row rules: their root without a root, their state's layout, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpurec.errors import ConfigError
from tpurec.kernels.bfloat16_words import halves, word_of
from tpurec.kernels.optimizers import NAMES, RowOptimizer, pack_state, sqrt_without_root, unpack_state
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adam",), "optimizer 'adam' is not known"),
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
