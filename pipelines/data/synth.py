"""Synthetic click logs on disk: Criteo's columns, a planted model, as OUT/train and OUT/test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pipelines.data.auc_histogram import AucHistogram
from pipelines.data.click_columns import IdValues, id_columns, id_numbers
from pipelines.data.criteo import COLUMNS, DENSE, LABEL, SPARSE
from pipelines.data.hex_text import hex_strings
from pipelines.data.output_folder import OutputFolder
from pipelines.data.planted import DrawnRows, PlantedModel
from tpurec.features import Schema

KIND = "tpurec.synth"
VERSION = 1
MANIFEST = "manifest.json"
CHUNK_ROWS = 1 << 16  # one row group
FILE_ROWS = 4 * CHUNK_ROWS
SEPARATOR = "|"
_STREAMS = {"train": 10, "test": 11}  # 1 and 2 are the planted model's


@dataclass(frozen=True)
class SynthConfig:
    """What to make.

    Args:
        rows: rows in all, train and test.
        seed: 0 or greater; the same seed and version give the same rows.
        format: `parquet` or `tsv`.
        multi_hot: C10, C15, C18 and C25 hold lists of ids.
        weighted: these lists have a weight an id, in columns such as `C10_weights`; implies `multi_hot`.
        test_share: share of the rows that goes to OUT/test; between 0 and 1, both excluded.
    """

    rows: int
    seed: int = 0
    format: Literal["parquet", "tsv"] = "parquet"
    multi_hot: bool = False
    weighted: bool = False
    test_share: float = 0.1

    @property
    def rows_of_part(self) -> dict[str, int]:
        """Rows of `train` and of `test`."""
        test = min(max(round(self.rows * self.test_share), 1), self.rows - 1)
        return {"train": self.rows - test, "test": test}


@dataclass(frozen=True)
class SynthResult:
    """What was made.

    Args:
        path: the folder.
        rows: rows in all.
        train_rows: rows of OUT/train.
        test_rows: rows of OUT/test.
        best_auc: AUC of the planted probabilities on the labels of OUT/test; NaN if these are all equal.
        click_rate: share of clicks in OUT/test.
    """

    path: str
    rows: int
    train_rows: int
    test_rows: int
    best_auc: float
    click_rate: float


def synthesize(
    out: str | Path,
    config: SynthConfig,
    *,
    overwrite: bool = False,
    workers: int = 1,
    progress: Callable[[int], None] = lambda rows: None,
) -> SynthResult:
    """Write synthetic click logs; memory does not depend on the number of rows, files not on the number of workers.

    Args:
        out: the folder to make.
        config: what to make.
        overwrite: replace an OUT that this function made earlier.
        workers: threads, one file each at a time.
        progress: called with the number of rows just written.

    Returns:
        What was made, with the best reachable AUC.

    Raises:
        DataError: OUT exists and may not be replaced.
    """
    config = dataclasses.replace(config, multi_hot=config.multi_hot or config.weighted)
    histogram = AucHistogram()
    with OutputFolder(out, KIND, MANIFEST, overwrite) as folder:
        folder.clear()
        model = PlantedModel(config.seed, config.multi_hot, config.weighted)
        schema = click_log_schema(config)
        for part in config.rows_of_part:
            (folder.partial / part).mkdir()
        (folder.partial / "schema.toml").write_text(schema.to_text(), encoding="utf-8")
        tasks = list(_tasks(config))
        write = lambda task: _write_file(folder.partial, task, model, schema, config, progress)  # noqa: E731
        for task, found in _in_threads(write, tasks, workers):
            if task.part == "test":
                histogram += found
        sizes = config.rows_of_part
        best_auc = histogram.auc()
        folder.publish(
            {
                "version": VERSION,
                **dataclasses.asdict(config),
                "train_rows": sizes["train"],
                "test_rows": sizes["test"],
                "best_auc": None if np.isnan(best_auc) else best_auc,
                "click_rate": histogram.click_rate(),
                "files": [{"name": f"{task.part}/{task.name}", "rows": task.rows} for task in tasks],
            }
        )
    return SynthResult(str(out), config.rows, sizes["train"], sizes["test"], best_auc, histogram.click_rate())


def click_log_schema(config: SynthConfig) -> Schema:
    """The schema of the logs: the shipped `criteo` schema, with lists and weights where they were asked for.

    Args:
        config: what is made.

    Returns:
        A schema for `data convert` and for training.
    """
    schema = Schema.load("criteo")
    if not (config.multi_hot or config.weighted):
        return schema
    lists = {column.name for column in id_columns(True) if column.is_list}
    sparse = tuple(
        dataclasses.replace(
            feature,
            multi_valued=True,
            separator=SEPARATOR,
            weights=weights_column(feature.name) if config.weighted else "",
        )
        if feature.name in lists
        else feature
        for feature in schema.sparse
    )
    extra = tuple(feature.weights for feature in sparse if feature.weights)
    # Every field is written, so a short row of these logs is a broken one.
    layout = dataclasses.replace(schema.input, columns=(*COLUMNS, *extra), short_rows="reject", min_fields=1)
    name = "criteo_weighted" if config.weighted else "criteo_multi_hot"
    return dataclasses.replace(schema, name=name, sparse=sparse, input=layout)


def weights_column(name: str) -> str:
    """Name of the column with the weights of an id column.

    Args:
        name: the id column.

    Returns:
        The weights column.
    """
    return f"{name}_weights"


def draw_chunk(model: PlantedModel, part: str, chunk: int, rows: int) -> tuple[DrawnRows, np.ndarray]:
    """Draw one chunk of a part; a pure function of its arguments.

    Args:
        model: the planted model.
        part: `train` or `test`.
        chunk: number of the chunk in its part.
        rows: N, at most `CHUNK_ROWS`.

    Returns:
        The rows, and their labels, bool `[N]`.
    """
    rng = np.random.default_rng([model.seed, _STREAMS[part], chunk])
    drawn = model.draw(rng, rows)
    return drawn, draw_labels(drawn.probabilities, rng)


def draw_labels(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw labels by systematic sampling along the sorted probabilities.

    Every label is 1 with exactly its probability, but rows of like probability share their luck, so that the AUC of
    the planted probabilities varies little between seeds even on two thousand rows.

    Args:
        probabilities: float64 `[N]`.
        rng: the source of randomness.

    Returns:
        bool `[N]`.
    """
    order = np.argsort(probabilities, kind="stable")
    steps = np.floor(np.cumsum(probabilities[order]) + rng.random())
    labels = np.empty(probabilities.size, bool)
    labels[order] = np.diff(steps, prepend=0.0) > 0.5
    return labels


@dataclass(frozen=True)
class _Task:
    """One file: which rows it holds."""

    part: str
    number: int
    rows: int
    name: str


def _tasks(config: SynthConfig) -> Iterator[_Task]:
    for part, rows in config.rows_of_part.items():
        for number, start in enumerate(range(0, rows, FILE_ROWS)):
            yield _Task(part, number, min(FILE_ROWS, rows - start), f"{number:05d}.{config.format}")


def _in_threads(
    write: Callable[[_Task], AucHistogram], tasks: list[_Task], workers: int
) -> Iterator[tuple[_Task, AucHistogram]]:
    """Run tasks with few of them in the air, so that an interruption waits for these only."""
    waiting = iter(tasks)
    running: dict[Future, _Task] = {}
    with ThreadPoolExecutor(workers) as pool:
        for task in waiting:
            running[pool.submit(write, task)] = task
            if len(running) < workers:
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
        for future in wait(running).done:
            yield running[future], future.result()


def _write_file(
    folder: Path,
    task: _Task,
    model: PlantedModel,
    schema: Schema,
    config: SynthConfig,
    progress: Callable[[int], None],
) -> AucHistogram:
    histogram = AucHistogram()
    path = folder / task.part / task.name
    parquet, text = None, None
    try:
        for start in range(0, task.rows, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, task.rows - start)
            drawn, labels = draw_chunk(model, task.part, (task.number * FILE_ROWS + start) // CHUNK_ROWS, rows)
            if task.part == "test":
                histogram.add(drawn.logits, labels)
            table = click_table(drawn, labels)
            if config.format == "parquet":
                if parquet is None:
                    parquet = pq.ParquetWriter(path, schema.with_metadata(table.schema), compression="zstd")
                parquet.write_table(table.replace_schema_metadata(parquet.schema.metadata), row_group_size=CHUNK_ROWS)
            else:
                text = text or path.open("wb")
                options = pacsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
                pacsv.write_csv(_joined(table), text, options)
            progress(rows)
    finally:
        for stream in (parquet, text):
            if stream is not None:
                stream.close()
    return histogram


def click_table(drawn: DrawnRows, labels: np.ndarray) -> pa.Table:
    """Write drawn rows as an Arrow table.

    Args:
        drawn: N rows.
        labels: bool `[N]`.

    Returns:
        The columns of Criteo's logs: label int32, I1 to I13 int64, C1 to C26 strings or lists of strings; and the
        weights of the lists, if there are any.
    """
    columns: dict[str, pa.Array] = {LABEL: pa.array(labels.astype(np.int32))}
    for name in DENSE:
        columns[name] = pa.array(drawn.dense[name].values, mask=drawn.dense[name].blank)
    weights = {}
    for position, name in enumerate(SPARSE):
        values = drawn.ids[name]
        columns[name] = _ids(position, values)
        if values.weights is not None:
            weights[weights_column(name)] = _lists(values, pa.array(values.weights))
    return pa.table(columns | weights)


def _ids(position: int, values: IdValues) -> pa.Array:
    texts = hex_strings(id_numbers(position, values.ranks))
    if values.is_list:
        return _lists(values, texts)
    lengths = np.diff(values.offsets)
    if lengths.size == len(texts):
        return texts
    return texts.take(pa.array(values.offsets[:-1], mask=lengths == 0))


def _lists(values: IdValues, flat: pa.Array) -> pa.Array:
    """Lists of the rows; a row without ids is null."""
    blank = np.append(np.diff(values.offsets) == 0, False)
    return pa.ListArray.from_arrays(pa.array(values.offsets.astype(np.int32), mask=blank), flat)


def _joined(table: pa.Table) -> pa.Table:
    """Lists as text with separators."""
    for position, field in enumerate(table.schema):
        if pa.types.is_list(field.type):
            texts = table.column(position).cast(pa.list_(pa.string()))
            table = table.set_column(position, field.name, pc.binary_join(texts, SEPARATOR))
    return table
