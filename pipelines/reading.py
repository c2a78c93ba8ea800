"""Parquet to packed batches: find and check the files, read windows of the order, transform, shuffle, pack.

No torch here: this is what reader threads, and the workers of Ray Data, run.
"""

from __future__ import annotations

import glob
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.order import Manifest, ManifestFile, Pass, Segment, Window
from pipelines.shares import WHOLE, Share
from tpurec.errors import DataError
from tpurec.features import Columns, Counts, Ladder, PackedBatch, Schema, pack
from tpurec.features.transform import Transformer

RECENT_ROW_GROUPS = 2

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class DataConfig:
    """The recipe's section [data]: which rows to train and test on, and how they are read.

    Relative paths are relative to the current folder.

    Args:
        train: Parquet file, folder or glob pattern with the training rows, or a list of them.
        test: the same for the held-out rows; None to train without a test.
        schema: schema TOML, or the name of a shipped schema; None to take the schema that travels in the training data.
        id_policy: `error`, `skip` or `hash` in place of the schema's policies; None to keep them.
        validation_share: share of the *training* rows that is set aside for early stopping and for choosing the best
            checkpoint; 0 for none.
        shuffle_window: rows that are shuffled together, rounded up to whole batches. Row groups are permuted as well.
        reader_workers: threads that read and transform windows ahead of the step.
    """

    train: str | list[str]
    test: str | list[str] | None = None
    schema: str | None = None
    id_policy: Literal["error", "skip", "hash"] | None = None
    validation_share: float = 0.05
    shuffle_window: int = 65_536
    reader_workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share = {self.validation_share}: must be at least 0 and below 1")
        if self.shuffle_window < 1 or self.reader_workers < 1:
            raise ValueError("shuffle_window and reader_workers must be 1 or more")


def find_files(places: str | list[str], key: str) -> list[tuple[Path, str]]:
    """Find Parquet files.

    Args:
        places: a file, a folder (searched in depth for `*.parquet`), a glob pattern, or a list of these.
        key: what asks for them, such as `data.train`, for error texts.

    Returns:
        Pairs (path, name below the place it was found in), in the order of `places`, sorted within each, without
        duplicates.

    Raises:
        DataError: a place that does not exist or holds no Parquet file.
    """
    found: dict[Path, str] = {}
    for place in [places] if isinstance(places, str) else places:
        path = Path(place)
        if path.is_dir():
            names = sorted(file.relative_to(path) for file in path.rglob("*.parquet"))
            # Hidden folders too: an interrupted conversion keeps finished files in one.
            visible = [name for name in names if not any(part.startswith((".", "_")) for part in name.parts)]
            named = [(path / name, name.as_posix()) for name in visible]
        elif path.is_file():
            named = [(path, path.name)]
        else:
            named = [(Path(file), Path(file).name) for file in sorted(glob.glob(place, recursive=True))]
        if not named:
            problem = "no *.parquet file in this folder" if path.is_dir() else "no such file or folder"
            raise DataError(f"{key}: {place}: {problem}.", f"Check the path, or set it with --set {key}=PATH.")
        for file, name in named:
            found.setdefault(file, name)
    if not found:
        raise DataError(f"{key}: an empty list.", "Name a file or folder.")
    return list(found.items())


def scan(files: Iterable[tuple[Path, str]], transformer: Transformer, *, keys: bool = False) -> Manifest:
    """Read the footers of all files and check their columns, before any row is read.

    Args:
        files: as `find_files` gives them.
        transformer: knows which columns, of which types, the schema needs.
        keys: the schema's key columns are needed too.

    Returns:
        The manifest.

    Raises:
        DataError: a file that is not Parquet, or lacks a column, or has it as another type; names file and column.
    """
    entries = []
    for path, name in files:
        try:
            with pq.ParquetFile(path) as file:
                transformer.check(file.schema_arrow, str(path), keys=keys)
                footer = file.metadata
                rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
                digest = _footer_digest(path, footer.serialized_size)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}.") from None
        entries.append(ManifestFile(str(path), name, rows, digest))
    return Manifest(tuple(entries))


def _footer_digest(path: Path, size: int) -> str:
    # https://parquet.apache.org/docs/file-format/: ... footer, 4 bytes footer length, 4 bytes "PAR1".
    with path.open("rb") as stream:
        stream.seek(-(size + 8), 2)
        return hashlib.sha256(stream.read(size)).hexdigest()


class Reader:
    """Reads windows of one data set.

    Args:
        manifest: the files.
        schema: how raw values become model inputs.
    """

    def __init__(self, manifest: Manifest, schema: Schema) -> None:
        self.manifest = manifest
        self.schema = schema
        self._transformer = Transformer(schema)
        self._names = schema.columns()
        # Reading text as dictionaries means that an id that occurs often is parsed and hashed once.
        self._text = [f.column for f in schema.sparse if f.kind != "integer" and not f.multi_valued]
        # The window after this one usually begins in the row group in which this one ends.
        self._recent: deque[tuple[tuple[int, int, bool], pa.Table]] = deque(maxlen=RECENT_ROW_GROUPS)

    def columns(self, window: Window, *, keys: bool = False) -> Columns:
        """Read and transform the rows of a window.

        Args:
            window: of a pass over this reader's manifest.
            keys: carry the schema's key columns.

        Returns:
            The rows, in the order of the window's segments; none if it has no segment.

        Raises:
            DataError: a value that breaks the schema; names file, row and column.
        """
        if not window.segments:  # a rank's share of a window that has fewer rows than there are ranks
            fields = [field for field in self.schema.arrow_schema() if field.name in self._names]
            return self._transformer(pa.schema(fields).empty_table())
        return Columns.concat([self._segment(segment, keys) for segment in window.segments])

    def _segment(self, segment: Segment, keys: bool) -> Columns:
        file = self.manifest.files[segment.file]
        table = self._row_group(segment, keys)
        first, last = int(segment.rows[0]), int(segment.rows[-1])
        if last - first + 1 == len(segment.rows):
            table = table.slice(first, len(segment.rows))
        else:
            table = table.take(pa.array(segment.rows))
        columns, problems = self._transformer.collect(table, keys=keys, source=file.path)
        if problems:
            worst = min(problems, key=lambda problem: problem.rows[0])
            row = int(segment.rows[worst.rows[0]]) + sum(file.row_groups[: segment.row_group])
            raise DataError(
                f"{file.path}: row {row} (from 0), column {worst.column!r}: {worst.message(0)}.", worst.remedy
            )
        return columns

    def _row_group(self, segment: Segment, keys: bool) -> pa.Table:
        key = (segment.file, segment.row_group, keys)
        for known, table in tuple(self._recent):
            if known == key:
                return table
        names = list(dict.fromkeys([*self._names, *self.schema.keys])) if keys else self._names
        path = self.manifest.files[segment.file].path
        # Without pre_buffer: it serves remote files, and costs a copy and threads on local ones.
        try:
            with pq.ParquetFile(path, read_dictionary=self._text, pre_buffer=False) as parquet:
                table = parquet.read_row_group(segment.row_group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: row group {segment.row_group} cannot be read: {' '.join(str(error).split()).rstrip(' .')}.",
                "Is the file damaged, or was it changed since the run began?",
            ) from None
        self._recent.append((key, table))
        return table


@dataclass(frozen=True)
class SourceBatch:
    """One batch, or one rank's share of it, as it comes from a source.

    Args:
        packed: the batch.
        counts: what the transform met in the window that this batch is the first of; None for its other batches.
        batch_rows: rows of the global batch, if this is one rank's share of it; else None.
    """

    packed: PackedBatch
    counts: Counts | None = None
    batch_rows: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch, over all ranks."""
        return self.packed.num_rows if self.batch_rows is None else self.batch_rows


def pack_window(columns: Columns, window: Window, ladder: Ladder, first_batch: int = 0) -> Iterator[SourceBatch]:
    """Put the rows of a window into batches.

    Args:
        columns: what `Reader.columns` gave for the window.
        window: says which rows go into which batch.
        ladder: for the id capacities.
        first_batch: number in the pass of the first batch wanted; those before it are left out.

    Yields:
        The batches, in order.
    """
    batch_size = window.slots.shape[1]
    skipped = max(0, first_batch - window.first_batch)
    slots = window.slots[skipped:].ravel()
    # One take for the whole window, so that batches are slices of it; padding is at the end of each batch.
    rows = columns.take(slots[slots >= 0])
    end = 0
    for number in range(skipped, len(window.slots)):
        begin, end = end, end + int((window.slots[number] >= 0).sum())
        packed = pack(rows.slice(begin, end), batch_size, ladder)
        batch_rows = None if window.batch_rows is None else int(window.batch_rows[number])
        yield SourceBatch(packed, columns.counts if number == 0 else None, batch_rows)


def read_batches(
    reader: Reader,
    passes: Iterable[Pass],
    ladder: Ladder,
    workers: int,
    first_batch: int = 0,
    share: Share = WHOLE,
) -> Iterator[SourceBatch]:
    """Read passes one after the other in threads, at least one window ahead of the consumer.

    Args:
        reader: reads the passes' data.
        passes: say which rows make up which batch.
        ladder: for the id capacities.
        workers: reading threads.
        first_batch: number of the first batch wanted of the first pass.
        share: of every batch; the rest is not read.

    Yields:
        The batches from there on, in order.
    """

    def windows() -> Iterator[tuple[Pass, int, int]]:
        first = first_batch
        for one_pass in passes:
            for index in range(first // one_pass.batches_per_window, one_pass.num_windows):
                yield one_pass, index, first
            first = 0

    def read(item: tuple[Pass, int, int]) -> list[SourceBatch]:
        one_pass, index, first = item
        window = share.of(one_pass.window(index))
        return list(pack_window(reader.columns(window), window, ladder, first))

    for batches in in_order(read, windows(), workers):
        yield from batches


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Map in threads, ahead of the consumer; results come in the order of the items.

    Args:
        function: called once an item; an exception reaches the consumer in the item's turn.
        items: any number.
        workers: threads; one item more than these is begun ahead.

    Yields:
        The results.
    """
    waiting: list[Future[Result]] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="reader")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > workers:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:  # also when the consumer stops early or is interrupted
        pool.shutdown(wait=False, cancel_futures=True)
