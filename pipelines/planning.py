"""The plan that a run is trained by: given, kept from before, or made now; always for the recipe's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.recipe import Recipe
from pipelines.run import Run
from pipelines.shares import Share
from tpurec.errors import ConfigError
from tpurec.features import Schema
from tpurec.kernels.limits import problem_of_rows
from tpurec.sharding.plan import Plan
from tpurec.sharding.planner import plan as make_plan
from tpurec.sharding.sources import recipe_tables
from tpurec.sharding.tables import TableList, TableSpec


def choose_plan(run: Run, recipe: Recipe, schema: Schema) -> Plan:
    """Choose the plan of a run; writes nothing.

    `sharding.plan` of the recipe comes first. Without it, a plan that the RUN has is used again if it is for this slice
    and these tables, so that a resumed run gives the same numbers to the bit; else one is made.

    Args:
        run: the RUN folder; it need not exist.
        recipe: the resolved recipe; its section [sharding] says how many workers.
        schema: of the data.

    Returns:
        The plan.

    Raises:
        ConfigError: the given plan is for other tables or another number of workers, nothing fits the slice, or a batch
            has fewer rows than there are workers.
    """
    config = recipe.sharding
    if recipe.train.batch_size < config.num_ranks:
        raise ConfigError(
            f"train.batch_size = {recipe.train.batch_size} is smaller than the number of workers, {config.num_ranks}: "
            "some would never have a row.",
            f"Use at most {recipe.train.batch_size} workers, or a larger train.batch_size.",
        )
    # Every rank has the same number of slots; the last ones are padding if the batch cannot be shared evenly.
    batch_size = Share(0, config.num_ranks).size(recipe.train.batch_size) * config.num_ranks
    wanted = recipe_tables(recipe.model, recipe.tables, config, schema, batch_size)
    if config.plan is not None:
        found = Plan.load(config.plan)
        check_plan_for(found, wanted.tables, config.num_ranks, config.plan)
        if recipe.device.kind == "tpu":
            _check_widths(found, config.plan)
        return found
    kept = _kept(run, wanted, config.topology.name, batch_size)
    if kept is not None and all(
        getattr(kept.assumptions, name) == set_to for name, set_to in config.assumptions.items()
    ):
        return kept
    return _made(wanted, config.topology.name, batch_size)


def keep_plan(run: Run, plan: Plan, log: Callable[[str], None]) -> None:
    """Put the plan into `RUN/plan.json`, where the workers find it.

    Args:
        run: the RUN folder.
        plan: of `choose_plan`.
        log: takes a line for people.
    """
    plan.save(run.plan_file)
    log(f"plan for {plan.slice}: {_summary(plan)}")


def check_plan_for(plan: Plan, tables: Sequence[TableSpec], num_ranks: int, where: str | Path) -> None:
    """Refuse a plan that was made for other tables, or another number of ranks.

    Args:
        plan: the plan.
        tables: of the recipe.
        num_ranks: workers.
        where: the plan's file, for error texts.

    Raises:
        ConfigError: naming table and field.
    """
    if plan.topology.num_ranks != num_ranks:
        raise ConfigError(
            f"{where}: slice: the plan is for {plan.slice} with {plan.topology.num_ranks} ranks, there are {num_ranks} "
            "workers.",
            f"Use --workers {plan.topology.num_ranks}, or plan again: tpurec plan RECIPE --slice cpu-{num_ranks}.",
        )
    again = f"Make the plan from this recipe: tpurec plan RECIPE --slice {plan.slice} --out {where}."
    planned = {placed.name: placed.table for placed in plan.tables}
    for table in tables:
        if table.name not in planned:
            raise ConfigError(f"{where}: table {table.name!r} of the recipe is not in the plan.", again)
        for field, ours, theirs in _fields(table, planned.pop(table.name)):
            if ours != theirs:
                raise ConfigError(
                    f"{where}: table {table.name!r}: {field} is {theirs!r} in the plan, {ours!r} in the recipe.", again
                )
    if planned:
        raise ConfigError(f"{where}: table {next(iter(planned))!r} of the plan is not in the recipe.", again)


def _check_widths(plan: Plan, where: str | Path) -> None:
    """Refuse a plan that was made for CPUs, whose shards a TPU cannot hold; one for a TPU slice has none."""
    for placed in plan.tables:
        for shard in placed.shards:
            refused = problem_of_rows(shard.columns[1] - shard.columns[0], placed.table.dtype)
            if refused is not None:
                columns = f"columns {shard.columns[0]} to {shard.columns[1]}"
                raise ConfigError(f"{where}: table {placed.name!r}, {columns}: {refused[0]}", refused[1])


def _fields(ours: TableSpec, theirs: TableSpec) -> list[tuple[str, object, object]]:
    """What must be as it was when the plan was made."""
    names = ("num_embeddings", "embedding_dim", "dtype", "pooling", "optimizer")
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    for name in ("name", "weighted"):
        pairs.append((f"features.{name}", *([getattr(f, name) for f in spec.features] for spec in (ours, theirs))))
    return pairs


def _constraints(table: TableSpec) -> tuple[object, ...]:
    return (table.allow, table.forbid, table.pin, table.pin_ranks, table.keep_together)


def _kept(run: Run, wanted: TableList, slice_name: str, batch_size: int) -> Plan | None:
    """The RUN's plan, if it is for the same slice, batch, tables and constraints."""
    if not run.plan_file.exists():
        return None
    try:
        kept = Plan.load(run.plan_file)
        check_plan_for(kept, wanted.tables, kept.topology.num_ranks, run.plan_file)
    except ConfigError:  # made by another version, damaged, or for other tables: a new one is made
        return None
    constraints = {placed.name: _constraints(placed.table) for placed in kept.tables}
    same = kept.slice == slice_name and kept.batch_size == batch_size
    return kept if same and constraints == {table.name: _constraints(table) for table in wanted.tables} else None


def _made(wanted: TableList, slice_name: str, batch_size: int) -> Plan:
    found = make_plan(wanted.tables, slice_name, batch_size, wanted.assumptions)
    if isinstance(found, Plan):
        return found
    worst = found.problems[0]
    ways = "; ".join(str(remedy["action"]) for remedy in worst.remedies[:2])
    raise ConfigError(
        f"the tables do not fit {slice_name}: {worst.message}",
        f"{ways}." if ways else f"See tpurec plan RECIPE --slice {slice_name}.",
    )


def _summary(plan: Plan) -> str:
    kinds: dict[str, int] = {}
    for placed in plan.tables:
        kinds[placed.sharding] = kinds.get(placed.sharding, 0) + 1
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    idle = plan.estimates.idle_ranks if plan.estimates else 0
    return f"{len(plan.tables)} tables ({parts})" + (f"; {idle} ranks own no table" if idle else "")
