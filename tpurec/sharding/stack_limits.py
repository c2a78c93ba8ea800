"""What a plan that fits the memory may still exceed: limits of one tensor, and of 32-bit rows."""

from __future__ import annotations

from collections.abc import Sequence

from tpurec.kernels.limits import num_tensors
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.infeasible import Infeasible, Problem
from tpurec.sharding.plan import Plan, StackPlan
from tpurec.sharding.tables import OPTIMIZER_STATE, TableSpec
from tpurec.topology.slices import SliceTopology

MAX_ROWS = 2**31 - 1  # ids are int32 rows of a stack


def refused(plan: Plan) -> Infeasible | None:
    """Why training would refuse a plan although it fits the memory.

    Args:
        plan: with estimates.

    Returns:
        The problems, in place of the plan; None if there are none.
    """
    tables, estimates = [placed.table for placed in plan.tables], plan.estimates
    assert estimates is not None
    alone = plan.topology.num_ranks == 1
    found = (
        _whole_tables_too_large(tables, plan.topology, plan.assumptions)
        if alone
        else _too_many_rows(plan.stacks, tables)
    )
    if not found:
        return None
    return Infeasible(
        slice=plan.slice,
        batch_size=plan.batch_size,
        problems=tuple(found),
        hbm_bytes_max=estimates.hbm_bytes_max,
        hbm_bytes_mean=estimates.hbm_bytes_mean,
        hbm_bytes_capacity=estimates.hbm_bytes_capacity,
        hbm_bytes_budget=estimates.hbm_bytes_budget,
        hbm_parts=estimates.hbm_parts,
    )


def _whole_tables_too_large(tables: Sequence[TableSpec], slice_: SliceTopology, assume: Assumptions) -> list[Problem]:
    """Tables that would be larger than one tensor where nothing is sharded: on a single TPU.

    Several ranks cut a stack into as many tensors as it needs (`tpurec.sharding.cut_rows`); a model that is whole keeps
    each table, and each accumulator per element, in one.
    """
    if slice_.chip is None:
        return []
    found = []
    for table in tables:
        rows, dim, limit = table.num_embeddings, table.embedding_dim, assume.max_tensor_bytes
        sizes = {"weights": rows * dim * table.element_bytes}
        if OPTIMIZER_STATE[table.optimizer][1]:
            sizes[f"accumulators of {table.optimizer}"] = rows * dim * 4
        what, size = max(sizes.items(), key=lambda entry: entry[1])
        if num_tensors(rows, size // rows, limit) > 1:
            message = (
                f"table {table.name!r}: its {what} take {size / 2**30:.2f} GiB; on one rank a table is whole and one "
                f"tensor, of at most {limit / 2**30:.2f} GiB (max_tensor_bytes). More ranks cut it."
            )
            found.append(Problem(table.name, message, size - limit))
    return sorted(found, key=lambda problem: -problem.bytes_missing)


def _too_many_rows(stacks: Sequence[StackPlan], tables: Sequence[TableSpec]) -> list[Problem]:
    """Stacks with more rows on a rank than 32-bit ids can name."""
    found = []
    for stack in stacks:
        if stack.rows <= MAX_ROWS:
            continue
        largest = max((t for t in tables if t.name in stack.tables), key=lambda table: table.num_embeddings)
        row_bytes = stack.bytes / stack.rows
        message = (
            f"{len(stack.tables)} tables of {stack.dtype} and width {stack.width} have {stack.rows:,} rows on a rank; "
            f"{MAX_ROWS:,} is the limit of 32-bit ids. The largest: {largest.name!r}, {largest.num_embeddings:,} rows."
        )
        found.append(Problem(largest.name, message, round((stack.rows - MAX_ROWS) * row_bytes)))
    return sorted(found, key=lambda problem: -problem.bytes_missing)
