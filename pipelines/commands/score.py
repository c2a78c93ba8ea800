"""`tpurec score`: a bundle's scores for every row of files, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tpurec.reporting import JsonOption, Reporter

if TYPE_CHECKING:
    from rich.console import Console


def score(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by `tpurec export`.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Parquet, TSV or CSV files (also .gz, .zst), folders or glob patterns; then the Parquet to write.",
        ),
    ],
    engine: Annotated[
        Literal["auto", "local", "ray"],
        typer.Option(help="This process, or Ray Data on every core; auto takes Ray for more than 4 GiB."),
    ] = "auto",
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="COL,...", help="Columns to carry beside the score; by default the schema's keys, or a row number."
        ),
    ] = None,
    on_bad_row: Annotated[
        Literal["fail", "null"],
        typer.Option(help="What a row that the schema refuses does: end the job, or get a null score and be counted."),
    ] = "fail",
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Text files without a header lack the label that the schema lists.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Score rows offline: one Parquet file with a score for every input row, in input order.

    The columns of all inputs are checked before any row is read; OUT appears when it is complete.
    """
    if len(paths) < 2:
        raise typer.BadParameter("give at least one input and the output", param_hint="IN... OUT")
    from pipelines.scoring import score_files

    reporter = Reporter(as_json)
    chosen = None if keys is None else [key.strip() for key in keys.split(",") if key.strip()]
    result = score_files(
        bundle,
        paths[:-1],
        Path(paths[-1]),
        engine=engine,
        keys=chosen,
        rule=on_bad_row,
        unlabelled=unlabelled,
        overwrite=overwrite,
        reporter=reporter,
    )
    for warning in result["warnings"]:
        reporter.warn(warning)
    reporter.result(result, lambda console: _summary(console, result))


def _summary(console: Console, result: dict[str, Any]) -> None:
    console.print(f"scores  {result['path']}", markup=False, soft_wrap=True)
    bad = f", {result['bad_rows']:,} of them refused" if result["bad_rows"] else ""
    console.print(f"rows    {result['rows']:,}{bad}", markup=False)
    console.print(f"rate    {result['rows_per_second']:,.0f} rows/s ({result['engine']})", markup=False)
    console.print(f"model   {result['model']}", markup=False)
