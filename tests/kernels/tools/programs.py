"""The kernels' programs by plain values, which a request to another process can carry (`bundles.count`)."""

from __future__ import annotations

from typing import Any

from tpurec.kernels import programs
from tpurec.kernels.ahead_of_time import Target
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.programs import Program
from tpurec.kernels.storage import Storage


def lookup(
    target: Target, *, num_rows: int, dim: int, num_bags: int, ids_per_bag: int, dtype: str = "float32", **options: Any
) -> Program:
    """A forward lookup.

    Args:
        target: what to compile for.
        num_rows: rows of the storage.
        dim: its columns.
        num_bags: bags.
        ids_per_bag: capacity of the ids over `num_bags`.
        dtype: of the table.
        options: keywords of `tpurec.kernels.programs.lookup`.

    Returns:
        As of `tpurec.kernels.programs.lookup`.
    """
    return programs.lookup(target, Storage(num_rows, dim, dtype), num_bags, num_bags * ids_per_bag, **options)


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
    **options: Any,
) -> Program:
    """A fused update.

    Args:
        target: what to compile for.
        num_rows: rows of the storage.
        dim: its columns.
        num_bags: bags.
        ids_per_bag: capacity of the ids over `num_bags`.
        optimizer: a name of `optimizers.ACCUMULATORS`.
        weight_decay: L2 coefficient.
        dtype: of the table.
        options: keywords of `tpurec.kernels.programs.update`.

    Returns:
        As of `tpurec.kernels.programs.update`.
    """
    rule = RowOptimizer(optimizer, weight_decay=weight_decay)
    return programs.update(target, Storage(num_rows, dim, dtype), rule, num_bags, num_bags * ids_per_bag, **options)
