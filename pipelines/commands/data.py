"""`tpurec data`: make, convert and describe click logs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from tpurec.reporting import JsonOption, Reporter

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make, convert and describe click logs."""


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make, with OUT/train and OUT/test.")],
    rows: Annotated[int, typer.Option(min=10, help="Rows in all, test rows included.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same rows.")] = 0,
    log_format: Annotated[Literal["parquet", "tsv"], typer.Option("--format", help="File format.")] = "parquet",
    multi_hot: Annotated[bool, typer.Option("--multi-hot", help="C10, C15, C18 and C25 hold lists of ids.")] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="The lists carry a weight per id, in C10_weights and so on.")
    ] = False,
    test_share: Annotated[float, typer.Option(help="Share of the rows that goes to OUT/test.")] = 0.1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an OUT that this command made.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; by default one per core, at most 4.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make synthetic click logs in Criteo's columns from a planted model, and print the best reachable AUC.

    OUT holds train/, test/, schema.toml and manifest.json. The best reachable AUC is that of the planted click
    probabilities on the labels of OUT/test; no model can be expected to beat it.
    """
    if not 0 < test_share < 1:
        raise typer.BadParameter(f"{test_share} is not between 0 and 1", param_hint="--test-share")
    from pipelines.data.synth import SynthConfig, synthesize

    reporter = Reporter(as_json)
    config = SynthConfig(rows, seed, log_format, multi_hot, weights, test_share)
    with reporter.progress("synth", rows) as advance:
        result = synthesize(
            out, config, overwrite=overwrite, workers=workers or min(os.cpu_count() or 1, 4), progress=advance
        )
    if result.best_auc != result.best_auc:
        reporter.warn(f"the {result.test_rows} test rows have one label only: AUC is undefined; ask for more rows.")
    reporter.result(
        {
            "rows": result.rows,
            "best_auc": result.best_auc,
            "path": result.path,
            "train_rows": result.train_rows,
            "test_rows": result.test_rows,
            "click_rate": result.click_rate,
        }
    )


@app.command()
def convert(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="TSV, CSV (also .gz, .zst) or Parquet files, folders or glob patterns; then the folder to make.",
        ),
    ],
    schema: Annotated[str, typer.Option(help="Schema TOML, or the name of a shipped schema, such as criteo.")],
    max_bad_rows: Annotated[
        int | None,
        typer.Option(min=0, help="Fail beyond this many bad rows; by default beyond one in a thousand and ten."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an OUT that was made with another schema or of other inputs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert Criteo TSV, CSV or Parquet to training Parquet, with the schema in it.

    A bad row is left out and counted with its reason; beyond --max-bad-rows the command fails and leaves nothing. In
    files without header whose schema says so (criteo), a row that lost trailing blanks is padded, and counted. OUT
    appears when it is complete. Run again, the command goes on where it was interrupted, and converts what has changed.
    """
    if len(paths) < 2:
        raise typer.BadParameter("give at least one input and the folder to make", param_hint="IN... OUT")
    from pipelines.data.convert import convert_files
    from tpurec.features import Schema

    reporter = Reporter(as_json)
    with reporter.progress("convert", None) as advance:
        result = convert_files(
            paths[:-1],
            paths[-1],
            Schema.load(schema),
            max_bad_rows=max_bad_rows,
            workers=workers or os.cpu_count() or 1,
            overwrite=overwrite,
            progress=advance,
        )
    counts = result.counts
    for row in counts.examples:
        reporter.log(f"rejected: {row}")
    warning = counts.label_warning()
    if warning:
        reporter.warn(warning)
    reporter.result(
        {
            "rows_read": counts.read,
            "rows_kept": counts.kept,
            "rows_rejected": counts.rejected,
            "rows_padded": counts.padded,
            "rows_without_label": counts.missing_labels,
            "path": result.path,
            "files": len(result.files),
            "units": result.units,
            "units_done_before": result.units_done_before,
            "warnings": [warning] if warning else [],
        }
    )


@app.command()
def describe(
    paths: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Parquet, TSV or CSV files, folders or glob patterns.")
    ],
    schema: Annotated[
        str | None, typer.Option(help="Schema TOML or name; by default the one that travels in the Parquet.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples of the batches in which distinct ids are counted.")
    ] = 2048,
    as_json: JsonOption = False,
) -> None:
    """Say what is in a data set: rows, blanks, label rate, frequent ids, skew, how often ids repeat in a batch.

    One pass in bounded memory. `distinct` is exact up to 4,096 ids, then an estimate (1.6% standard error, marked ~).
    """
    from pipelines.data.describe import describe as describe_files
    from pipelines.data.describe_report import print_description
    from tpurec.features import Schema

    reporter = Reporter(as_json)
    with reporter.progress("describe", None) as advance:
        found = describe_files(
            paths, None if schema is None else Schema.load(schema), batch_size=batch_size, progress=advance
        )
    for row in found.counts.examples:
        reporter.log(f"left out: {row}")
    warning = found.counts.label_warning()
    if warning:
        reporter.warn(warning)
    reporter.result(
        {**found.to_plain(), "batch_size": batch_size, "warnings": [warning] if warning else []},
        lambda console: print_description(found, console),
    )
