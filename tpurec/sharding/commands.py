"""`tpurec plan` and `tpurec plan-diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpurec.reporting import JsonOption, Reporter

DEFAULT_TABLE_LINES = 40


def plan(
    tables: Annotated[
        str,
        typer.Argument(
            metavar="TABLES",
            help="Table list (.toml, .json), recipe, RUN folder, Parquet data set, or a TorchRec model module:factory.",
        ),
    ],
    slice_: Annotated[
        list[str],
        typer.Option("--slice", help="Slice: v6e-64, v5p-128, tpu7x:4x4x4, cpu-4, ... Repeat it to compare slices."),
    ],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Global examples per step; by default what TABLES says.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Training Parquet to measure ids per example and unique shares from."),
    ] = None,
    price_per_chip_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of one chip for one hour; adds the cost per million examples.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop searching after so many seconds; by default search to the end.")
    ] = None,
    embedding_dim: Annotated[
        int | None, typer.Option(min=1, help="Columns of the tables when TABLES is a Parquet data set.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe or list."),
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
    from tpurec.sharding.planner import plan as make_plan
    from tpurec.sharding.report import write_report
    from tpurec.sharding.sources import read_source
    from tpurec.topology.slices import SliceTopology

    reporter = Reporter(as_json)
    if len(slice_) > 1 and (out or report):
        raise typer.BadParameter("--out and --report go with one --slice")
    slices = [SliceTopology.parse(name) for name in slice_]
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
    answers: list[dict[str, Any]] = []
    with reporter.progress("plan", total=len(slices), unit="slices") as advance:
        for topology in slices:
            found = make_plan(
                source.tables, topology, batch, source.assumptions, seconds, lambda words: advance(0, words)
            )
            answers.append(_priced(found.summary(), price_per_chip_hour))
            advance(1)
    if found.fits and out:
        found.save(out)
        answers[0]["plan"] = str(out)
    if report:
        write_report(report, found, answers[0])
        answers[0]["report"] = str(report)
    _print(reporter, answers, slices, max_tables)
    if not any(answer["fits"] for answer in answers):
        if not as_json:
            reporter.log("error: the tables do not fit. Choose one of the ways out above.")
        raise typer.Exit(1)


def _priced(summary: dict[str, Any], price: float | None) -> dict[str, Any]:
    if price is not None and summary["fits"]:
        seconds = 1e6 / summary["samples_per_second"]
        summary["cost_per_million_examples"] = price * summary["num_chips"] * seconds / 3600
    return summary


def _print(reporter: Reporter, answers: list[dict[str, Any]], slices: list[Any], max_tables: int) -> None:
    from tpurec.sharding.summary import print_plan, print_side_by_side, size

    if len(answers) == 1:
        reporter.result(answers[0], lambda out: print_plan(out, answers[0], slices[0].dims, max_tables))
        for key in ("plan", "report"):
            if key in answers[0]:
                reporter.log(f"{key} written to {answers[0][key]} ({size(Path(answers[0][key]).stat().st_size)})")
    else:
        reporter.result({"slices": answers}, lambda out: print_side_by_side(out, answers))


def plan_diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Plan file as written by `tpurec plan --out`.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan of the same tables, also of another slice.")],
    as_json: JsonOption = False,
) -> None:
    """Say what changes between two plans, and how many bytes going from A to B would move."""
    from tpurec.sharding.plan import Plan
    from tpurec.sharding.replan import diff
    from tpurec.sharding.summary import print_diff

    found = diff(Plan.load(before), Plan.load(after)).summary()
    Reporter(as_json).result(found, lambda out: print_diff(out, found))
