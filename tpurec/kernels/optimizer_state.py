"""Optimizer state between plain arrays and the layout that the kernels keep it in."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpurec.errors import ConfigError
from tpurec.kernels.optimizers import RowOptimizer, State, flat, like, rowwise_entries
from tpurec.kernels.storage import Storage, pack, unpack


def pack_state(optimizer: RowOptimizer, state: State, storage: Storage) -> tuple[jax.Array, ...]:
    """Lay plain state out as the kernels keep it.

    Args:
        optimizer: decides the shapes.
        state: arrays of `optimizer.state_shapes(num_rows, dim)`, float32 and at the end the int32 step count; a single
            one may stand for itself, and None for none.
        storage: of the table.

    Returns:
        Arrays of `optimizer.packed_shapes(storage)`.
    """
    arrays = flat(state)
    shapes = optimizer.state_shapes(storage.num_rows, storage.dim)
    expected = [(shape, "float32" if shape else "int32") for shape in shapes]
    found = [(tuple(one.shape), str(one.dtype)) for one in arrays]
    if found != expected:
        raise ConfigError(f"{optimizer.name}: state {found}, expected {expected}.")
    packed: list[jax.Array] = []
    for array in arrays:
        if array.ndim == 2:
            packed += pack(array, optimizer.state_storage(storage))
        elif array.ndim == 1:
            packed.append(jnp.pad(array, (0, rowwise_entries(storage.num_rows) - storage.num_rows)))
        else:
            packed.append(jnp.asarray(array))
    return tuple(packed)


def unpack_state(optimizer: RowOptimizer, state: tuple[jax.Array, ...], storage: Storage) -> State:
    """The inverse of `pack_state`.

    Args:
        optimizer: decides the shapes.
        state: as `pack_state` returns it.
        storage: of the table.

    Returns:
        As `pack_state` takes it.
    """
    arrays: list[jax.Array] = []
    for group, shape in zip(
        by_array(optimizer, state, storage), optimizer.state_shapes(storage.num_rows, storage.dim), strict=True
    ):
        if len(shape) == 2:
            arrays.append(unpack(group, optimizer.state_storage(storage)))
        else:
            arrays.append(group[0][: storage.num_rows] if shape else group[0])
    return like(tuple(arrays))


def by_array(optimizer: RowOptimizer, state: tuple[jax.Array, ...], storage: Storage) -> list[tuple[jax.Array, ...]]:
    """The parts of each array of packed state.

    Args:
        optimizer: decides the shapes.
        state: as `pack_state` returns it.
        storage: of the table.

    Returns:
        For each array of `optimizer.state_shapes` its parts.
    """
    groups, at = [], 0
    for shape in optimizer.state_shapes(storage.num_rows, storage.dim):
        count = optimizer.state_storage(storage).num_parts if len(shape) == 2 else 1
        groups.append(tuple(state[at : at + count]))
        at += count
    return groups
