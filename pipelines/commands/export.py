"""`tpurec export`: a RUN's checkpoint becomes a bundle to score and serve with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from tpurec.reporting import JsonOption, Reporter


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN folder of `tpurec train`.")],
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder to make; a bundle there is replaced.")],
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which checkpoint.")] = "best",
    examples: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Parquet to take the example rows from; by default the recipe's test data."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a RUN's checkpoint as a bundle: weights, schema, recipe, metrics, and example rows with their scores.

    The bundle is loaded and scores its examples before it appears at BUNDLE.
    """
    if not re.fullmatch(r"best|last|\d+", checkpoint):
        raise typer.BadParameter("give best, last, or a step number", param_hint="--checkpoint")
    from pipelines.export import export_run

    reporter = Reporter(as_json)
    manifest = export_run(run, bundle, checkpoint, examples)
    result: dict[str, Any] = {
        "bundle": str(bundle),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "model": manifest.version,
        "step": manifest.source["step"],
        "metrics": manifest.metrics,
        "counts": manifest.counts,
    }
    reporter.result(result, lambda console: _summary(console, result))


def _summary(console: Any, result: dict[str, Any]) -> None:
    counts = result["counts"]
    console.print(f"bundle  {result['bundle']}", markup=False, soft_wrap=True)
    console.print(f"model   {result['model']} (step {result['step']:,})", markup=False)
    console.print(
        f"bytes   {result['bytes']:,} ({counts['tables']} tables with {counts['table_rows']:,} rows, "
        f"{counts['dense_parameters']:,} other weights)",
        markup=False,
    )
