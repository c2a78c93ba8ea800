"""Plans as one self-contained page: slices side by side, a heat map of chips on the torus, and all tables."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tpurec import atomic
from tpurec.sharding.assumptions import Assumptions, rows_of_table
from tpurec.sharding.measure import Measurement
from tpurec.sharding.plan import Infeasible, PlacedTable, Plan
from tpurec.sharding.summary import remedy_text, size
from tpurec.topology.slices import SliceTopology

_FIGURES = (
    "slice", "fits", "num_chips", "num_ranks", "idle_ranks", "step_seconds", "step_parts", "lower_bound_seconds",
    "samples_per_second", "hbm_bytes_max", "hbm_bytes_mean", "hbm_bytes_capacity", "hbm_parts", "stopped_early",
)  # fmt: skip
_PROBLEMS = 10


def write_report(
    path: str | Path,
    found: Sequence[Plan | Infeasible],
    summaries: Sequence[dict[str, Any]],
    measured: Measurement | None = None,
) -> None:
    """Write the page; the file appears whole or not at all.

    Args:
        path: the `.html` file.
        found: one slice's plan after the other, or why there is none; of the same tables and batch size.
        summaries: what `--json` prints for them, prices included.
        measured: what was measured of the tables, if anything was.
    """
    folder = resources.files("tpurec.sharding")
    # "</" would end the script element that holds the data, whatever a table is called.
    text = json.dumps(page_data(found, summaries, measured), separators=(",", ":")).replace("</", "<\\/")
    page = (folder / "report.html").read_text(encoding="utf-8")
    for mark, name in (("/*CSS*/", "report.css"), ("/*JS*/", "report.js")):
        page = page.replace(mark, (folder / name).read_text(encoding="utf-8").rstrip())
    atomic.write_text(path, page.replace("/*DATA*/", text))  # last: nothing in the data is taken for a mark


def page_data(
    found: Sequence[Plan | Infeasible], summaries: Sequence[dict[str, Any]], measured: Measurement | None = None
) -> dict[str, Any]:
    """Return what the page shows, as plain values, written so that thousands of ranks and tables make a small file.

    Args:
        found: plans, or why there is none.
        summaries: what `--json` prints for them.
        measured: what was measured of the tables, if anything was.

    Returns:
        `slices` (figures, problems, ranks, where each table is, values of the assumptions), `tables` (their shapes;
        empty if no slice has a plan), `assumptions`, `batch_size` and `measured`.
    """
    plans = [answer for answer in found if isinstance(answer, Plan)]
    tables = [placed.table for placed in plans[0].tables] if plans else []
    return {
        "batch_size": found[0].batch_size,
        "tables": [
            (t.name, t.num_embeddings, t.embedding_dim, t.ids_per_example, t.weight_bytes + t.state_bytes)
            for t in tables
        ],
        "measured": measured and {"data": measured.data, "num_examples": measured.num_examples},
        "assumptions": [(name, unit, f"{what}. Source: {source}") for name, _, unit, what, source in rows_of_table()],
        "slices": [_slice_data(answer, summary) for answer, summary in zip(found, summaries, strict=True)],
    }


def _slice_data(found: Plan | Infeasible, summary: dict[str, Any]) -> dict[str, Any]:
    slice_ = SliceTopology.parse(found.slice)
    assumptions = found.assumptions if isinstance(found, Plan) else Assumptions()
    values = dataclasses.asdict(assumptions)
    data = {
        **{key: summary[key] for key in _FIGURES},
        "cost_per_million_examples": summary.get("cost_per_million_examples"),
        "dims": slice_.dims,
        "ranks_per_host": slice_.ranks_per_host,
        "problems": _problems(summary["problems"]),
        "assumed": [
            default if values[name] is None else f"{values[name]:g}" for name, default, _, _, _ in rows_of_table()
        ],
        "ranks": None,
        "part_names": list(summary["step_parts"]),
        "whys": [],
        "placed": [],
    }
    if isinstance(found, Plan):
        data["ranks"] = _ranks(found, slice_)
        data["whys"] = list(dict.fromkeys(placed.reason for placed in found.tables))
        numbers = {why: number for number, why in enumerate(data["whys"])}
        data["placed"] = [_placed(placed, data["part_names"], numbers[placed.reason]) for placed in found.tables]
    return data


def _problems(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = []
    for problem in problems[:_PROBLEMS]:
        missing = f" {size(problem['bytes_missing'])} are missing." if problem["bytes_missing"] else ""
        remedies = [remedy_text(remedy) for remedy in problem["remedies"]]
        shown.append({"message": problem["message"] + missing, "remedies": remedies})
    if len(problems) > _PROBLEMS:
        shown.append({"message": f"And {len(problems) - _PROBLEMS:,} more tables in the same way.", "remedies": []})
    return shown


def _ranks(plan: Plan, slice_: SliceTopology) -> dict[str, Any]:
    shards: Counter[int] = Counter()
    for placed in plan.tables:
        for shard in placed.shards:
            shards.update(shard.ranks)
    found, ranks = plan.estimates, range(slice_.num_ranks)
    return {
        "cells": [_cell(slice_.coordinates(rank), slice_.dims) for rank in ranks],
        "bytes": _column([int(_rounded(value)) for value in found.rank_bytes]),
        "seconds": _column([_rounded(value) for value in found.rank_seconds]),
        "shards": _column([shards[rank] for rank in ranks]),
    }


def _cell(coordinates: tuple[int, ...], dims: tuple[int, ...]) -> int:
    number = 0
    for coordinate, extent in zip(reversed(coordinates), reversed(dims), strict=True):
        number = number * extent + coordinate
    return number


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _column(values: list[Any]) -> list[Any]:
    """A value a rank; a single one if all are alike, as they mostly are where every table is row-wise."""
    return values[:1] if len(set(values)) == 1 else values


def _runs(ranks: Sequence[int]) -> list[int]:
    """Ascending ranks as first, last, first, last, ...: a table on all ranks is two numbers."""
    runs: list[int] = []
    for rank in ranks:
        if runs and rank == runs[-1] + 1:
            runs[-1] = rank
        else:
            runs += [rank, rank]
    return runs


def _placed(placed: PlacedTable, part_names: list[str], why: int) -> tuple[Any, ...]:
    """Sharding, exchange, ranks, nanoseconds of each part of the step, and which of the reasons."""
    nanoseconds = [_rounded(1e9 * placed.parts.get(name, 0.0)) for name in part_names]
    whole = [int(value) if value >= 100 else value for value in nanoseconds]
    return placed.sharding, placed.exchange, _runs(placed.ranks), whole, why
