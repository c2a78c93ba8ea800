"""A plan, or why there is none, for a person with ten seconds; and several slices side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

TOP_TABLES = 5
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """Write bytes for people.

    Args:
        num_bytes: how many.

    Returns:
        Text such as `31.2 GiB`.

    >>> size(3 * 2**30)
    '3.0 GiB'
    """
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:,.0f} {_UNITS[power]}" if power == 0 else f"{num_bytes:,.1f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Write seconds for people.

    Args:
        seconds: how long.

    Returns:
        Text such as `1.25 ms`.

    >>> duration(0.00125)
    '1.25 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.2f} {unit}"
    return f"{seconds * 1e6:,.1f} us"


def print_plan(console: Console, found: dict[str, Any], dims: Sequence[int], max_tables: int) -> None:
    """Print one slice's answer.

    Args:
        console: where.
        found: `Plan.summary()` or `Infeasible.summary()`, with `cost_per_million_examples` if a price is known.
        dims: chips along each dimension.
        max_tables: how many lines the list of tables may have.
    """
    fits = found["fits"]
    head = Text(f"{found['slice']}  ", style="bold")
    head.append("fits" if fits else "does not fit", style="bold green" if fits else "bold red")
    shape = " x ".join(map(str, dims))
    head.append(f"  {_counted(found['num_chips'], 'chip')} ({shape}), {_counted(found['num_ranks'], 'rank')}")
    if fits:
        idle = found["idle_ranks"]
        head.append(f", {idle:,} idle" if idle else ", none idle", style="bold red" if idle else "")
    console.print(head)
    if not fits:
        _print_problems(console, found)
        return
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    parts = sorted(found["step_parts"].items(), key=lambda part: -part[1])
    facts.add_row("step", f"{duration(found['step_seconds'])}  ({found['samples_per_second']:,.0f} samples/s)")
    shown = ", ".join(f"{name.replace('_', ' ')} {duration(value)}" for name, value in parts if value > 0)
    facts.add_row("  of it", shown)
    ratio = found["step_seconds"] / found["lower_bound_seconds"]
    facts.add_row(
        "lower bound",
        f"{duration(found['lower_bound_seconds'])}: no plan is faster ({found['lower_bound_kind']}); "
        f"this one takes {ratio:.3f} x that",
    )
    capacity = found["hbm_bytes_capacity"]
    facts.add_row(
        "HBM a rank",
        f"{size(found['hbm_bytes_max'])} the fullest, {size(found['hbm_bytes_mean'])} the mean, of {size(capacity)} "
        f"usable ({found['hbm_bytes_max'] / capacity:.0%})",
    )
    if found.get("cost_per_million_examples") is not None:
        facts.add_row("cost", f"{found['cost_per_million_examples']:.4g} per million examples")
    if found["stopped_early"]:
        facts.add_row("search", "stopped at --seconds; more time may find a better plan")
    console.print(facts)
    _print_tables(console, found["tables"], max_tables)
    console.print("Times are estimates of a cost model; not measured on hardware.", style="dim")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _print_problems(console: Console, found: dict[str, Any]) -> None:
    for problem in found["problems"]:
        missing = f" ({size(problem['bytes_missing'])} missing)" if problem["bytes_missing"] else ""
        console.print(f"  {problem['message']}{missing}", markup=False)
        for remedy in problem["remedies"]:
            console.print(f"    would help: {remedy_text(remedy)}", markup=False)


def remedy_text(remedy: dict[str, Any]) -> str:
    """Write a checked remedy as one line.

    Args:
        remedy: `action`, and what planning it gave.

    Returns:
        Text such as `--slice v6e-32: fits, 3.10 ms a step`.
    """
    text = str(remedy["action"])
    if remedy.get("step_seconds") is not None:
        text += f": fits, {duration(remedy['step_seconds'])} a step"
    return text


def _print_tables(console: Console, tables: list[dict[str, Any]], max_tables: int) -> None:
    costly = sorted(tables, key=lambda table: -table["seconds"])
    console.print(f"The {min(TOP_TABLES, len(costly))} most expensive tables:")
    top = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("table", "sharding", "time a step", "why"):
        top.add_column(name, no_wrap=name != "why")
    for table in costly[:TOP_TABLES]:
        top.add_row(table["name"], table["sharding"], duration(table["seconds"]), table["reason"])
    console.print(top)
    if max_tables <= 0:
        return
    console.print("All tables:" if len(costly) <= max_tables else f"The first {max_tables} of {len(costly)} tables:")
    listing = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name, side in (("table", "left"), ("sharding", "left"), ("exchange", "left"), ("ranks", "right")):
        listing.add_column(name, justify=side, no_wrap=True)
    listing.add_column("bytes a rank", justify="right", no_wrap=True)
    listing.add_column("time a step", justify="right", no_wrap=True)
    for table in tables[:max_tables]:
        listing.add_row(
            table["name"],
            table["sharding"],
            table["exchange"].replace("_", " "),
            ranks_text(table["ranks"]),
            size(table["bytes"]),
            duration(table["seconds"]),
        )
    console.print(listing)


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ranks compactly.

    Args:
        ranks: ascending.

    Returns:
        Text such as `0-7, 12`, or the count if the list is long.

    >>> ranks_text([0, 1, 2, 3, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(text) <= 24 else f"{len(ranks)} ranks"


def print_side_by_side(console: Console, answers: list[dict[str, Any]]) -> None:
    """Print several slices' answers, a column each.

    Args:
        console: where.
        answers: one summary a slice.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for found in answers:
        table.add_column(found["slice"], justify="right", no_wrap=True)
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
    if any(found.get("cost_per_million_examples") is not None for found in answers):
        lines.append(("cost / 1M examples", lambda found: f"{found['cost_per_million_examples']:.4g}", True))
    for name, show, needs_plan in lines:
        table.add_row(name, *("-" if needs_plan and not found["fits"] else show(found) for found in answers))
    console.print(table)
    console.print("Times are estimates of a cost model; not measured on hardware.", style="dim")


def print_diff(console: Console, found: dict[str, Any]) -> None:
    """Print the difference of two plans.

    Args:
        console: where.
        found: `PlanDiff.summary()`.
    """
    changed = [table for table in found["tables"] if table["changed"]]
    share = found["bytes_moved"] / found["bytes_total"] if found["bytes_total"] else 0.0
    console.print(f"{found['before']} -> {found['after']}", style="bold")
    console.print(
        f"  {len(changed)} of {len(found['tables'])} tables change; {size(found['bytes_moved'])} of "
        f"{size(found['bytes_total'])} move ({share:.0%})"
    )
    for name, show in (("step_seconds", duration), ("hbm_bytes_max", size)):
        old, new = found[name]
        if old is not None and new is not None:
            what = "step" if name == "step_seconds" else "HBM of the fullest rank"
            console.print(f"  {what}: {show(old)} -> {show(new)}")
    if not changed:
        return
    listing = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("table", "before", "after"):
        listing.add_column(name, no_wrap=True)
    listing.add_column("bytes to move", justify="right", no_wrap=True)
    for table in changed:
        listing.add_row(table["name"], table["before"], table["after"], size(table["bytes_moved"]))
    console.print(listing)
