"""Offline scoring: raw rows in, a score for each out, beside the key columns, in one Parquet file and in input order.

The inputs are cut into parts; a part is read in pieces of bounded size, each transformed and scored by the bundle as
everywhere else. `--engine local` does that here, `--engine ray` in tasks of Ray Data; one writer takes the scored
pieces in order, so both write the same file.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data.raw_rows import RawRows
from pipelines.data.row_counts import RejectedRow
from pipelines.score_inputs import Inputs, Part, open_inputs, read_part
from tpurec import atomic
from tpurec.bundle import Bundle
from tpurec.errors import ConfigError, DataError
from tpurec.features import Columns, Counts, to_storage
from tpurec.reporting import Reporter

ROW, SCORE = "row", "score"
MODEL_KEY = b"tpurec.model"
# Beyond this, starting Ray (seconds) is small beside the work, and its workers use every core for reading as well.
RAY_BYTES = 4 << 30

BadRowRule = Literal["fail", "null"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class ScoredPiece:
    """Scores of one piece.

    Args:
        table: key columns and `score` float32, null for rows that were refused; in input order.
        counts: what became of the ids.
        bad_rows: rows refused.
        first_bad: why the first of them was, with file and row; empty if there is none.
    """

    table: pa.Table
    counts: Counts
    bad_rows: int
    first_bad: str


def score_files(
    bundle: Path,
    places: Sequence[str],
    out: Path,
    *,
    engine: Literal["auto", "local", "ray"] = "auto",
    keys: Sequence[str] | None = None,
    rule: BadRowRule = "fail",
    unlabelled: bool = False,
    overwrite: bool = False,
    reporter: Reporter,
) -> dict[str, Any]:
    """Score files.

    Args:
        bundle: the bundle's folder; it scores its own examples first.
        places: files, folders or glob patterns.
        out: Parquet file to write.
        engine: who does it; `auto`: Ray Data for more than 4 GiB, if Ray is installed.
        keys: columns to carry beside the score; None for the schema's.
        rule: what happens to a row that the schema refuses.
        unlabelled: text files without a header lack the label column.
        overwrite: replace `out` if it exists.
        reporter: where progress goes.

    Returns:
        `rows`, `rows_per_second`, `path`, `bad_rows`, `ids`, `engine`, `model` and `warnings`.

    Raises:
        TpurecError: `out` exists, the bundle does not work, or the inputs do not fit the schema: all before any row is
            scored. A single row that the schema refuses is met later.
    """
    _check_out(out, overwrite)
    if bundle.is_dir() and bundle.resolve() in out.resolve().parents:
        raise ConfigError(f"{out}: is inside the bundle.", "Write the scores elsewhere.")
    loaded = Bundle.load(bundle)
    chosen = list(dict.fromkeys(loaded.schema.keys if keys is None else keys))
    if SCORE in chosen:
        raise ConfigError(f"key column {SCORE!r} has the name of the scores.", "Choose other columns with --keys.")
    inputs = open_inputs(places, loaded.schema, chosen, unlabelled)
    if any(out.exists() and out.samefile(part.file.path) for part in inputs.parts):
        raise ConfigError(f"{out}: is one of the inputs.", "Write the scores elsewhere.")
    loaded.check_examples()
    if engine == "auto":
        engine = "ray" if inputs.num_bytes > RAY_BYTES and find_spec("ray") else "local"
    if engine == "ray":
        from pipelines.scoring_ray import score_ray

        pieces = score_ray(str(bundle.absolute()), inputs, rule)
    else:
        pieces = score_local(loaded, inputs, rule)
    written = write_scores(out, pieces, inputs, loaded.version, reporter)
    return {**written, "engine": engine, "model": loaded.version}


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; the scores are one Parquet file.", f"Write {out / 'scores.parquet'}.")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: exists.", "Give --overwrite to replace it, or another path.")


@dataclass(frozen=True)
class _Prepared:
    """A piece that is ready for the model; `refused` has number, reason and message of rows that are not."""

    part: Part
    raw: RawRows
    columns: Columns
    refused: dict[int, tuple[str, str]]


def _prepare(bundle: Bundle, inputs: Inputs, part: Part) -> Iterator[_Prepared]:
    source = str(part.file)
    for raw in read_part(inputs, part):
        table, problems = raw.table, []
        if raw.is_text:
            table, problems = to_storage(table, inputs.schema, source, labels=False, keys=False)
        columns, more = bundle.transformer.collect(table, labels=False, source=source)
        refused = {row.number: (row.reason, row.message) for row in raw.unreadable}
        for problem in (*problems, *more):
            for position, row in enumerate(problem.rows.tolist()):
                message = f"column {problem.column!r}: {problem.message(position)}"
                refused.setdefault(int(raw.numbers[row]), (problem.reason, message))
        yield _Prepared(part, raw, columns, refused)


def _score(bundle: Bundle, inputs: Inputs, piece: _Prepared, rule: BadRowRule) -> ScoredPiece:
    raw, refused, first_bad = piece.raw, piece.refused, ""
    if refused:
        number = min(refused)
        line = number + piece.part.lines_before()
        first_bad = f"{RejectedRow(str(piece.part.file), line, raw.is_text, *refused[number])}."
        if rule == "fail":
            remedy = "Correct it, or give --on-bad-row null: such rows then get a null score and are counted."
            raise DataError(first_bad, remedy)
    scores = pa.array(bundle.predict(piece.columns), pa.float32(), mask=np.isin(raw.numbers, list(refused)))
    scored = pa.table({**{key: raw.table.column(key) for key in inputs.key_types}, SCORE: scores})
    if raw.unreadable:
        scored = _with_unreadable(scored, raw)
    return ScoredPiece(scored, piece.columns.counts, len(refused), first_bad)


def _with_unreadable(scored: pa.Table, raw: RawRows) -> pa.Table:
    """Put rows of nulls where rows could not be read."""
    lost = [row.number for row in raw.unreadable]
    nulls = pa.table([pa.nulls(len(lost), type_) for type_ in scored.schema.types], schema=scored.schema)
    order = np.argsort(np.concatenate([raw.numbers, lost]), kind="stable")
    return pa.concat_tables([scored, nulls]).take(pa.array(order))


def score_part(bundle: Bundle, inputs: Inputs, part: Part, rule: BadRowRule) -> Iterator[ScoredPiece]:
    """Score a part.

    Args:
        bundle: what to score with.
        inputs: what the part is a part of.
        part: what to read.
        rule: what happens to a row that the schema refuses: `fail`, or `null`, a score that is null.

    Yields:
        Pieces with as many rows as were read, in order, those that could not be read included.

    Raises:
        DataError: a row is refused under `fail`; names file, row and column.
    """
    for piece in _prepare(bundle, inputs, part):
        yield _score(bundle, inputs, piece, rule)


def score_local(bundle: Bundle, inputs: Inputs, rule: BadRowRule) -> Iterator[ScoredPiece]:
    """Score all parts in this process: a thread reads and transforms ahead while the model scores.

    Args:
        bundle: what to score with.
        inputs: what to score.
        rule: as in `score_part`.

    Yields:
        The scored pieces, in order.
    """
    prepared = (piece for part in inputs.parts for piece in _prepare(bundle, inputs, part))
    for piece in _ahead(prepared, 2):
        yield _score(bundle, inputs, piece, rule)


def write_scores(
    path: Path, pieces: Iterator[ScoredPiece], inputs: Inputs, model: str, reporter: Reporter
) -> dict[str, Any]:
    """Write scored pieces into one Parquet file, which appears when it is complete.

    Args:
        path: the file.
        pieces: scored, in order.
        inputs: names and types of the key columns; without any, a column `row` (int64, from 0) is written.
        model: version of the model, for the file's metadata.
        reporter: where progress goes.

    Returns:
        `rows`, `rows_per_second`, `path`, `bad_rows`, `ids` (per table what became of its ids) and `warnings`.
    """
    fields = [pa.field(name, type_) for name, type_ in inputs.key_types.items()] or [pa.field(ROW, pa.int64())]
    schema = pa.schema([*fields, pa.field(SCORE, pa.float32())], metadata={MODEL_KEY: model.encode()})
    rows = bad_rows = 0
    counts, first_bad = Counts(), ""
    started = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic.new_file(path) as unfinished,
        pq.ParquetWriter(unfinished, schema) as writer,
        reporter.progress("score", inputs.num_rows) as advance,
        closing(pieces),
    ):
        for piece in pieces:
            table = piece.table
            if not inputs.key_types:
                table = table.add_column(0, ROW, pa.array(np.arange(rows, rows + len(table))))
            writer.write_table(table.cast(schema.remove_metadata()))
            rows += len(table)
            bad_rows += piece.bad_rows
            counts += piece.counts
            first_bad = first_bad or piece.first_bad
            advance(len(table))
    return {
        "rows": rows,
        "rows_per_second": round(rows / max(time.monotonic() - started, 1e-9), 1),
        "path": str(path),
        "bad_rows": bad_rows,
        "ids": counts.tables,
        "warnings": _warnings(rows, bad_rows, first_bad, counts),
    }


def _warnings(rows: int, bad_rows: int, first_bad: str, counts: Counts) -> list[str]:
    warnings = [f"{bad_rows} of {rows} rows were refused and have a null score; the first: {first_bad}"] * bool(
        bad_rows
    )
    for table, reasons in counts.tables.items():
        handled = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if reason != "ids" and number)
        if handled:
            warnings.append(f"table {table!r}: of {reasons['ids']} ids, handled by the id policy: {handled}.")
    return warnings


def _ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Draw from an iterator in a thread, at most `count` items ahead of the consumer."""
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(count)
    stop = threading.Event()

    def put(entry: tuple[bool, Any]) -> bool:
        while not stop.is_set():
            try:
                waiting.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def draw() -> None:
        try:
            for item in items:
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=draw, name="reader", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = waiting.get()
            if not is_item:
                if value is not None:
                    raise value
                return
            yield value
    finally:  # also when the consumer stops early or is interrupted
        stop.set()
        thread.join()
