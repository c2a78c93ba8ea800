"""The one file that knows which JAX function runs which op on a TPU. How they are bound: `_tpu_binding.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch

from tpurec.errors import ConfigError
from tpurec.extras import require
from tpurec.kernels import column_step as column_kernel
from tpurec.kernels import embedding_bag as bag_kernel
from tpurec.kernels import embedding_update as update_kernel
from tpurec.kernels import sequence_gather as sequence_kernel
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.ops import _tpu_guard, _tpu_jagged, aten_names, fbgemm_names
from tpurec.ops._tpu_binding import bind_op
from tpurec.ops.column_step import column_step_
from tpurec.ops.embedding_bag import embedding_bag, embedding_bag_weights_grad
from tpurec.ops.embedding_update import embedding_update_
from tpurec.ops.sequence_gather import sequence_gather
from tpurec.topology.chips import CHIPS, Chip


@dataclass(frozen=True)
class Config:
    """Which kernels run on the device.

    Args:
        chip: generation that programs are compiled for, such as `v6e`; empty where the `tpu` device is no TPU.
        implementation: `plain`, `sparsecore` or `tensorcore`; empty to choose by chip and shape from the tuning table.

    Raises:
        ConfigError: an unknown chip.
    """

    chip: str = ""
    implementation: str = ""

    def __post_init__(self) -> None:
        if self.chip and self.chip not in CHIPS:
            raise ConfigError(f"chip {self.chip!r} is not known.", f"Known chips: {', '.join(CHIPS)}.")


_config: Config | None = None


def bind(config: Config) -> None:
    """Register the ops for the `tpu` device; a second call changes what later programs are compiled with.

    Args:
        config: chip and implementation.

    Raises:
        MissingExtra: torch_tpu is not installed.
        ConfigError: there is no TPU.
    """
    global _config
    if _config is None:
        _start_device()
        _tpu_guard.install()
        for op, function in IMPLEMENTATIONS:
            bind_op(op, function, bound)
        _tpu_jagged.bind(bound)
        fbgemm_names.register()
        aten_names.register()
    _config = config


def bound() -> Config | None:
    """The configuration of the last `bind`.

    Returns:
        It, or None before the first one.
    """
    return _config


def _start_device() -> None:
    require("torch_tpu", "device.kind = 'tpu'")
    from torch_tpu import _loader

    _loader.load()  # registers the device if there is a TPU; does nothing if it is registered
    if torch._C._get_privateuse1_backend_name() != "tpu":
        raise ConfigError("there is no TPU on this machine.", "Use device.kind = 'cpu'.")


def _storage(parts: Sequence[jax.Array], num_rows: int, dim: int, state: Sequence[jax.Array] = ()) -> Storage:
    """The storage that these are the parts of. The largest of its tensors has the size that they were cut by, or less
    and then so that all are cut alike."""
    largest = max(array.nbytes for array in (*parts, *state) if array.ndim == 2)
    return Storage(num_rows, dim, "float32" if parts[0].dtype == jnp.float32 else "bfloat16", largest)


def _to_bags(grad: jax.Array, num_features: int, dim: int) -> jax.Array:
    """`[batch_size, num_features * dim]` to `[num_features * batch_size, dim]`."""
    return grad.reshape(-1, num_features, dim).swapaxes(0, 1).reshape(-1, dim)


def _look_up(
    parts: list[jax.Array],
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
    *,
    chip: Chip | None,
    implementation: str | None,
) -> jax.Array:
    storage = _storage(parts, num_rows, dim)
    pooled = bag_kernel.embedding_bag(
        parts, ids, offsets, weights, storage=storage, pooling=pooling, chip=chip, implementation=implementation
    )
    batch_size = pooled.shape[0] // num_features
    return pooled.reshape(num_features, batch_size, dim).swapaxes(0, 1).reshape(batch_size, num_features * dim)


def _weights_gradient(
    grad: jax.Array,
    parts: list[jax.Array],
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
) -> jax.Array:
    grad_bags = _to_bags(grad, num_features, dim)
    storage = _storage(parts, num_rows, dim)
    return bag_kernel.weights_gradient(parts, ids, offsets, weights, grad_bags, storage=storage, pooling=pooling)


def _gather(
    parts: list[jax.Array],
    ids: jax.Array,
    num_rows: int,
    dim: int,
    *,
    chip: Chip | None,
    implementation: str | None,
) -> jax.Array:
    storage = _storage(parts, num_rows, dim)
    return sequence_kernel.sequence_gather(parts, ids, storage=storage, chip=chip, implementation=implementation)


def _update(
    parts: list[jax.Array],
    state: list[jax.Array],
    grad: jax.Array,
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None,
    lr: jax.Array,
    optimizer: str,
    eps: float,
    weight_decay: float,
    pooling: str,
    feature_tables: tuple[int, ...],
    num_rows: int,
    dim: int,
    beta1: float,
    beta2: float,
    decoupled_weight_decay: bool,
    max_gradient_norm: float,
    rounding_seed: int,
    *,
    chip: Chip | None,
    implementation: str | None,
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    return update_kernel.update(
        parts,
        state,
        _to_bags(grad, len(feature_tables), dim),
        ids,
        offsets,
        weights,
        lr,
        storage=_storage(parts, num_rows, dim, state),
        optimizer=RowOptimizer(
            optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, max_gradient_norm, rounding_seed
        ),
        pooling=pooling,
        chip=chip,
        implementation=implementation,
    )


def _step_columns(
    parts: list[jax.Array],
    state: list[jax.Array],
    rows: jax.Array,
    grad_rows: jax.Array,
    mean_squares: jax.Array,
    lr: jax.Array,
    optimizer: str,
    eps: float,
    weight_decay: float,
    num_rows: int,
    dim: int,
    beta1: float,
    beta2: float,
    decoupled_weight_decay: bool,
    rounding_seed: int,
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    rule = RowOptimizer(optimizer, eps, weight_decay, beta1, beta2, decoupled_weight_decay, rounding_seed=rounding_seed)
    storage = _storage(parts, num_rows, dim, state)
    return column_kernel.column_step(parts, state, rows, grad_rows, mean_squares, lr, storage=storage, optimizer=rule)


# A new op gets a line here; see "How to add an op" in docs/architecture.md.
IMPLEMENTATIONS = (
    (embedding_bag, _look_up),
    (embedding_bag_weights_grad, _weights_gradient),
    (embedding_update_, _update),
    (sequence_gather, _gather),
    (column_step_, _step_columns),
)
