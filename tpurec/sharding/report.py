"""The plan as one self-contained page: a heat map of chips on the torus, where time goes, and a sortable table list."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from tpurec import atomic
from tpurec.sharding.assumptions import Assumptions, rows_of_table
from tpurec.sharding.plan import Infeasible, Plan
from tpurec.sharding.summary import remedy_text
from tpurec.topology.slices import SliceTopology

_PLACEHOLDER = "/*DATA*/"


def write_report(path: str | Path, found: Plan | Infeasible, summary: dict[str, Any]) -> None:
    """Write the page; the file appears whole or not at all.

    Args:
        path: the `.html` file.
        found: the plan, or why there is none.
        summary: what `--json` prints for it, price included.
    """
    template = (resources.files("tpurec.sharding") / "report.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data, whatever a table is called.
    text = json.dumps(page_data(found, summary), separators=(",", ":")).replace("</", "<\\/")
    atomic.write_text(path, template.replace(_PLACEHOLDER, text))


def page_data(found: Plan | Infeasible, summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows, as plain values.

    Args:
        found: the plan, or why there is none.
        summary: what `--json` prints for it.

    Returns:
        The summary with ranks (coordinates, host, memory, load, number of shards), tables with their shape, and the
        assumptions.
    """
    slice_ = SliceTopology.parse(found.slice)
    problems = [
        {"message": problem["message"], "remedies": [remedy_text(remedy) for remedy in problem["remedies"]]}
        for problem in summary["problems"]
    ]
    data = {
        **summary,
        "problems": problems,
        "dims": list(slice_.dims),
        "batch_size": found.batch_size,
        "ranks": [],
        "tables": [],
    }
    assumptions = Assumptions()
    if isinstance(found, Plan):
        assumptions = found.assumptions
        data["ranks"] = _ranks(found, slice_)
        data["tables"] = _tables(found)
    values = dataclasses.asdict(assumptions)
    data["assumptions"] = [
        [name, default if values[name] is None else f"{values[name]:g}", unit, f"{meaning}. Source: {source}"]
        for name, default, unit, meaning, source in rows_of_table()
    ]
    return data


def _ranks(plan: Plan, slice_: SliceTopology) -> list[dict[str, Any]]:
    shards: Counter[int] = Counter()
    for placed in plan.tables:
        for shard in placed.shards:
            shards.update(shard.ranks)
    found = plan.estimates
    return [
        {
            "rank": rank,
            "coordinates": list(slice_.coordinates(rank)),
            "host": slice_.host(rank),
            "bytes": found.rank_bytes[rank],
            "seconds": found.rank_seconds[rank],
            "num_shards": shards[rank],
        }
        for rank in range(slice_.num_ranks)
    ]


def _tables(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "name": placed.name,
            "sharding": placed.sharding.replace("_", " "),
            "exchange": placed.exchange.replace("_", " "),
            "ranks": list(placed.ranks),
            "num_ranks": len(placed.ranks),
            "num_embeddings": placed.table.num_embeddings,
            "embedding_dim": placed.table.embedding_dim,
            "bytes": placed.table.weight_bytes + placed.table.state_bytes,
            "seconds": placed.seconds,
            "why": placed.reason,
        }
        for placed in plan.tables
    ]
