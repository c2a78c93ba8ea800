"""What one optimizer step does to one row: written once, for the reference, plain JAX and the kernels.

FBGEMM's rules (fbgemm_gpu 1.8, `EXACT_SGD`, `EXACT_ADAGRAD`, `EXACT_ROWWISE_ADAGRAD`), for a row w with gradient g:

    sgd               w -= lr * g
    adagrad           s += g^2;        w -= lr / (sqrt(s) + eps) * g      s has the row's shape
    rowwise_adagrad   s += mean(g^2);  w -= lr / (sqrt(s) + eps) * g      s is one number per row

Weight decay is FBGEMM's `WeightDecayMode.L2`: g = gradient + weight_decay * w before anything else, on touched rows
only. FBGEMM's own CPU kernels accept `weight_decay` and ignore it for all three (seen with 1.8.0); its GPU kernel for
row-wise Adagrad does what is written here.

The functions are element-wise and take their square root as an argument, because a SparseCore has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.errors import ConfigError
from tpurec.kernels.storage import Storage, pack, unpack

NAMES = ("sgd", "adagrad", "rowwise_adagrad")
_TILE = 1024  # words of a one-dimensional tile
_SMALLEST = 1e-36  # below, intermediate results are subnormal, which TPUs flush to 0


@dataclass(frozen=True)
class RowOptimizer:
    """The part of an optimizer that a program is compiled for; the learning rate is an array and not part of it.

    Args:
        name: `sgd`, `adagrad` or `rowwise_adagrad`.
        eps: added to the root of the accumulator; unused by `sgd`.
        weight_decay: L2 coefficient, >= 0.

    Raises:
        ConfigError: naming the value and what is allowed.

    >>> RowOptimizer("rowwise_adagrad").state_shape(1000, 64)
    (1000,)
    """

    name: str
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"optimizer {self.name!r} is not known.", f"Known optimizers: {', '.join(NAMES)}.")
        for field in ("eps", "weight_decay"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{self.name}: {field} {getattr(self, field)}: 0 or a positive number is needed.")

    def state_shape(self, num_rows: int, dim: int) -> tuple[int, ...] | None:
        """Shape of the float32 accumulators of a plain table.

        Args:
            num_rows: rows of the table.
            dim: its columns.

        Returns:
            `(num_rows, dim)`, `(num_rows,)`, or None if there is no state.
        """
        return {"sgd": None, "adagrad": (num_rows, dim), "rowwise_adagrad": (num_rows,)}[self.name]

    def state_storage(self, storage: Storage) -> Storage | None:
        """How per-element accumulators of a storage lie in memory.

        Args:
            storage: the table's.

        Returns:
            A float32 storage for `adagrad`; None for the others.
        """
        if self.name != "adagrad":
            return None
        return Storage(storage.num_rows, storage.dim, "float32", storage.max_part_bytes)

    def state_bytes(self, storage: Storage) -> int:
        """Bytes of the accumulators of a storage."""
        if self.name == "rowwise_adagrad":
            return rowwise_entries(storage.num_rows) * 4
        of_state = self.state_storage(storage)
        return of_state.num_bytes if of_state else 0


def rowwise_entries(num_rows: int) -> int:
    """Entries of packed row-wise accumulators: whole tiles of 1,024, so that `[n]` and `[n / 128, 128]` lie alike.

    Args:
        num_rows: rows of the storage.

    Returns:
        The multiple of 1,024.
    """
    return -(-num_rows // _TILE) * _TILE


def pack_state(optimizer: RowOptimizer, state: jax.Array | None, storage: Storage) -> tuple[jax.Array, ...]:
    """Lay plain accumulators out as the kernels keep them.

    Args:
        optimizer: decides the shape.
        state: float32 `optimizer.state_shape(num_rows, dim)`, or None if there is none.
        storage: of the table.

    Returns:
        `()` for `sgd`, the parts of `optimizer.state_storage(storage)` for `adagrad`, one array of
        `rowwise_entries(num_rows)` for `rowwise_adagrad`.
    """
    expected = optimizer.state_shape(storage.num_rows, storage.dim)
    if (None if state is None else (state.shape, state.dtype)) != (None if expected is None else (expected, "float32")):
        found = None if state is None else (state.shape, str(state.dtype))
        raise ConfigError(f"{optimizer.name}: state {found}, expected float32 {expected}.")
    if optimizer.name == "adagrad":
        return pack(state, optimizer.state_storage(storage))
    return () if state is None else (jnp.pad(state, (0, rowwise_entries(storage.num_rows) - storage.num_rows)),)


def unpack_state(optimizer: RowOptimizer, state: tuple[jax.Array, ...], storage: Storage) -> jax.Array | None:
    """The inverse of `pack_state`.

    Args:
        optimizer: decides the shape.
        state: as `pack_state` returns it.
        storage: of the table.

    Returns:
        float32 `optimizer.state_shape(num_rows, dim)`, or None.
    """
    if optimizer.name == "adagrad":
        return unpack(state, optimizer.state_storage(storage))
    return state[0][: storage.num_rows] if state else None


def decayed(optimizer: RowOptimizer, grad: Any, row: Any) -> Any:
    """The gradient with L2 weight decay: `grad + weight_decay * row`.

    Args:
        optimizer: has the coefficient.
        grad: combined gradient, float32, any shape.
        row: weights before the step, float32, same shape.

    Returns:
        float32, same shape.
    """
    return grad + optimizer.weight_decay * row if optimizer.weight_decay else grad


def rate(optimizer: RowOptimizer, state: Any, lr: Any, sqrt: Callable[[Any], Any] = jnp.sqrt) -> Any:
    """The factor of the gradient, from accumulators that have grown already: `lr / (sqrt(state) + eps)`.

    Args:
        optimizer: has eps.
        state: float32 accumulators, any shape.
        lr: learning rate, float32, broadcastable.
        sqrt: square root to use.

    Returns:
        float32, the shape of `state`. With `state` and `eps` both 0 the gradient is 0 as well, and so is the rate.
    """
    divisor = sqrt(state) + optimizer.eps
    if optimizer.eps:
        return lr / divisor
    return jnp.where(divisor == 0.0, 0.0, lr / jnp.where(divisor == 0.0, 1.0, divisor))


def step(
    optimizer: RowOptimizer, rows_UD: jax.Array, grads_UD: jax.Array, state_U: jax.Array | None, lr: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """One step on each row.

    Args:
        optimizer: the rule.
        rows_UD: float32 `[U, dim]`.
        grads_UD: float32 `[U, dim]`, duplicates combined.
        state_U: float32 `[U, dim]`, `[U]` or None, as the rule says.
        lr: float32 scalar.

    Returns:
        New rows and new state, same shapes, float32.
    """
    grads_UD = decayed(optimizer, grads_UD, rows_UD)
    if optimizer.name == "sgd":
        return rows_UD - lr * grads_UD, None
    if optimizer.name == "adagrad":
        state = state_U + grads_UD * grads_UD
        return rows_UD - rate(optimizer, state, lr) * grads_UD, state
    state = state_U + jnp.mean(grads_UD * grads_UD, axis=1)
    return rows_UD - rate(optimizer, state, lr)[:, None] * grads_UD, state


def sqrt_without_root(x: jax.Array, bitcast: Callable[[jax.Array, Any], jax.Array]) -> jax.Array:
    """Square root from shifts, multiplications and additions, for a core without one: within 1 ulp.

    The reciprocal root is guessed from the exponent bits (0x5f3759df, W. Kahan and K. Ng) and refined by two Newton
    steps to 5e-6; one step of Heron's on the root itself squares that error and undoes most of the rounding.

    Args:
        x: float32, 0 <= x < inf. Below 1e-30 the error is 1e-5 of the root, below 1e-36 anything up to 2e-18.
        bitcast: `lax.bitcast_convert_type` or the core's own.

    Returns:
        float32, same shape.
    """
    normal = jnp.maximum(x, _SMALLEST)
    half_bits = lax.shift_right_logical(bitcast(normal, jnp.int32), jnp.full(x.shape, 1, jnp.int32))
    guess = bitcast(jnp.full(x.shape, 0x5F3759DF, jnp.int32) - half_bits, jnp.float32)
    for _ in range(2):
        guess = guess * (1.5 - (0.5 * normal * guess) * guess)
    root = x * guess
    return root + (0.5 * guess) * (x - root * root)
