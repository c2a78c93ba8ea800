"""If tables do not fit: what would help, cheapest first, each checked by planning it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpurec.errors import ConfigError
from tpurec.sharding.plan import Infeasible, Plan
from tpurec.sharding.tables import TableSpec
from tpurec.topology.slices import SliceTopology, larger

Planner = Callable[[Sequence[TableSpec], SliceTopology, int], Plan | Infeasible]
_LARGER_SLICES = 6
_SMALLER_BATCHES = 2
_GROW_WITH_THE_BATCH = ("activations", "inputs", "exchange_buffers")


def find_remedies(
    tables: Sequence[TableSpec], slice_: SliceTopology, answer: Infeasible, planner: Planner
) -> tuple[dict[str, Any], ...]:
    """Try ways out of a plan that does not fit.

    Args:
        tables: all tables.
        slice_: where they do not fit.
        answer: why they do not fit; the first problem names the table that is in the way, if it is one.
        planner: plans tables on a slice at a batch size, everything else unchanged; may raise ConfigError.

    Returns:
        What fits: dicts with `action`, `slice`, `num_chips`, `step_seconds` and `hbm_bytes_max` of the plan it gives.
        Changes to one table come before changes to all, then a smaller batch, and the smallest slice that fits comes
        last. If only several changes together help, they are one entry.
    """
    batch_size, name = answer.batch_size, answer.problems[0].table
    unit = "chips" if slice_.chip else "ranks"
    found = []
    for action, changed in _changes(list(tables), name) if name else ():
        if found and action.startswith("together"):
            continue
        plan = _try(planner, changed, slice_, batch_size)
        if plan is not None:
            found.append(_describe(action, plan))
    for smaller in _smaller_batches(answer, slice_.num_ranks):
        plan = _try(planner, tables, slice_, smaller)
        if plan is not None:
            found.append(_describe(f"--batch-size {smaller} in place of {batch_size}", plan))
            break
    for bigger in larger(slice_, _LARGER_SLICES):
        plan = _try(planner, tables, bigger, batch_size)
        if plan is not None:
            sizes = f"{bigger.num_chips} {unit} instead of {slice_.num_chips}"
            found.append(_describe(f"use {bigger.name} ({sizes})", plan))
            break
    else:
        free = [_freed(entry) for entry in tables]
        if free != list(tables):
            for bigger in larger(slice_, _LARGER_SLICES):
                plan = _try(planner, free, bigger, batch_size)
                if plan is not None:
                    text = f"use {bigger.name} ({bigger.num_chips} {unit}) and allow every sharding"
                    found.append(_describe(text, plan))
                    break
    return tuple(found)


def _smaller_batches(answer: Infeasible, num_ranks: int) -> Iterator[int]:
    """The largest powers of two a rank whose part of the memory leaves room for the rest, by proportion."""
    growing = sum(answer.hbm_parts.get(use, 0) for use in _GROW_WITH_THE_BATCH)
    missing = answer.hbm_bytes_max - answer.hbm_bytes_budget
    if growing <= missing:
        return
    most = int(answer.batch_size * (1 - missing / growing)) // num_ranks
    for power in range(most.bit_length() - 1, max(-1, most.bit_length() - 1 - _SMALLER_BATCHES), -1):
        yield num_ranks * 2**power


def _try(planner: Planner, tables: Sequence[TableSpec], slice_: SliceTopology, batch_size: int) -> Plan | None:
    try:
        answer = planner(tables, slice_, batch_size)
    except ConfigError:  # such as a batch that the larger slice cannot share evenly
        return None
    return answer if isinstance(answer, Plan) else None


def _describe(action: str, answer: Plan) -> dict[str, Any]:
    estimates = answer.estimates
    assert estimates is not None
    return {
        "action": action,
        "slice": answer.slice,
        "num_chips": answer.topology.num_chips,
        "step_seconds": estimates.step_seconds,
        "hbm_bytes_max": estimates.hbm_bytes_max,
    }


def _changes(tables: list[TableSpec], name: str) -> Iterator[tuple[str, list[TableSpec]]]:
    """Ways to change the tables, the least intrusive first; those that change nothing are left out."""
    steps: list[tuple[str, str, Callable[[TableSpec], TableSpec]]] = [
        ("allow every sharding", "sharding", _freed),
        ("row_wise_adagrad in place of {}", "optimizer", _light_state),
        ("bfloat16 weights", "dtype", _half),
    ]
    for text, _, change in steps:
        one = [change(entry) if entry.name == name else entry for entry in tables]
        everything = [change(entry) for entry in tables]
        target = next(entry for entry in tables if entry.name == name)
        if one != tables:
            yield f"table {name!r}: {text.format(target.optimizer)}", one
        if everything not in (tables, one):
            yield f"all tables: {text.format('their optimizers')}", everything
    together = [_half(_light_state(_freed(entry))) for entry in tables]
    if together != tables:
        yield "together, for all tables: every sharding, row_wise_adagrad, bfloat16 weights", together


def _freed(table: TableSpec) -> TableSpec:
    return dataclasses.replace(table, allow=None, forbid=(), pin=None, pin_ranks=None, keep_together=None)


def _light_state(table: TableSpec) -> TableSpec:
    heavy = table.optimizer in ("adagrad", "adam", "partial_rowwise_adam")
    return dataclasses.replace(table, optimizer="row_wise_adagrad") if heavy else table


def _half(table: TableSpec) -> TableSpec:
    return dataclasses.replace(table, dtype="bfloat16") if table.dtype == "float32" else table
