"""Make a scoring bundle from a RUN: a checkpoint's weights, schema and recipe, and example rows with their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.evaluation import evaluate
from pipelines.metrics import probabilities
from pipelines.reading import SourceBatch, find_files
from pipelines.run import LoadedRun, Run, load_run
from pipelines.training import METRICS
from pipelines.training_state import load_weights
from tpurec.bundle import Manifest, write_bundle
from tpurec.errors import DataError, TpurecError
from tpurec.features import Ladder, pack
from tpurec.features.transform import Transformer
from tpurec.sharding.checkpoint import list_checkpoints, read_manifest


def export_run(path: Path, bundle: Path, checkpoint: str = "best", examples: str | None = None) -> Manifest:
    """Export a RUN.

    Args:
        path: the RUN folder; it need not be finished, but must have a complete checkpoint.
        bundle: the folder to make; a bundle that is there is replaced.
        checkpoint: `best`, `last`, or a step.
        examples: Parquet file, folder or glob pattern to take the example rows from; by default the recipe's test data,
            else its training data.

    Returns:
        The bundle's manifest.

    Raises:
        TpurecError: not a RUN, no such checkpoint, no example rows, or something else is at `bundle`.
    """
    loaded = load_run(path)
    best = loaded.checkpoint.folder
    chosen = _choose(loaded.run, checkpoint, best)
    if chosen != best:
        load_weights(loaded.model, chosen)
    rows = _example_rows(loaded, examples)
    stored = read_manifest(chosen)
    metrics: dict[str, Any] = {"checkpoint_score": stored.score, "monitor": loaded.recipe.train.monitor}
    if loaded.result is not None and chosen == best:
        metrics |= {key: loaded.result[key] for key in (*METRICS, "evaluated_on")}
    return write_bundle(
        bundle,
        model=loaded.model,
        schema=loaded.schema,
        recipe_text=loaded.run.recipe_file.read_text(encoding="utf-8"),
        examples=rows,
        expected_scores=_evaluation_scores(loaded, rows),
        metrics=metrics,
        source={
            "run": path.name,
            "step": stored.step,
            "checkpoint": "best" if chosen == best else chosen.name,
            "position": stored.state["position"],
        },
    )


def _choose(run: Run, checkpoint: str, best: Path) -> Path:
    found = list_checkpoints(run.checkpoints)
    if checkpoint == "best":
        return best
    if checkpoint == "last":
        return found[-1]
    for folder in found:
        if folder.name == f"step-{int(checkpoint):08d}":
            return folder
    steps = ", ".join(str(int(folder.name.removeprefix("step-"))) for folder in found)
    raise TpurecError(f"{run.path}: no checkpoint of step {checkpoint}.", f"There are: {steps}.")


def _example_rows(loaded: LoadedRun, examples: str | None) -> pa.Table:
    """The first rows of the first files, raw; without label and keys, which scoring does not read."""
    data, wanted = loaded.recipe.data, loaded.recipe.export.examples
    key = "--examples" if examples else "data.test" if data.test else "data.train"
    try:
        files = find_files(examples or data.test or data.train, key)
    except DataError as error:
        raise DataError(error.problem, "Example rows are needed: give --examples PATH to take them from.") from None
    transformer = Transformer(loaded.schema)
    pieces: list[pa.Table] = []
    for path, _ in files:
        missing = wanted - sum(map(len, pieces))
        if missing <= 0:
            break
        try:
            with pq.ParquetFile(path) as file:
                transformer.check(file.schema_arrow, str(path), labels=False)
                columns = loaded.schema.columns(labels=False)
                for batch in file.iter_batches(batch_size=missing, columns=columns, use_threads=False):
                    pieces.append(pa.Table.from_batches([batch]))
                    break
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}.") from None
    rows = pa.concat_tables(pieces, promote_options="permissive") if pieces else None
    if not rows:
        raise DataError(f"{key}: no rows to take examples from.", "Give --examples PATH.")
    return rows


def _evaluation_scores(loaded: LoadedRun, rows: pa.Table) -> np.ndarray:
    """What training's evaluation, not the bundle, says about the rows."""
    columns = Transformer(loaded.schema)(rows, labels=False, source="example rows")
    size = loaded.recipe.train.eval_batch_size
    ladder = Ladder.for_batch(size)
    batches = (
        SourceBatch(pack(columns.slice(start, start + size), size, ladder)) for start in range(0, len(rows), size)
    )
    logits: list[np.ndarray] = []
    evaluate(loaded.model, batches, logits.append)
    return probabilities(np.concatenate(logits)).astype(np.float32)
