"""The programs that the compile tier and the benchmarks compile: builders for `bundles.count` and `Target.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tests.kernels.tools.aot import Target
from tpurec.kernels import embedding_update
from tpurec.kernels.embedding_bag import embedding_bag
from tpurec.kernels.optimizers import RowOptimizer, rowwise_entries
from tpurec.kernels.storage import Storage

Program = tuple[Callable, tuple[Any, ...], tuple[int, ...]]


def lookup(
    target: Target,
    *,
    num_rows: int,
    dim: int,
    num_bags: int,
    ids_per_bag: int,
    dtype: str = "float32",
    weighted: bool = False,
    pooling: str = "sum",
    implementation: str | None = None,
    config: Any = None,
) -> Program:
    """A forward lookup.

    Args:
        target: what to compile for.
        num_rows: rows of the storage.
        dim: its columns.
        num_bags: bags.
        ids_per_bag: capacity of the ids over `num_bags`.
        dtype: of the table.
        weighted: with a weight per id.
        pooling: `sum` or `mean`.
        implementation: as of `embedding_bag`.
        config: as of `embedding_bag`.

    Returns:
        The function, its abstract arguments, and that none is donated.
    """
    storage = Storage(num_rows, dim, dtype)
    num_ids = num_bags * ids_per_bag
    arguments: tuple[Any, ...] = (
        tuple(target.array(storage.part_shape, storage.word_dtype) for _ in range(storage.num_parts)),
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
    *,
    num_rows: int,
    dim: int,
    num_bags: int,
    ids_per_bag: int,
    optimizer: str = "rowwise_adagrad",
    weight_decay: float = 0.0,
    dtype: str = "float32",
    weighted: bool = False,
    pooling: str = "sum",
    implementation: str | None = None,
    config: Any = None,
) -> Program:
    """A fused update.

    Args:
        target: what to compile for.
        num_rows: rows of the storage.
        dim: its columns.
        num_bags: bags.
        ids_per_bag: capacity of the ids over `num_bags`.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`.
        weight_decay: L2 coefficient.
        dtype: of the table.
        weighted: with a weight per id.
        pooling: `sum` or `mean`.
        implementation: as of `embedding_update.update`.
        config: as of `embedding_update.update`.

    Returns:
        The function, its abstract arguments, and that table and state are donated.
    """
    storage, rule = Storage(num_rows, dim, dtype), RowOptimizer(optimizer, weight_decay=weight_decay)
    of_state = rule.state_storage(storage)
    state: tuple[Any, ...] = ()
    if of_state is not None:
        state = tuple(target.array(of_state.part_shape, jnp.float32) for _ in range(of_state.num_parts))
    elif optimizer == "rowwise_adagrad":
        state = (target.array((rowwise_entries(num_rows),), jnp.float32),)
    num_ids = num_bags * ids_per_bag
    arguments = (
        tuple(target.array(storage.part_shape, storage.word_dtype) for _ in range(storage.num_parts)),
        state,
        target.array((num_bags, dim), jnp.float32),
        target.array((num_ids,), jnp.int32),
        target.array((num_bags + 1,), jnp.int32),
        target.array((num_ids,), jnp.float32) if weighted else None,
        target.array((), jnp.float32),
    )

    def function(*arguments):
        return embedding_update.update(
            *arguments,
            storage=storage,
            optimizer=rule,
            pooling=pooling,
            chip=target.chip,
            implementation=implementation,
            config=config,
        )

    return function, arguments, (0, 1)
