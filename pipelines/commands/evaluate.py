"""`tpurec evaluate`: metrics of a RUN's best checkpoint on labelled data, and optionally a score for every row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpurec.reporting import JsonOption, Reporter


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN folder of `tpurec train`.")],
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Parquet files, folders or glob patterns.")],
    scores: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Also write a Parquet file: row number, key columns, label and score."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a RUN's best checkpoint on labelled data; every row counts exactly once, in the order of the data."""
    from pipelines.evaluate_run import evaluate_run
    from pipelines.run import load_run

    reporter = Reporter(as_json)
    loaded = load_run(run)
    result = evaluate_run(loaded, data, scores, reporter)
    for warning in result["warnings"]:
        reporter.warn(warning)
    reporter.result(result, lambda console: _summary(console, result))


def _summary(console: Any, result: dict[str, Any]) -> None:
    for key in ("auc", "normalized_entropy", "log_loss", "calibration"):
        value = result[key]
        console.print(f"{key:<20}{'undefined' if value is None else f'{value:.6f}'}", markup=False)
    console.print(f"{'eval_rows':<20}{result['eval_rows']:,}", markup=False)
    if result["scores"]:
        console.print(f"{'scores':<20}{result['scores']}", markup=False, soft_wrap=True)
