"""The kernels' programs as they run on a device, to compile ahead of time: lookup, fused update and column step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tpurec.kernels import column_step as columns
from tpurec.kernels import embedding_update
from tpurec.kernels.ahead_of_time import Target
from tpurec.kernels.embedding_bag import embedding_bag
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage

Program = tuple[Callable, tuple[Any, ...], tuple[int, ...]]


def lookup(
    target: Target,
    storage: Storage,
    num_bags: int,
    num_ids: int,
    *,
    weighted: bool = False,
    pooling: str = "sum",
    implementation: str | None = None,
    config: Any = None,
) -> Program:
    """A forward lookup.

    Args:
        target: what to compile for.
        storage: the tables.
        num_bags: bags.
        num_ids: capacity of the ids.
        weighted: with a weight per id.
        pooling: `sum` or `mean`.
        implementation: as of `embedding_bag`.
        config: as of `embedding_bag`.

    Returns:
        The function, its abstract arguments, and that none is donated: arguments of `Target.compile`.
    """
    arguments: tuple[Any, ...] = (
        _parts(target, storage),
        target.array((num_ids,), jnp.int32),
        target.array((num_bags + 1,), jnp.int32),
    )
    if weighted:
        arguments += (target.array((num_ids,), jnp.float32),)

    def function(parts, ids, offsets, weights=None):
        return embedding_bag(
            parts,
            ids,
            offsets,
            weights,
            storage=storage,
            pooling=pooling,
            chip=target.chip,
            implementation=implementation,
            config=config,
        )

    return function, arguments, ()


def update(
    target: Target,
    storage: Storage,
    optimizer: RowOptimizer,
    num_bags: int,
    num_ids: int,
    *,
    weighted: bool = False,
    pooling: str = "sum",
    implementation: str | None = None,
    config: Any = None,
) -> Program:
    """A fused update.

    Args:
        target: what to compile for.
        storage: the tables.
        optimizer: the rule.
        num_bags: bags.
        num_ids: capacity of the ids.
        weighted: with a weight per id.
        pooling: `sum` or `mean`.
        implementation: as of `embedding_update.update`.
        config: as of `embedding_update.update`.

    Returns:
        The function, its abstract arguments, and that table and state are donated: arguments of `Target.compile`.
    """
    arguments = (
        _parts(target, storage),
        _state(target, storage, optimizer),
        target.array((num_bags, storage.dim), jnp.float32),
        target.array((num_ids,), jnp.int32),
        target.array((num_bags + 1,), jnp.int32),
        target.array((num_ids,), jnp.float32) if weighted else None,
        target.array((), jnp.float32),
    )

    def function(*arguments):
        return embedding_update.update(
            *arguments,
            storage=storage,
            optimizer=optimizer,
            pooling=pooling,
            chip=target.chip,
            implementation=implementation,
            config=config,
        )

    return function, arguments, (0, 1)


def column_step(target: Target, storage: Storage, optimizer: RowOptimizer, num_rows: int) -> Program:
    """A step of columns whose rows are spread over ranks.

    Args:
        target: what to compile for.
        storage: the columns.
        optimizer: the rule, without clipping.
        num_rows: capacity of the rows to step.

    Returns:
        As of `update`.
    """
    arguments = (
        _parts(target, storage),
        _state(target, storage, optimizer),
        target.array((num_rows,), jnp.int32),
        target.array((num_rows, storage.dim), jnp.float32),
        target.array((num_rows,), jnp.float32),
        target.array((), jnp.float32),
    )

    def function(*arguments):
        return columns.column_step(*arguments, storage=storage, optimizer=optimizer)

    return function, arguments, (0, 1)


def _state(target: Target, storage: Storage, optimizer: RowOptimizer) -> tuple[Any, ...]:
    shapes = optimizer.packed_shapes(storage)
    return tuple(target.array(shape, jnp.float32 if shape else jnp.int32) for shape in shapes)


def _parts(target: Target, storage: Storage) -> tuple[Any, ...]:
    return tuple(target.array(storage.part_shape, storage.word_dtype) for _ in range(storage.num_parts))
