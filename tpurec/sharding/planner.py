"""The planner's front door: tables and a slice in, a plan or the reason why there is none out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from math import ceil

from tpurec.errors import ConfigError
from tpurec.sharding.assemble import Assembly, placement_of
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.bound import lower_bound
from tpurec.sharding.costs import CostModel
from tpurec.sharding.plan import Estimates, Infeasible, PlacedTable, Plan, Problem
from tpurec.sharding.remedies import find_remedies
from tpurec.sharding.search import Clock, Found, search
from tpurec.sharding.space import NUM_PARTS, Space
from tpurec.sharding.stack_limits import MAX_ROWS, refused
from tpurec.sharding.tables import TableSpec, check_names
from tpurec.sharding.widths import with_fewer_widths
from tpurec.topology.slices import SliceTopology

_SEARCH = 0.7  # of `seconds`; the lower bound gets what is left


def plan(
    tables: Sequence[TableSpec],
    slice_: SliceTopology | str,
    batch_size: int,
    assumptions: Assumptions | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Plan | Infeasible:
    """Shard tables over a slice so that the step of its slowest rank is short and every rank's memory suffices.

    Deterministic (unless `seconds` cuts the search short), and the same whatever the order of the tables.

    Args:
        tables: what to place.
        slice_: where: a slice or its name.
        batch_size: global examples per step; must divide evenly among the ranks.
        assumptions: by default all defaults (`read_tables` returns those of the file).
        seconds: stop after about this long with the best plan and bound so far; by default search to the end.
        tell: called now and then with a few words about how far the search is.

    Returns:
        A plan (`.fits` is True, `.summary()` has the keys of `tpurec plan --json`), or `Infeasible`.

    Raises:
        ConfigError: bad input: names twice, a sharding that a table cannot have, a batch that the ranks cannot share.

    >>> from tpurec.sharding.tables import FeatureSpec
    >>> user = TableSpec("user", 1_000_000, 64, (FeatureSpec("user_id"),))
    >>> plan([user], "v6e-4", 4096).fits
    True
    """
    begun = time.perf_counter()
    given = assumptions or Assumptions()
    slice_ = SliceTopology.parse(slice_) if isinstance(slice_, str) else slice_
    answer = _plan_once(list(tables), slice_, batch_size, given, seconds, tell)
    if isinstance(answer, Infeasible):
        answer = _with_remedies(answer, list(tables), slice_, given, seconds)
    return dataclasses.replace(answer, plan_seconds=time.perf_counter() - begun)


def _plan_once(
    tables: list[TableSpec],
    slice_: SliceTopology,
    batch_size: int,
    given: Assumptions,
    seconds: float | None,
    tell: Callable[[str], None] | None = None,
) -> Plan | Infeasible:
    searching, proving = Clock(None if seconds is None else _SEARCH * seconds, tell), Clock(seconds, tell)
    space = make_space(tables, slice_, batch_size, given)
    found = search(space, tables, slice_, given, searching)
    if found.fits:
        assembly = Assembly(space, with_fewer_widths(space, found.placement, searching))
    else:
        impossible = _nothing_left(space) or [problem for table in tables for problem in _alone_too_large(space, table)]
        assembly = Assembly(space, found.placement)
        problems = tuple(impossible) or (_all_too_large(space, found),)
        estimates = assembly.estimates(0.0, "none")
        return Infeasible(
            slice=slice_.name,
            batch_size=batch_size,
            problems=problems,
            hbm_bytes_max=estimates.hbm_bytes_max,
            hbm_bytes_mean=estimates.hbm_bytes_mean,
            hbm_bytes_capacity=estimates.hbm_bytes_capacity,
            hbm_bytes_budget=estimates.hbm_bytes_budget,
            hbm_parts=estimates.hbm_parts,
        )
    if found.optimal:
        proven, kind = assembly.cost.seconds, "enumeration"
    else:
        proving.tell("proving a lower bound")
        bound = lower_bound(space, assembly.cost.seconds, space.model.capacity_bytes, proving)
        proven, kind = bound.seconds, bound.kind
    made = Plan(
        slice=slice_.name,
        batch_size=batch_size,
        tables=assembly.placed([table.name for table in tables]),
        stacks=assembly.stacks(),
        rungs=assembly.rungs(),
        assumptions=space.model.assume,
        estimates=assembly.estimates(proven, kind),
        stopped_early=found.stopped_early,
    )
    return refused(made) or made


def _with_remedies(
    answer: Infeasible, tables: list[TableSpec], slice_: SliceTopology, given: Assumptions, seconds: float | None
) -> Infeasible:
    def again(changed: Sequence[TableSpec], where: SliceTopology, batch_size: int) -> Plan | Infeasible:
        return _plan_once(list(changed), where, batch_size, given, seconds)

    worst = answer.problems[0]
    ways = find_remedies(tables, slice_, answer, again)
    return dataclasses.replace(answer, problems=(dataclasses.replace(worst, remedies=ways), *answer.problems[1:]))


def evaluate(
    placed: Sequence[PlacedTable],
    slice_: SliceTopology | str,
    batch_size: int,
    assumptions: Assumptions | None = None,
) -> Estimates:
    """Cost a plan that was made elsewhere, fitting or not.

    Args:
        placed: where the tables are; an exchange of `none` for row_wise takes the cheaper one.
        slice_: the slice or its name.
        batch_size: global examples per step.
        assumptions: by default all defaults.

    Returns:
        Its estimates, with a lower bound of 0 and kind `none`; compare `hbm_bytes_max` with `hbm_bytes_budget`.

    Raises:
        ConfigError: bad input, or a placement that our cost model does not know.
    """
    slice_ = SliceTopology.parse(slice_) if isinstance(slice_, str) else slice_
    space = make_space([entry.table for entry in placed], slice_, batch_size, assumptions or Assumptions())
    return Assembly(space, placement_of(space, placed)).estimates(0.0, "none")


def make_space(tables: Sequence[TableSpec], slice_: SliceTopology, batch_size: int, assumptions: Assumptions) -> Space:
    """Check the input and lay out what can be chosen.

    Args:
        tables: what to place.
        slice_: where.
        batch_size: global examples per step.
        assumptions: what the costs take for granted.

    Returns:
        The search space.

    Raises:
        ConfigError: see `plan`.
    """
    check_names(list(tables))
    check_batch(batch_size, slice_)
    model = CostModel(slice_, batch_size, assumptions.on(slice_))
    for table in tables:
        _check_rows(table, model)
    return Space(tables, model)


def check_batch(batch_size: int, slice_: SliceTopology) -> None:
    """Check that every rank gets equally many examples.

    Args:
        batch_size: global examples per step.
        slice_: where.

    Raises:
        ConfigError: it does not divide; the text names the nearest that do.
    """
    ranks = slice_.num_ranks
    if batch_size < ranks or batch_size % ranks:
        near = sorted({max(1, batch_size // ranks) * ranks, ceil(batch_size / ranks) * ranks})
        raise ConfigError(
            f"batch size {batch_size} cannot be shared evenly by the {ranks} ranks of {slice_.name}.",
            f"Use {' or '.join(map(str, near))}.",
        )


def _check_rows(table: TableSpec, model: CostModel) -> None:
    """Refuse a table of which every sharding that is allowed puts more rows on a rank than 32-bit ids can name."""
    if table.num_embeddings <= MAX_ROWS:
        return
    largest_group = max((len(groups[0]) for _, groups in model.groups.values()), default=1)
    owners = {"row_wise": model.num_ranks, "table_row_wise": largest_group}
    most = max(owners.get(sharding, 1) for sharding in table.allowed)
    if ceil(table.num_embeddings / most) > MAX_ROWS:
        by_rows = "Use a larger slice" if "row_wise" in table.allowed else "Allow row_wise"
        raise ConfigError(
            f"table {table.name!r} ({', '.join(table.allowed)}): {table.num_embeddings} rows on "
            f"{_ranks(most)}: local rows exceed int32.",
            f"{by_rows}, or hash ids into fewer rows.",
        )


def _nothing_left(space: Space) -> list[Problem]:
    """A batch that fills the memory before there is any table: no table's fault."""
    model = space.model
    missing = space.constant_bytes + model.assume.workspace_bytes - model.capacity_bytes
    if missing <= 0:
        return []
    message = (
        f"a batch of {model.batch_size:,} examples, {model.local_batch:,.0f} a rank, needs "
        f"{_gib(space.constant_bytes)} a rank for activations, inputs, dense model and programs; "
        f"{model.slice.name} has {_gib(model.capacity_bytes)} after the reserve, which leaves nothing for tables."
    )
    return [Problem("", message, round(missing))]


def _alone_too_large(space: Space, table: TableSpec) -> list[Problem]:
    """A table that no choice fits on a rank, even with no other table there."""
    budget = space.model.capacity_bytes - space.constant_bytes - space.model.assume.workspace_bytes
    needs = {
        choice.key: float((choice.uniform + choice.padded + choice.lump)[NUM_PARTS:].sum())
        for choice in space.maker.of_table(table)
    }
    least = min(needs.values())
    if least <= budget:
        return []
    ways = ", ".join(dict.fromkeys(key[0] for key in needs))
    message = (
        f"table {table.name!r} ({ways}) needs {_gib(least)} on a rank with optimizer state and exchange buffers; "
        f"{space.model.slice.name} leaves {_gib(max(budget, 0.0))} of {_gib(space.model.assume.hbm_bytes)} for tables."
    )
    return [Problem(table.name, message, round(least - budget))]


def _all_too_large(space: Space, found: Found) -> Problem:
    """No table is too large alone; the fault is named by the largest share."""
    missing = found.cost.bytes - space.model.capacity_bytes
    largest = max(space.tables, key=lambda table: table.weight_bytes + table.state_bytes)
    total = sum(table.weight_bytes + table.state_bytes for table in space.tables)
    needed, constant = _gib(found.cost.bytes), _gib(space.constant_bytes)
    message = (
        f"{len(space.tables)} tables ({_gib(total)} with optimizer state) on {_ranks(space.model.num_ranks)}: the most "
        f"compact plan needs {needed} a rank, of which {constant} for dense model, activations, inputs and programs; "
        f"{space.model.slice.name} has {_gib(space.model.capacity_bytes)} after the reserve. The largest table is "
        f"{largest.name!r} ({_gib(largest.weight_bytes + largest.state_bytes)})."
    )
    return Problem(largest.name, message, round(missing))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _ranks(number: int) -> str:
    return "one rank" if number == 1 else f"{number} ranks"
