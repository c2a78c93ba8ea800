"""The JSON form of a plan (docs/architecture.md, "Plan JSON"), versioned."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tpurec.config import from_mapping
from tpurec.errors import ConfigError
from tpurec.sharding.plan import PlacedTable, Plan
from tpurec.topology.slices import SliceTopology

PLAN_VERSION = 1


def to_json(plan: Plan) -> str:
    """Write a plan as text, the same for the same plan.

    Args:
        plan: the plan.

    Returns:
        Text that `from_json` reads back to an equal plan.
    """
    slice_ = plan.topology
    body = {
        "format": "tpurec.plan",
        "version": PLAN_VERSION,
        "slice": plan.slice,
        "num_ranks": slice_.num_ranks,
        "coordinates": [list(slice_.coordinates(rank)) for rank in range(slice_.num_ranks)],
        "batch_size": plan.batch_size,
        "tables": [_table_json(placed, slice_.num_ranks) for placed in plan.tables],
        "stacks": [dataclasses.asdict(stack) for stack in plan.stacks],
        "rungs": dataclasses.asdict(plan.rungs),
        "assumptions": dataclasses.asdict(plan.assumptions),
        "estimates": dataclasses.asdict(plan.estimates) if plan.estimates else None,
        "plan_seconds": plan.plan_seconds,
        "stopped_early": plan.stopped_early,
    }
    return json.dumps(body, indent=1, sort_keys=False)


def from_json(text: str, where: str = "plan") -> Plan:
    """Read a plan and check it.

    Args:
        text: what `to_json` wrote.
        where: what to call it in errors.

    Returns:
        The plan.

    Raises:
        ConfigError: it is no plan, its version is unknown, or its shards do not own every row and column of every table
            exactly once.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}.", "Make a plan: tpurec plan --out.") from None
    if not isinstance(body, dict) or body.get("format") != "tpurec.plan":
        raise ConfigError(
            f"{where}: is not a sharding plan (no 'format': 'tpurec.plan').", "Make one: tpurec plan --out."
        )
    if body.get("version") != PLAN_VERSION:
        raise ConfigError(
            f"{where}: plan version {body.get('version')!r} is not known, this program reads {PLAN_VERSION}.",
            "Make the plan again with tpurec plan.",
        )
    try:
        slice_ = SliceTopology.parse(str(body.get("slice")))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.problem}", "Make the plan again.") from None
    wired = [list(slice_.coordinates(rank)) for rank in range(slice_.num_ranks)]
    if body.get("coordinates") != wired or body.get("num_ranks") != slice_.num_ranks:
        raise ConfigError(f"{where}: ranks and coordinates are not those of {slice_.name}.", "Make the plan again.")
    fields = {key: body[key] for key in body if key not in ("format", "version", "num_ranks", "coordinates")}
    tables = fields.get("tables")
    if not isinstance(tables, list):
        raise ConfigError(f"{where}: has no list 'tables'.")
    fields["tables"] = [_table_from_json(entry, slice_.num_ranks, where) for entry in tables]
    return from_mapping(Plan, fields, where)


def _table_json(placed: PlacedTable, num_ranks: int) -> dict[str, Any]:
    everyone = tuple(range(num_ranks))
    shards = []
    for shard in placed.shards:
        ranks: Any = "all" if shard.ranks == everyone else list(shard.ranks)
        rows = {"rule": shard.rule, "shift": shard.shift}
        shards.append({"ranks": ranks, "rows": rows, "columns": list(shard.columns), "bytes": shard.bytes})
    return {
        "table": dataclasses.asdict(placed.table),
        "sharding": placed.sharding,
        "exchange": placed.exchange,
        "shards": shards,
        "seconds": placed.seconds,
        "parts": placed.parts,
        "reason": placed.reason,
    }


def _table_from_json(entry: Any, num_ranks: int, where: str) -> dict[str, Any]:
    try:
        shards = [
            {
                "ranks": list(range(num_ranks)) if shard["ranks"] == "all" else shard["ranks"],
                "rule": shard["rows"]["rule"],
                "shift": shard["rows"]["shift"],
                "columns": shard["columns"],
                "bytes": shard["bytes"],
            }
            for shard in entry["shards"]
        ]
        return {**entry, "shards": shards}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{where}: a table's shards cannot be read: {error!r}.", "Make the plan again.") from None
