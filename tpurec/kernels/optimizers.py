"""What one optimizer step does to one row: written once, for the reference, plain JAX and the kernels.

FBGEMM's rules (fbgemm_gpu 1.8, `EXACT_SGD`, `EXACT_ADAGRAD`, `EXACT_ROWWISE_ADAGRAD`, `ADAM`,
`PARTIAL_ROWWISE_ADAM`), for a row w with gradient g:

    sgd               w -= lr * g
    adagrad           s += g^2;        w -= lr / (sqrt(s) + eps) * g      s has the row's shape
    rowwise_adagrad   s += mean(g^2);  w -= lr / (sqrt(s) + eps) * g      s is one number per row
    adam              m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
                      w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    rowwise_adam      the same with v = b2 v + (1 - b2) mean(g^2), one number per row

t is the *global* step: the number of updates of the storage so far, this one included, whichever rows they touched. It
is part of the state and grows by one in every update, also in one without ids. The moments of a row that a batch does
not touch do not decay: row, m and v keep their bits ("lazy" or sparse Adam, as FBGEMM and `torch.optim.SparseAdam`).

What comes before and after, for every rule and for touched rows only:

1. `max_norm`: g, the row's combined gradient, is scaled down to this Euclidean norm if it is longer.
2. `weight_decay`, L2 (FBGEMM's `WeightDecayMode.L2`): g += weight_decay * w, before the accumulators see it. FBGEMM's
   own CPU kernels accept `weight_decay` and ignore it (seen with 1.8.0); its GPU kernel for row-wise Adagrad does this.
   If `decoupled` (AdamW; FBGEMM's `WeightDecayMode.DECOUPLE`): w -= lr * weight_decay * w, and g is left alone.
3. The new row is rounded to the table's dtype, to nearest, or for bfloat16 with `rounding_seed` up or down at random
   (`rounding.py`), so that steps below half a unit in the last place are not lost.

The functions are element-wise and take their square root as an argument, because a SparseCore has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpurec.errors import ConfigError
from tpurec.kernels.moments import MOMENT_NAMES, first_moment, moment_rate, second_moment, step_scalars
from tpurec.kernels.rounding import noise, truncated_to_bfloat16
from tpurec.kernels.storage import Storage

# What a rule keeps for a table: numbers per element, or one per row.
ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("element",),
    "rowwise_adagrad": ("row",),
    "adam": ("element", "element"),
    "rowwise_adam": ("element", "row"),
}
NAMES = ("sgd", "adagrad", "rowwise_adagrad")  # with one accumulator at most
State = jax.Array | tuple[jax.Array, ...] | None
_TILE = 1024  # words of a one-dimensional tile
_SMALLEST = 1e-36  # below, intermediate results are subnormal, which TPUs flush to 0


@dataclass(frozen=True)
class RowOptimizer:
    """The part of an optimizer that a program is compiled for; the learning rate is an array and not part of it.

    Args:
        name: `sgd`, `adagrad`, `rowwise_adagrad`, `adam` or `rowwise_adam`.
        eps: added to the root of the accumulator; unused by `sgd`; above 0 for Adam.
        weight_decay: coefficient, >= 0.
        beta1: decay of Adam's first moment, in [0, 1).
        beta2: decay of Adam's second moment, in [0, 1).
        decoupled: weight decay acts on the row, not on the gradient.
        max_norm: longest gradient of a row, > 0; 0 for no limit.
        rounding_seed: rounds bfloat16 rows stochastically, 0 to 2^31 - 1; -1 rounds to nearest.

    Raises:
        ConfigError: naming the value and what is allowed.

    >>> RowOptimizer("rowwise_adagrad").state_shape(1000, 64)
    (1000,)
    >>> RowOptimizer("rowwise_adam").state_shapes(1000, 64)
    ((1000, 64), (1000,), ())
    """

    name: str
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    decoupled: bool = False
    max_norm: float = 0.0
    rounding_seed: int = -1

    def __post_init__(self) -> None:
        if self.name not in ACCUMULATORS:
            raise ConfigError(f"optimizer {self.name!r} is not known.", f"Known optimizers: {', '.join(ACCUMULATORS)}.")
        for field in ("eps", "weight_decay", "max_norm"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{self.name}: {field} {getattr(self, field)}: 0 or a positive number is needed.")
        if self.name in MOMENT_NAMES and self.eps == 0:
            raise ConfigError(f"{self.name}: eps 0 divides by zero where a gradient is 0.", "Use eps 1e-8.")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{self.name}: {field} {getattr(self, field)}: must lie in [0, 1).")
        if not -1 <= self.rounding_seed < 2**31:
            raise ConfigError(f"{self.name}: rounding_seed {self.rounding_seed}: 0 to 2^31 - 1, or -1 for none.")

    @property
    def counts_steps(self) -> bool:
        """Whether the last of its state is the number of updates so far, an int32 scalar."""
        return self.name in MOMENT_NAMES or self.rounding_seed >= 0

    @property
    def beyond_kernels(self) -> str | None:
        """What of it no Pallas kernel does, in words; None if there is a kernel."""
        found = ["gradient clipping"] if self.max_norm else []
        found += ["stochastic rounding"] if self.rounding_seed >= 0 else []
        return " and ".join(found) or None

    def state_shapes(self, num_rows: int, dim: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of all state of a plain table: float32 accumulators, then the int32 step count if there is one.

        Args:
            num_rows: rows of the table.
            dim: its columns.

        Returns:
            One shape an array.
        """
        shapes = tuple({"element": (num_rows, dim), "row": (num_rows,)}[kind] for kind in ACCUMULATORS[self.name])
        return (*shapes, ()) if self.counts_steps else shapes

    def state_shape(self, num_rows: int, dim: int) -> tuple[int, ...] | None:
        """Shape of the only accumulators of a plain table.

        Args:
            num_rows: rows of the table.
            dim: its columns.

        Returns:
            `(num_rows, dim)`, `(num_rows,)`, or None if there is no state.
        """
        shapes = self.state_shapes(num_rows, dim)
        if len(shapes) > 1:
            raise ConfigError(f"{self.name} keeps {len(shapes)} arrays.", "Ask state_shapes.")
        return shapes[0] if shapes else None

    def state_storage(self, storage: Storage) -> Storage | None:
        """How per-element accumulators of a storage lie in memory.

        Args:
            storage: the table's.

        Returns:
            A float32 storage; None if the rule has none per element.
        """
        if "element" not in ACCUMULATORS[self.name]:
            return None
        return Storage(storage.num_rows, storage.dim, "float32", storage.max_part_bytes)

    def packed_shapes(self, storage: Storage) -> list[tuple[int, ...]]:
        """Shapes of all state as `optimizer_state.pack_state` lays it out.

        Args:
            storage: the table's.

        Returns:
            One shape an array.
        """
        shapes: list[tuple[int, ...]] = []
        for kind in ACCUMULATORS[self.name]:
            of_state = self.state_storage(storage)
            rows = [(rowwise_entries(storage.num_rows),)]
            shapes += rows if kind == "row" else [of_state.part_shape] * of_state.num_parts
        return [*shapes, ()] if self.counts_steps else shapes

    def state_bytes(self, storage: Storage) -> int:
        """Bytes of the state of a storage."""
        return sum(4 * math.prod(shape) for shape in self.packed_shapes(storage))


def rowwise_entries(num_rows: int) -> int:
    """Entries of packed row-wise accumulators: whole tiles of 1,024, so that `[n]` and `[n / 128, 128]` lie alike.

    Args:
        num_rows: rows of the storage.

    Returns:
        The multiple of 1,024.
    """
    return -(-num_rows // _TILE) * _TILE


def flat(state: State) -> tuple[jax.Array, ...]:
    """All arrays of plain state.

    Args:
        state: several arrays, one that stands for itself, or None for none.

    Returns:
        A tuple.
    """
    return () if state is None else state if isinstance(state, tuple) else (state,)


def like(arrays: tuple[jax.Array, ...]) -> State:
    """The inverse of `flat`.

    Args:
        arrays: accumulators, and the step count if there is one.

    Returns:
        A single accumulator as itself, None for none.
    """
    if not arrays:
        return None
    return arrays[0] if len(arrays) == 1 and arrays[0].ndim else arrays


def decayed(optimizer: RowOptimizer, grad: Any, row: Any) -> Any:
    """The gradient with L2 weight decay: `grad + weight_decay * row`, unless the decay is decoupled.

    Args:
        optimizer: has the coefficient.
        grad: combined gradient, float32, any shape.
        row: weights before the step, float32, same shape.

    Returns:
        float32, same shape.
    """
    return grad + optimizer.weight_decay * row if optimizer.weight_decay and not optimizer.decoupled else grad


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


def shrunk(optimizer: RowOptimizer, row: Any, lr: Any) -> Any:
    """The row with decoupled weight decay: `row - lr * weight_decay * row`; the row itself otherwise.

    Args:
        optimizer: has the coefficient.
        row: weights before the step, float32, any shape.
        lr: learning rate, float32, broadcastable.

    Returns:
        float32, same shape.
    """
    return row - lr * (optimizer.weight_decay * row) if optimizer.decoupled and optimizer.weight_decay else row


def step(
    optimizer: RowOptimizer,
    rows_UD: jax.Array,
    grads_UD: jax.Array,
    state: State,
    lr: jax.Array,
    mean_squares_U: jax.Array | None = None,
) -> tuple[jax.Array, State]:
    """One step on each row.

    Args:
        optimizer: the rule.
        rows_UD: float32 `[U, dim]`.
        grads_UD: float32 `[U, dim]`, duplicates combined.
        state: arrays of `optimizer.state_shapes(U, dim)`, as `optimizer_state.pack_state` takes them.
        lr: float32 scalar.
        mean_squares_U: float32 `[U]`, what accumulators per row take, after clipping and L2 decay; by default the mean
            of `grads_UD`, whose rows may be some columns of longer ones.

    Returns:
        New rows, not yet rounded, and new state, same shapes.
    """
    *found, count = (*flat(state), None) if not optimizer.counts_steps else flat(state)
    if optimizer.max_norm:
        norm_U1 = jnp.sqrt(jnp.sum(grads_UD * grads_UD, axis=1, keepdims=True))
        grads_UD = grads_UD * (optimizer.max_norm / jnp.maximum(norm_U1, optimizer.max_norm))
    grads_UD = decayed(optimizer, grads_UD, rows_UD)
    new_UD = shrunk(optimizer, rows_UD, lr)
    squares = grads_UD * grads_UD
    if optimizer.name.startswith("rowwise"):
        squares = jnp.mean(squares, axis=1) if mean_squares_U is None else mean_squares_U
    kept: list[jax.Array] = []
    if count is not None:
        count = count + 1
    if optimizer.name == "sgd":
        new_UD = new_UD - lr * grads_UD
    elif optimizer.name in MOMENT_NAMES:
        scalars = step_scalars(optimizer, lr, count)
        first, second = first_moment(optimizer, found[0], grads_UD), second_moment(optimizer, found[1], squares)
        factor = moment_rate(optimizer, second, *scalars[1:])
        new_UD = new_UD - (factor if factor.ndim == 2 else factor[:, None]) * first
        kept = [first, second]
    else:
        grown = found[0] + squares
        factor = rate(optimizer, grown, lr)
        new_UD = new_UD - (factor if factor.ndim == 2 else factor[:, None]) * grads_UD
        kept = [grown]
    return new_UD, like((*kept, count) if count is not None else tuple(kept))


def round_rows(
    optimizer: RowOptimizer, rows_UD: jax.Array, numbers_U: jax.Array, state: State, dtype: Any
) -> jax.Array:
    """Round new rows to the table's dtype.

    Args:
        optimizer: says how.
        rows_UD: float32 `[U, dim]`, of `step`.
        numbers_U: int32 `[U]`, the rows' numbers in their storage.
        state: new state of `step`.
        dtype: float32 or bfloat16.

    Returns:
        `[U, dim]` of the dtype.
    """
    nearest = rows_UD.astype(dtype)
    if optimizer.rounding_seed < 0 or nearest.dtype != jnp.bfloat16:
        return nearest
    seed, count = (jnp.asarray(one, jnp.uint32)[None] for one in (optimizer.rounding_seed, flat(state)[-1]))
    columns = jnp.arange(rows_UD.shape[1], dtype=jnp.uint32)
    random = noise(seed, count, numbers_U.astype(jnp.uint32), columns)
    bits = truncated_to_bfloat16(lax.bitcast_convert_type(rows_UD, jnp.uint32), random)
    chosen = lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)  # exact
    return jnp.where(jnp.isfinite(rows_UD), chosen, nearest)


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
