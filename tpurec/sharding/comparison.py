"""Plans beside each other: several slices, or an old plan and a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpurec.sharding.summary import ESTIMATES, counted, duration, print_problems, size


def print_side_by_side(console: Console, answers: list[dict[str, Any]]) -> None:
    """Print several slices' answers, a column each, and why the tables do not fit on those where they do not.

    Args:
        console: where.
        answers: one summary a slice.
    """
    lines: list[tuple[str, Callable[[dict[str, Any]], str], bool]] = [
        ("fits", lambda found: "yes" if found["fits"] else "no", False),
        ("chips", lambda found: f"{found['num_chips']:,}", False),
        ("ranks", lambda found: f"{found['num_ranks']:,}", False),
        ("idle ranks", lambda found: f"{found['idle_ranks']:,}", True),
        ("step", lambda found: duration(found["step_seconds"]), True),
        ("x lower bound", lambda found: f"{found['step_seconds'] / found['lower_bound_seconds']:.3f}", True),
        ("samples/s", lambda found: f"{found['samples_per_second']:,.0f}", True),
        ("samples/s a chip", lambda found: f"{found['samples_per_second'] / found['num_chips']:,.0f}", True),
        ("HBM, fullest rank", lambda found: f"{found['hbm_bytes_max'] / found['hbm_bytes_capacity']:.0%}", False),
    ]
    priced = any(found.get("cost_per_million_examples") is not None for found in answers)
    if priced:
        lines.append(("cost / 1M examples", lambda found: f"{found['cost_per_million_examples']:.4g}", True))
    columns = [
        [found["slice"], *("-" if needs_plan and not found["fits"] else show(found) for _, show, needs_plan in lines)]
        for found in answers
    ]
    for group in _groups_within(columns, console.width - max(len(name) for name, _, _ in lines) - 2):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("", no_wrap=True)
        for column in group:
            table.add_column(column[0], justify="right", no_wrap=True)
        for number, (name, _, _) in enumerate(lines):
            table.add_row(name, *(column[number + 1] for column in group))
        console.print(table)
    fitting = [found for found in answers if found["fits"]]
    if len(fitting) > 1:
        fastest = min(fitting, key=lambda found: found["step_seconds"])["slice"]
        console.print(f"Fastest: {fastest}. {_least_effort(fitting, priced)}", markup=False)
    for found in answers:
        if not found["fits"]:
            console.print(f"{found['slice']} does not fit:", style="bold")
            print_problems(console, found["problems"])
    if fitting:
        console.print(ESTIMATES, style="dim")


def _least_effort(fitting: list[dict[str, Any]], priced: bool) -> str:
    if priced:
        return f"Cheapest: {min(fitting, key=lambda found: found['cost_per_million_examples'])['slice']}."
    return f"Most samples/s a chip: {max(fitting, key=lambda f: f['samples_per_second'] / f['num_chips'])['slice']}."


def _groups_within(columns: list[list[str]], width: int) -> list[list[list[str]]]:
    """Columns in groups that a line has room for, so that none is cut off."""
    groups: list[list[list[str]]] = []
    left = 0
    for column in columns:
        needs = max(map(len, column)) + 2
        if not groups or needs > left:
            groups.append([])
            left = width
        groups[-1].append(column)
        left -= needs
    return groups


def print_diff(console: Console, found: dict[str, Any], max_tables: int) -> None:
    """Print the difference of two plans.

    Args:
        console: where.
        found: `PlanDiff.summary()`.
        max_tables: how many lines the list of changed tables may have.
    """
    changed = sorted((table for table in found["tables"] if table["changed"]), key=lambda table: -table["bytes_moved"])
    console.print(f"{found['before']} -> {found['after']}", style="bold")
    if not changed:
        console.print(f"  No table changes and nothing moves ({counted(len(found['tables']), 'table')}).")
    else:
        share = found["bytes_moved"] / found["bytes_total"] if found["bytes_total"] else 0.0
        console.print(
            f"  {len(changed):,} of {counted(len(found['tables']), 'table')} change; {size(found['bytes_moved'])} of "
            f"{size(found['bytes_total'])} move ({share:.0%})"
        )
    figures: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("batch", "batch_size", lambda number: f"{number:,}"),
        ("step", "step_seconds", duration),
        ("HBM of the fullest rank", "hbm_bytes_max", size),
    )
    for what, key, show in figures:
        old, new = found[key]
        if key == "batch_size" and old == new:
            continue
        told = ["not known" if value is None else show(value) for value in (old, new)]
        console.print(f"  {what}: {told[0]} -> {told[1]}")
    if not changed or max_tables <= 0:
        return
    if len(changed) > max_tables:
        first = f"The {max_tables:,} tables that move most" if max_tables > 1 else "The table that moves most"
        console.print(f"{first} (--max-tables shows more):")
    listing = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("table", "before", "after"):
        listing.add_column(name, overflow="fold")
    listing.add_column("to move", justify="right", no_wrap=True)
    for table in changed[:max_tables]:
        listing.add_row(Text(table["name"]), table["before"], table["after"], size(table["bytes_moved"]))
    console.print(listing)
