"""`--engine ray`: Ray Data reads and packs the windows, Ray Train's TorchTrainer runs the same loop on them.

A window of the order is one item of a Ray dataset; a task turns it into packed batches, each one buffer of raw arrays.
The dataset is made inside the training worker, from the position it stands at: so a worker that Ray restarts goes on
from its last checkpoint, and sees the same batches in the same order as `--engine local`.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.metrics_log import read_metrics
from pipelines.order import Manifest, Pass
from pipelines.ray_session import ray_session
from pipelines.reading import Reader, SourceBatch, pack_window
from pipelines.recipe import Recipe
from pipelines.run import Run
from pipelines.shares import Share
from pipelines.source import Part, RunData, Source
from tpurec.errors import TpurecError
from tpurec.extras import require
from tpurec.features import Counts, Ladder, PackedBatch
from tpurec.reporting import Reporter

# Restarts of the training worker (out of memory, lost host) before the run fails; it resumes from its last checkpoint.
MAX_FAILURES = 3
POLL_SECONDS = 1.0


class RaySource(Source):
    """Reads windows in tasks of Ray Data; used inside a process that is connected to Ray."""

    def read(self, part: Part, passes: Iterable[Pass], ladder: Ladder, first_batch: int) -> Iterator[SourceBatch]:
        """Read passes, as `Source.read` says.

        Args:
            part: which data the passes are over.
            passes: say which rows make up which batch.
            ladder: for the id capacities.
            first_batch: number of the first batch wanted of the first pass.

        Yields:
            The batches.
        """
        for one_pass in passes:
            yield from _read_pass(self.reader(part), one_pass, ladder, first_batch, self.share)
            first_batch = 0


def _read_pass(reader: Reader, one_pass: Pass, ladder: Ladder, first_batch: int, share: Share) -> Iterator[SourceBatch]:
    import ray.data

    def read(item: dict[str, Any]) -> list[dict[str, Any]]:
        window = share.of(one_pass.window(int(item["window"])))
        return [_to_row(batch) for batch in pack_window(reader.columns(window), window, ladder, first_batch)]

    windows = range(first_batch // one_pass.batches_per_window, one_pass.num_windows)
    if not windows:
        return
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):
        items = ray.data.from_items([{"window": index} for index in windows], override_num_blocks=len(windows))
        for block in items.flat_map(read).iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in block.to_pylist():
                yield _from_row(row)


def _to_row(batch: SourceBatch) -> dict[str, Any]:
    counts = None if batch.counts is None else json.dumps(dataclasses.asdict(batch.counts))
    return {"packed": batch.packed.to_bytes(), "counts": counts, "batch_rows": batch.num_rows}


def _from_row(row: dict[str, Any]) -> SourceBatch:
    counts = None if row["counts"] is None else Counts(**json.loads(row["counts"]))
    return SourceBatch(PackedBatch.from_bytes(row["packed"], copy=True), counts, row["batch_rows"])


def train_ray(run: Run, recipe: Recipe, data: RunData, reporter: Reporter) -> dict[str, Any]:
    """Train in a worker of Ray Train on this machine.

    Args:
        run: prepared and locked; on a file system that the worker sees under the same absolute path.
        recipe: the resolved recipe.
        data: schema and manifests.
        reporter: where progress goes.

    Returns:
        The result of `pipelines.training.train_run`.

    Raises:
        MissingExtra: Ray is not installed.
        TpurecError: what the worker raised.
    """
    require("ray.train", "--engine ray")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    source = RaySource(recipe, data)  # also refuses data that cannot be trained on, before Ray starts
    with ray_session(), reporter.progress("train", source.total_rows) as advance, follow(run, advance):
        trainer = TorchTrainer(
            _work,
            train_loop_config={"run": str(run.path.absolute()), "recipe": recipe, "data": absolute_data(data)},
            scaling_config=ScalingConfig(num_workers=1, use_gpu=False, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="ray",
                storage_path=str(run.path.absolute()),
                failure_config=FailureConfig(max_failures=MAX_FAILURES),
            ),
        )
        answer = fit(trainer)
    if "error" in answer:
        raise TpurecError(*answer["error"])
    return answer["result"]


def fit(trainer: Any, problem: Callable[[], list[str] | None] = lambda: None) -> dict[str, Any]:
    """Fit in a thread: in the main thread Ray Train would take over Ctrl-C, and end the process without a word.

    Args:
        trainer: of Ray Train.
        problem: tells what a worker fails of for good, and its remedy; asked now and then.

    Returns:
        What the worker of Ray's rank 0 returned.

    Raises:
        TpurecError: there is a problem.
    """
    answers: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            answers.set_result(trainer.fit().return_value)
        except BaseException as error:
            answers.set_exception(error)

    threading.Thread(target=run, name="ray-train", daemon=True).start()
    while True:
        try:
            return answers.result(timeout=POLL_SECONDS)
        except TimeoutError:
            if answers.done():  # it is the trainer's own
                raise
            told = problem()
            if told is not None:
                raise TpurecError(*told) from None


def absolute_data(data: RunData) -> RunData:
    """Make the files' paths absolute: a worker has another current folder than we have.

    Args:
        data: found here.

    Returns:
        The same data.
    """

    def moved(manifest: Manifest) -> Manifest:
        files = [dataclasses.replace(file, path=str(Path(file.path).absolute())) for file in manifest.files]
        return Manifest(tuple(files))

    return RunData(data.schema, moved(data.train), None if data.test is None else moved(data.test))


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """Run in the training worker. A failure with a known cause is an answer: doing it again would not help."""
    from pipelines.training import train_run

    run = Run(Path(config["run"]))
    try:
        return {"result": train_run(run, RaySource(config["recipe"], config["data"]))}
    except TpurecError as error:
        return {"error": [error.problem, error.remedy]}


@contextmanager
def follow(run: Run, advance: Any) -> Iterator[None]:
    """Move the progress bar by what the worker writes to metrics.jsonl.

    Args:
        run: the RUN folder.
        advance: takes the rows just done and a note.
    """
    stop = threading.Event()

    def follow() -> None:
        shown = 0
        while not stop.wait(POLL_SECONDS):
            lines = [line for line in read_metrics(run.metrics_file) if line["kind"] == "train"]
            if lines and lines[-1]["rows_seen"] > shown:
                advance(lines[-1]["rows_seen"] - shown, f"log loss {lines[-1]['log_loss'] or 0:.4f}")
                shown = lines[-1]["rows_seen"]

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
