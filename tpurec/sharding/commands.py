"""`tpurec plan` and `tpurec plan-diff`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpurec.reporting import JsonOption, Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from tpurec.sharding.plan import Infeasible, Plan

DEFAULT_TABLE_LINES = 40


def plan(
    tables: Annotated[
        str,
        typer.Argument(
            metavar="TABLES",
            help="Table list (.toml, .json), recipe, RUN, checkpoint, Parquet data set or TorchRec module:factory.",
        ),
    ],
    slice_: Annotated[
        list[str],
        typer.Option("--slice", help="Slice: v6e-64, v5p-128, tpu7x:4x4x4, cpu-4, ... Repeat it to compare slices."),
    ],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Global examples per step; by default what TABLES says.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan of one --slice as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML page; several slices are compared in it.")
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Training Parquet to measure ids per example, unique shares and skew from."),
    ] = None,
    price_per_chip_hour: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Price of one chip for one hour; adds the cost per million examples. Repeat it, one a --slice."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop searching after so many seconds; by default search to the end.")
    ] = None,
    embedding_dim: Annotated[
        int | None, typer.Option(min=1, help="Columns of the tables when TABLES is a Parquet data set.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe or list, or an assumption."),
    ] = None,
    max_tables: Annotated[
        int, typer.Option(min=0, help="Tables to list one by one; --json and --report have all of them.")
    ] = DEFAULT_TABLE_LINES,
    as_json: JsonOption = False,
) -> None:
    """Shard embedding tables over a TPU slice, or say why they do not fit and what would.

    Needs no TPU. Times are estimates of a cost model (docs/planner.md). Exits with 1 if the tables fit on none of the
    slices.
    """
    from tpurec.errors import ConfigError
    from tpurec.sharding.planner import check_batch
    from tpurec.sharding.planner import plan as make_plan
    from tpurec.sharding.report import write_report
    from tpurec.sharding.sources import read_source
    from tpurec.topology.slices import SliceTopology

    reporter = Reporter(as_json)
    if len(slice_) > 1 and out:
        raise typer.BadParameter("--out goes with one --slice")
    prices = _prices(price_per_chip_hour or [], len(slice_))
    slices = [SliceTopology.parse(name) for name in slice_]
    twice = [one.name for number, one in enumerate(slices) if one in slices[:number]]
    if twice:
        raise typer.BadParameter(f"--slice {twice[0]} is given twice")
    for path in (out, report):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist.", "Make the folder first.")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: is a folder, a file is to be written there.", "Add the file's name.")
        if path is not None and path.exists() and path.resolve() == Path(tables).resolve():
            raise ConfigError(f"{path}: is TABLES itself, and would be overwritten.", "Write to another file.")
    if out and report and out.resolve() == report.resolve():
        raise typer.BadParameter("--out and --report are one file")
    source = read_source(tables, set_ or (), embedding_dim, str(measure) if measure else None)
    batch = batch_size or source.batch_size
    if batch is None:
        raise typer.BadParameter("TABLES names no batch size; add --batch-size")
    for topology in slices:  # before the first search, not after it
        check_batch(batch, topology)
    found: list[Plan | Infeasible] = []
    with reporter.progress("plan", total=len(slices), unit="slices") as advance:
        for topology in slices:
            found.append(
                make_plan(source.tables, topology, batch, source.assumptions, seconds, lambda words: advance(0, words))
            )
            advance(1)
    answers = [_priced(answer.summary(), price) for answer, price in zip(found, prices, strict=True)]
    if out and found[0].fits:
        found[0].save(out)
    if report:
        write_report(report, found, answers, source.measured)
    result = answers[0] if len(answers) == 1 else {"slices": answers}
    result |= {"plan": str(out)} if out and found[0].fits else {}
    result |= {"report": str(report)} if report else {}
    result |= {"measured": source.measured.summary()} if source.measured else {}
    _print(reporter, result, slices, max_tables)
    if not any(answer["fits"] for answer in answers):
        if not as_json:
            helped = any(problem["remedies"] for answer in answers for problem in answer["problems"])
            remedy = (
                "Choose one of the ways out above." if helped else "No way out was found: use another slice or batch."
            )
            reporter.log(f"error: the tables do not fit. {remedy}")
        raise typer.Exit(1)


def _prices(given: list[float], num_slices: int) -> list[float | None]:
    if any(not isfinite(price) for price in given):
        raise typer.BadParameter("--price-per-chip-hour must be a number")
    if len(given) not in (0, 1, num_slices):
        raise typer.BadParameter(f"--price-per-chip-hour is given {len(given)} times: give one, or one a --slice")
    return [None] * num_slices if not given else given * num_slices if len(given) == 1 else list(given)


def _priced(summary: dict[str, Any], price: float | None) -> dict[str, Any]:
    if price is not None and summary["fits"]:
        seconds = 1e6 / summary["samples_per_second"]
        summary["cost_per_million_examples"] = price * summary["num_chips"] * seconds / 3600
    return summary


def _print(reporter: Reporter, result: dict[str, Any], slices: list[Any], max_tables: int) -> None:
    from tpurec.sharding.comparison import print_side_by_side
    from tpurec.sharding.summary import print_measured, print_plan, size

    def several(out: Console) -> None:
        if "measured" in result:
            print_measured(out, result["measured"], max_tables)
        print_side_by_side(out, result["slices"])

    one = len(slices) == 1
    reporter.result(result, lambda out: print_plan(out, result, slices[0].dims, max_tables) if one else several(out))
    for key in ("plan", "report"):
        if key in result:
            reporter.log(f"{key} written to {result[key]} ({size(Path(result[key]).stat().st_size)})")


def plan_diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Plan file as written by `tpurec plan --out`.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan of the same tables, also of another slice.")],
    max_tables: Annotated[
        int, typer.Option(min=0, help="Changed tables to list, those that move most; --json has all of them.")
    ] = DEFAULT_TABLE_LINES,
    as_json: JsonOption = False,
) -> None:
    """Say what changes between two plans, and how many bytes going from A to B would move.

    Rank r of A counts as rank r of B, also if the slices differ.
    """
    from tpurec.sharding.comparison import print_diff
    from tpurec.sharding.plan import Plan
    from tpurec.sharding.replan import diff

    found = diff(Plan.load(before), Plan.load(after)).summary()
    Reporter(as_json).result(found, lambda out: print_diff(out, found, max_tables))
