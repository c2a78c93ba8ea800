"""The one file that binds the ops to a TPU: `tpurec.kernels` through `torch.tpu.pallas.jax_op`.

A JAX function is pure, so an update gives new arrays. Their inputs are donated, which lets the compiler write into the
same memory, and `copy_` between tensors of a TPU with the same shape then moves no bytes: it makes the old tensor, and
every view of it, name the new array. Seen with torch_tpu 0.2.0 and read from the programs compiled for v6e.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from tpurec.errors import ConfigError
from tpurec.extras import require
from tpurec.kernels import embedding_bag as bag_kernel
from tpurec.kernels import embedding_update as update_kernel
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.ops import _tpu_guard
from tpurec.ops.embedding_bag import embedding_bag, embedding_bag_weights_grad
from tpurec.ops.embedding_update import embedding_update_
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
        _register()
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


def _register() -> None:
    from torch.tpu.pallas import jax_op

    _tpu_guard.install()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*jax_op is experimental.*")
        look_up = jax_op("tpurec_jax::embedding_bag", _look_up)
        weights_gradient = jax_op("tpurec_jax::embedding_bag_weights_grad", _weights_gradient)
        update = jax_op("tpurec_jax::embedding_update", _update, donate_argnums=(0, 1))
        update_stateless = jax_op("tpurec_jax::embedding_update_stateless", _update_stateless, donate_argnums=(0,))

    @embedding_bag.register_kernel("tpu")
    def _(
        parts: list[Tensor],
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        pooling: str,
        num_features: int,
        num_rows: int,
        dim: int,
    ) -> Tensor:
        return look_up(
            parts, ids, offsets, weights, pooling, num_features, num_rows, dim, _config.chip, _config.implementation
        )

    @embedding_bag_weights_grad.register_kernel("tpu")
    def _(
        grad: Tensor,
        parts: list[Tensor],
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor,
        pooling: str,
        num_features: int,
        num_rows: int,
        dim: int,
    ) -> Tensor:
        return weights_gradient(grad, parts, ids, offsets, weights, pooling, num_features, num_rows, dim)

    @embedding_update_.register_kernel("tpu")
    def _(
        parts: list[Tensor],
        state: list[Tensor],
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        lr: Tensor,
        optimizer: str,
        eps: float,
        weight_decay: float,
        pooling: str,
        feature_tables: list[int],
        num_rows: int,
        dim: int,
    ) -> None:
        arguments = (grad, ids, offsets, weights, lr, optimizer, eps, weight_decay, pooling, len(feature_tables))
        where = (num_rows, dim, _config.chip, _config.implementation)
        leading = (update, parts, state) if state else (update_stateless, parts)
        new = leading[0](*leading[1:], *arguments, *where)
        for old, fresh in zip([*parts, *state], new, strict=True):
            old.copy_(fresh)


def _storage(parts: list[jax.Array], num_rows: int, dim: int) -> Storage:
    return Storage(num_rows, dim, "float32" if parts[0].dtype == jnp.float32 else "bfloat16")


def _chip(name: str) -> Chip | None:
    return CHIPS[name] if name else None


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
    chip: str,
    implementation: str,
) -> jax.Array:
    pooled = bag_kernel.embedding_bag(
        parts,
        ids,
        offsets,
        weights,
        storage=_storage(parts, num_rows, dim),
        pooling=pooling,
        chip=_chip(chip),
        implementation=implementation or None,
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
    return bag_kernel.weights_gradient(
        parts,
        ids,
        offsets,
        weights,
        _to_bags(grad, num_features, dim),
        storage=_storage(parts, num_rows, dim),
        pooling=pooling,
    )


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
    num_features: int,
    num_rows: int,
    dim: int,
    chip: str,
    implementation: str,
) -> list[jax.Array]:
    new_parts, new_state = update_kernel.update(
        parts,
        state,
        _to_bags(grad, num_features, dim),
        ids,
        offsets,
        weights,
        lr,
        storage=_storage(parts, num_rows, dim),
        optimizer=RowOptimizer(optimizer, eps, weight_decay),
        pooling=pooling,
        chip=_chip(chip),
        implementation=implementation or None,
    )
    return [*new_parts, *new_state]


def _update_stateless(
    parts: list[jax.Array],
    grad: jax.Array,
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None,
    lr: jax.Array,
    optimizer: str,
    eps: float,
    weight_decay: float,
    pooling: str,
    num_features: int,
    num_rows: int,
    dim: int,
    chip: str,
    implementation: str,
) -> list[jax.Array]:
    return _update(
        parts,
        [],
        grad,
        ids,
        offsets,
        weights,
        lr,
        optimizer,
        eps,
        weight_decay,
        pooling,
        num_features,
        num_rows,
        dim,
        chip,
        implementation,
    )
