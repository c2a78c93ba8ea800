"""A plan, or why there is none, for a person with ten seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

TOP_TABLES = 5
TOP_PROBLEMS = 5
_FACTS_BEFORE = 17  # columns left of the facts' values
ESTIMATES = "Times are estimates of a cost model; not measured on hardware."
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
        found: `Plan.summary()` or `Infeasible.summary()`, with `cost_per_million_examples` if a price is known, and
            `measured` if statistics were.
        dims: chips along each dimension.
        max_tables: how many lines the list of tables may have.
    """
    fits = found["fits"]
    head = Text(f"{found['slice']}  ", style="bold")
    head.append("fits" if fits else "does not fit", style="bold green" if fits else "bold red")
    if found["slice"].startswith("cpu-"):
        head.append(f"  {counted(found['num_ranks'], 'rank')} on CPUs")
    else:
        shape = " x ".join(map(str, dims))
        head.append(f"  {counted(found['num_chips'], 'chip')} ({shape}), {counted(found['num_ranks'], 'rank')}")
    if fits:
        idle = found["idle_ranks"]
        head.append(f", {idle:,} idle" if idle else ", none idle", style="bold red" if idle else "")
    console.print(head)
    if not fits:
        print_problems(console, found["problems"])
        if found.get("measured"):
            print_measured(console, found["measured"], max_tables)
        return
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    parts = sorted(found["step_parts"].items(), key=lambda part: -part[1])
    facts.add_row("step", f"{duration(found['step_seconds'])}  ({found['samples_per_second']:,.0f} samples/s)")
    shown = (f"{name.replace('_', ' ')} {duration(value)}" for name, value in parts if value >= 5e-8)
    facts.add_row("  of it", _in_lines(shown, console.width - _FACTS_BEFORE - 2))
    ratio = found["step_seconds"] / found["lower_bound_seconds"]
    facts.add_row(
        "lower bound",
        f"{duration(found['lower_bound_seconds'])}: no plan is faster ({found['lower_bound_kind']}); "
        f"this one takes {ratio:.3f} x that",
    )
    capacity = found["hbm_bytes_capacity"]
    facts.add_row(
        "RAM a rank" if found["slice"].startswith("cpu-") else "HBM a rank",
        f"{size(found['hbm_bytes_max'])} the fullest, {size(found['hbm_bytes_mean'])} the mean, of {size(capacity)} "
        f"usable ({found['hbm_bytes_max'] / capacity:.0%})",
    )
    if found.get("cost_per_million_examples") is not None:
        facts.add_row("cost", f"{found['cost_per_million_examples']:.4g} per million examples")
    if found["stopped_early"]:
        facts.add_row("search", "stopped at --seconds; more time may find a better plan")
    console.print(facts)
    if found.get("measured"):
        print_measured(console, found["measured"], max_tables)
    _print_tables(console, found["tables"], max_tables)
    console.print(ESTIMATES, style="dim")


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    Args:
        number: how many.
        noun: of one.

    Returns:
        Text such as `1 chip` or `1,024 chips`.

    >>> counted(2, "rank")
    '2 ranks'
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _in_lines(items: Iterable[str], width: int) -> str:
    """Comma-separated items, broken only between items: a figure stays with its name and unit."""
    glued = ", ".join(item.replace(" ", "\0") for item in items)
    return textwrap.fill(glued, max(20, width), break_long_words=False).replace("\0", " ")


def print_problems(console: Console, problems: list[dict[str, Any]]) -> None:
    """Print why tables do not fit, and what would help.

    Args:
        console: where.
        problems: of a summary; the first few are printed.
    """
    for problem in problems[:TOP_PROBLEMS]:
        missing = f" {size(problem['bytes_missing'])} are missing." if problem["bytes_missing"] else ""
        _print_indented(console, 2, f"{problem['message']}{missing}")
        for remedy in problem["remedies"]:
            _print_indented(console, 4, f"would help: {remedy_text(remedy)}")
    rest = [problem["table"] for problem in problems[TOP_PROBLEMS:]]
    if rest:
        _print_indented(console, 2, f"and {counted(len(rest), 'more table')} in the same way; --json names all.")


def _print_indented(console: Console, columns: int, text: str) -> None:
    """Long lines go on under their own beginning."""
    console.print(Padding(Text(text), (0, 0, 0, columns), expand=False))


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
    few = min(TOP_TABLES, len(costly))
    console.print("The most expensive table:" if few == 1 else f"The {few} most expensive tables:")
    top = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("table", "sharding", "time a step", "why"):
        top.add_column(name, no_wrap=name in ("sharding", "time a step"), overflow="fold")
    for table in costly[:TOP_TABLES]:
        top.add_row(Text(table["name"]), table["sharding"], duration(table["seconds"]), table["reason"])
    console.print(top)
    if max_tables <= 0:
        return
    _print_heading(console, len(tables), max_tables, "All tables:")
    listing = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    for name, side in (("table", "left"), ("sharding", "left"), ("exchange", "left"), ("ranks", "right")):
        listing.add_column(name, justify=side, no_wrap=name != "table", overflow="fold")
    listing.add_column("bytes a rank", justify="right", no_wrap=True)
    listing.add_column("time a step", justify="right", no_wrap=True)
    for table in tables[:max_tables]:
        listing.add_row(
            Text(table["name"]),
            table["sharding"],
            table["exchange"].replace("_", " "),
            ranks_text(table["ranks"]),
            size(table["bytes"]),
            duration(table["seconds"]),
        )
    console.print(listing)


def _print_heading(console: Console, number: int, shown: int, all_of_them: str) -> None:
    more = f"The first {shown:,} of {number:,} tables (--max-tables shows more):"
    console.print(all_of_them if number <= shown else more)


def print_measured(console: Console, measured: dict[str, Any], max_tables: int) -> None:
    """Print what was measured of the data, in place of what is assumed.

    Args:
        console: where.
        measured: `Measurement.summary()`.
        max_tables: how many lines the list of tables may have.
    """
    seen, there = measured["num_examples"], measured["num_examples_in_data"]
    console.print(f"Measured on {seen:,} of {counted(there, 'example')} in {measured['data']}.", markup=False)
    tables = measured["tables"]
    lost, met = (sum(t[key] for t in tables) for key in ("ids_without_row", "num_ids"))
    if lost:
        console.print(f"  {lost:,} of {lost + met:,} ids have no row (out of range, malformed, unseen): left out.")
    if max_tables <= 0:
        return
    _print_heading(console, len(tables), max_tables, "Its statistics:")
    listing = Table(box=None, padding=(0, 2, 0, 2), header_style="bold")
    listing.add_column("table", overflow="fold")
    for name in ("ids an example", "ids seen", "distinct", "Zipf exponent"):
        listing.add_column(name, justify="right", no_wrap=True)
    for table in tables[:max_tables]:
        share, exponent = table["unique_share"], table["zipf_exponent"]
        listing.add_row(
            Text(table["name"]),
            f"{table['ids_per_example']:.4g}",
            f"{table['num_ids']:,}",
            "no id seen" if share is None else f"{share:.2%}",
            "assumed" if exponent is None else f"{exponent:.2f}",
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
