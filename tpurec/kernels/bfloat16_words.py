"""Two bfloat16 in a 32-bit word, taken apart and put together with integer operations that every core has.

The even column is the low half (`storage.py`). `bitcast` is the core's own: `lax.bitcast_convert_type`, `plsc.bitcast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_HIGH_HALF = -65536  # 0xFFFF0000
_QUIET_NAN = 0x7FC0
Bitcast = Callable[[jax.Array, Any], jax.Array]


def halves(word: jax.Array, bitcast: Bitcast) -> tuple[jax.Array, jax.Array]:
    """The two numbers of each word.

    Args:
        word: int32, any shape.
        bitcast: of the core.

    Returns:
        float32, same shape: even column, odd column.
    """
    even = bitcast(lax.shift_left(word, _like(word, 16)), jnp.float32)
    return even, bitcast(word & _like(word, _HIGH_HALF), jnp.float32)


def word_of(even: jax.Array, odd: jax.Array, bitcast: Bitcast) -> jax.Array:
    """The inverse of `halves`, rounding to the nearest even as XLA does; NaN stays NaN.

    Args:
        even: float32, any shape.
        odd: float32, same shape.
        bitcast: of the core.

    Returns:
        int32, same shape.
    """
    return _round(even, bitcast) | lax.shift_left(_round(odd, bitcast), _like(even, 16))


def _round(x: jax.Array, bitcast: Bitcast) -> jax.Array:
    """bfloat16 bits in the low half."""
    bits = bitcast(x, jnp.int32)
    last_kept = lax.shift_right_logical(bits, _like(bits, 16)) & _like(bits, 1)
    rounded = lax.shift_right_logical(bits + last_kept + _like(bits, 0x7FFF), _like(bits, 16))
    return jnp.where(x != x, _like(bits, _QUIET_NAN), rounded)


def _like(x: jax.Array, value: int) -> jax.Array:
    return jnp.full(x.shape, value, jnp.int32)
