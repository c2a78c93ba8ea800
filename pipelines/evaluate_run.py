"""Evaluate a RUN on a data set: metrics over every row once, and the scores beside the key columns, in input order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.evaluation import evaluate
from pipelines.metrics import probabilities
from pipelines.order import Manifest, natural_pass
from pipelines.reading import Reader, SourceBatch, find_files, in_order, pack_window, scan
from pipelines.run import LoadedRun
from pipelines.training import label_warnings, torch_threads
from tpurec import atomic
from tpurec.errors import ConfigError, DataError
from tpurec.features import Columns, Counts, Ladder
from tpurec.features.transform import Transformer
from tpurec.reporting import Reporter

ROW, LABEL, SCORE = "row", "label", "score"
PARQUET_MAGIC = b"PAR1"


def evaluate_run(loaded: LoadedRun, places: list[str], scores: Path | None, reporter: Reporter) -> dict[str, Any]:
    """Evaluate.

    Args:
        loaded: the run.
        places: Parquet files, folders or glob patterns, in the order in which their rows are numbered.
        scores: Parquet file to write: `row` int64 (from 0, over all files), the schema's key columns, `label` float32
            (null where missing) and `score` float32; None to write none. It appears when it is complete.
        reporter: where progress goes.

    Returns:
        The metrics, `eval_rows`, `checkpoint`, `scores`, `ids` (per table what became of its ids) and `warnings`.

    Raises:
        DataError: data that do not fit the schema.
        ConfigError: a key column whose name the scores need; or `scores` is a folder or one of the inputs.
    """
    recipe = loaded.recipe
    keys = scores is not None and bool(loaded.schema.keys)
    if keys:
        _check_key_names(loaded.schema.keys)
    transformer = Transformer(loaded.schema)
    manifest = scan(find_files(places, "DATA"), transformer, keys=keys)
    if manifest.num_rows == 0:
        raise DataError(f"DATA: {', '.join(places)}: no rows.", "Give data with rows.")
    if scores is not None:
        _check_target(scores, manifest)
    reader = Reader(manifest, loaded.schema)
    one_pass = natural_pass(manifest, recipe.train.eval_batch_size)
    ladder = Ladder.for_batch(one_pass.batch_size)
    counts = Counts()

    def read(index: int) -> tuple[Columns, list[SourceBatch]]:
        window = one_pass.window(index)
        columns = reader.columns(window, keys=keys)
        return columns, list(pack_window(columns, window, ladder))

    def batches(writer: _ScoreWriter | None, advance: Any) -> Iterator[SourceBatch]:
        nonlocal counts
        for columns, packed in in_order(read, range(one_pass.num_windows), recipe.data.reader_workers):
            counts += columns.counts
            if writer is not None:
                writer.expect(columns)
            for item in packed:
                yield item
                advance(item.packed.num_rows)

    with (
        torch_threads(recipe.device.num_threads(recipe.data.reader_workers)),
        reporter.progress("evaluate", manifest.num_rows) as advance,
        _score_writer(scores) as writer,
    ):
        metrics = evaluate(loaded.model, batches(writer, advance), None if writer is None else writer.add)
    handled = {
        table: reasons for table, reasons in counts.tables.items() if any(n for r, n in reasons.items() if r != "ids")
    }
    warnings = label_warnings(metrics, "the data")
    for table, reasons in handled.items():
        parts = ", ".join(f"{n} {reason}" for reason, n in reasons.items() if reason != "ids" and n)
        warnings.append(f"table {table!r}: of {reasons['ids']} ids, handled by the id policy: {parts}.")
    return {
        **metrics,
        "checkpoint": str(loaded.checkpoint.folder),
        "scores": None if scores is None else str(scores),
        "ids": counts.tables,
        "warnings": warnings,
    }


class _ScoreWriter:
    """Joins scores with the keys and labels of the window they belong to, and writes a row group a window."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parquet: pq.ParquetWriter | None = None
        self._columns: Columns | None = None
        self._scores: list[np.ndarray] = []
        self._rows = 0

    def expect(self, columns: Columns) -> None:
        """Start a window; its scores come next."""
        self.flush()
        self._columns = columns

    def add(self, logits: np.ndarray) -> None:
        """Take the logits of a batch."""
        self._scores.append(probabilities(logits))

    def flush(self) -> None:
        """Write the window."""
        if self._columns is None:
            return
        scores, labels = np.concatenate(self._scores), self._columns.labels
        rows = pa.array(np.arange(self._rows, self._rows + len(scores)))
        fields: dict[str, Any] = {ROW: rows, **self._columns.keys}
        fields[LABEL] = pa.array(labels, mask=np.isnan(labels))
        fields[SCORE] = pa.array(scores)
        table = pa.table(fields)
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._path, table.schema)
        self._parquet.write_table(table)
        self._rows += len(scores)
        self._columns, self._scores = None, []

    def close(self) -> None:
        """Close the file."""
        if self._parquet is not None:
            self._parquet.close()


@contextmanager
def _score_writer(path: Path | None) -> Iterator[_ScoreWriter | None]:
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.new_file(path) as unfinished, closing(_ScoreWriter(unfinished)) as writer:
        yield writer
        writer.flush()


def _check_target(scores: Path, manifest: Manifest) -> None:
    if scores.is_dir():
        raise ConfigError(f"--scores {scores}: is a folder; one file is written.", "Give a file, such as OUT.parquet.")
    if scores.resolve() in {Path(file.path).resolve() for file in manifest.files}:
        raise ConfigError(f"--scores {scores}: is one of the input files.", "Give another file.")
    if scores.exists():  # earlier scores are replaced; a file of the RUN, or of anyone else, is not
        with scores.open("rb") as stream:
            if stream.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
                raise ConfigError(f"--scores {scores}: exists, and is no Parquet file.", "Give another file.")


def _check_key_names(keys: tuple[str, ...]) -> None:
    taken = [key for key in keys if key in (ROW, LABEL, SCORE)]
    if taken:
        raise ConfigError(
            f"schema: the key column {taken[0]!r} has the name of a column of the scores.", "Rename the key column."
        )
