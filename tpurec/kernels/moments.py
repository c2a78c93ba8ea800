"""Adam's arithmetic, element by element, for plain JAX and for the kernels: what a SparseCore can do, too.

The square root is an argument, because a SparseCore has none; what depends on the step alone comes as scalars that the
TensorCore has worked out (`step_scalars`), because it has no exponential either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from tpurec.kernels.optimizers import RowOptimizer

MOMENT_NAMES = ("adam", "rowwise_adam")


def step_scalars(optimizer: RowOptimizer, lr: jax.Array, count: jax.Array | None) -> tuple[jax.Array, ...]:
    """What all rows of one update have in common.

    Args:
        optimizer: the rule.
        lr: float32 scalar.
        count: int32 scalar, the number of this update; None for rules that do not count.

    Returns:
        float32 scalars: the learning rate; for Adam also `lr / (1 - b1^t)` and `1 / (1 - b2^t)`.
    """
    if optimizer.name not in MOMENT_NAMES:
        return (lr,)
    return lr, lr / one_minus_power(optimizer.beta1, count), 1.0 / one_minus_power(optimizer.beta2, count)


def one_minus_power(base: float, exponent: jax.Array) -> jax.Array:
    """`1 - base ** exponent` without cancellation: in float32, 1 - 0.999 ** 1 would lose four digits of seven.

    Args:
        base: in [0, 1).
        exponent: int32 scalar, 1 or more.

    Returns:
        float32 scalar.
    """
    return -jnp.expm1(exponent.astype(jnp.float32) * math.log(base)) if base else jnp.float32(1)


def first_moment(optimizer: RowOptimizer, old: Any, grad: Any) -> Any:
    """The running mean of gradients: `b1 * old + (1 - b1) * grad`.

    Args:
        optimizer: has b1.
        old: float32, any shape.
        grad: float32, same shape.

    Returns:
        float32, same shape.
    """
    return optimizer.beta1 * old + (1 - optimizer.beta1) * grad


def second_moment(optimizer: RowOptimizer, old: Any, square: Any) -> Any:
    """The running mean of squares: `b2 * old + (1 - b2) * square`.

    Args:
        optimizer: has b2.
        old: float32, any shape.
        square: float32, same shape: squared gradients, or their mean over a row.

    Returns:
        float32, same shape.
    """
    return optimizer.beta2 * old + (1 - optimizer.beta2) * square


def moment_rate(
    optimizer: RowOptimizer, second: Any, scale: Any, correction: Any, sqrt: Callable[[Any], Any] = jnp.sqrt
) -> Any:
    """The factor of the first moment, from a second one that has grown already.

    Args:
        optimizer: has eps.
        second: float32, any shape.
        scale: `lr / (1 - b1^t)`, float32, broadcastable.
        correction: `1 / (1 - b2^t)`, float32, broadcastable.
        sqrt: square root to use.

    Returns:
        float32, the shape of `second`.
    """
    return scale / (sqrt(second * correction) + optimizer.eps)
