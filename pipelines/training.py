"""One training run from start or checkpoint to result, in one process: what every engine runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pipelines.compilations import Compilation
from pipelines.evaluation import evaluate
from pipelines.execution import start
from pipelines.metrics_log import MetricsLog, NoLog
from pipelines.position import Position
from pipelines.reading import SourceBatch
from pipelines.run import Run, last_checkpoint
from pipelines.sharded_execution import ShardedExecution
from pipelines.source import Source
from pipelines.train_loop import Callbacks, TrainLoop
from pipelines.training_state import TrainingState, load_weights
from pipelines.world import SINGLE, World
from tpurec.embeddings import check_on_device, raise_offence
from tpurec.models import build_model, table_optimizer
from tpurec.sharding.checkpoint import Checkpointer, best_checkpoint
from tpurec.sharding.plan import Plan

METRICS = ("auc", "normalized_entropy", "log_loss", "calibration", "mean_label", "missing_labels", "eval_rows")


def train_run(
    run: Run,
    source: Source,
    *,
    world: World = SINGLE,
    plan: Plan | None = None,
    log: Callable[[str], None] = lambda message: None,
    progress: Callable[[int, float], None] = lambda rows, loss: None,
) -> dict[str, Any]:
    """Train, or go on training, and evaluate the best checkpoint on the test data.

    Args:
        run: a folder that `Run.begin` has prepared; locked by the caller.
        source: the batches, or this rank's shares of them.
        world: the ranks that train together; each of them calls this.
        plan: where the tables are; None for a model that is not sharded.
        log: takes a line for people.
        progress: takes the rows just trained on and the loss of the last step.

    Returns:
        The result: metrics, `rows_seen`, `steps`, `rows_per_second` and so on, and `warnings`; with a plan also
        `world_size`, `exchange_bytes_per_step`, `padding_share` and `collectives_per_step`. Rank 0's on every rank.

    Raises:
        TpurecError: training diverged, a checkpoint does not load, or the data are not as the schema says.
    """
    recipe = source.recipe
    started = time.perf_counter()
    with torch_threads(recipe.device.num_threads(recipe.data.reader_workers, world.processes_here)):
        torch.manual_seed(recipe.train.seed)
        execution = start(recipe.device, lambda found: _report(found, position, log, metrics_log))
        if plan is not None:
            execution = ShardedExecution(execution, plan, world, recipe.sharding.wire_dtype)
        with execution.building():
            model = build_model(
                recipe.model,
                recipe.tables,
                source.data.schema,
                seed=recipe.train.seed,
                optimizer=table_optimizer(recipe.tables),
            )
        model = execution.place(model)
        check = None
        if recipe.device.check:
            check_on_device(model)
            check = partial(raise_offence, model)
        step = execution.train_step(model, recipe.train)
        forward, evaluation_feed = execution.forward(model), execution.evaluation_feed()

        def score(batches: Iterator[SourceBatch]) -> dict[str, Any]:
            with execution.evaluating():
                metrics = evaluate(model, batches, feed=evaluation_feed, forward=forward, world=world)
            if check is not None:
                check()
            return metrics

        state = TrainingState(step)
        checkpointer = Checkpointer(
            run.checkpoints,
            recipe.checkpoint.keep_last,
            process_group=world.host_group,
            asynchronous=recipe.checkpoint.asynchronous,
            log=log,
        )
        position = Position()
        resumed = last_checkpoint(run)
        if resumed is not None:
            position = state.load(resumed)
            log(f"resuming at step {position.step} (epoch {position.epoch}, batch {position.batch})")
            progress(position.rows_seen, 0.0)
        loop = TrainLoop(
            step,
            recipe.train,
            recipe.tables.learning_rate,
            source.batches_per_epoch,
            recipe.checkpoint.every_steps,
            execution.feed(),
            world,
            check,
        )
        metrics_log = MetricsLog(run.metrics_file, run.tensorboard, position.step) if world.is_first else NoLog()
        fingerprints = run.fingerprints()
        validation: dict[str, Any] = {}

        def validate() -> dict[str, Any]:
            validation.update(score(source.validation()))
            log(f"step {position.step}: {_line('validation', validation)}")
            return dict(validation)

        callbacks = Callbacks(
            log=metrics_log.add,
            validate=validate if source.validation_rows else None,
            save=lambda at, score: state.save(checkpointer, at, score, fingerprints),
            progress=progress,
        )
        try:
            with checkpointer:
                loop.run(source.train(position.epoch, position.batch), position, callbacks)
            metrics, evaluated_on = _final_metrics(model, score, run, source, position, metrics_log)
        finally:
            metrics_log.close()
    result = {
        **metrics,
        "evaluated_on": evaluated_on,
        "rows_seen": position.rows_seen,
        "steps": position.step,
        "best_step": position.best_step,
        "stopped_early": position.stopped_early,
        "rows_per_second": round(loop.clock.rows_per_second, 1),
        **execution.statistics(),
        "warmup_seconds": round(execution.compilations.seconds, 3),
        "wait_seconds": round(loop.clock.wait_seconds, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "train_missing_labels": position.missing_labels,
        "ids": position.ids,
        "warnings": [*_warnings(metrics, evaluated_on, position), *execution.compilations.warnings()],
    }
    return world.first_value(result)


def _final_metrics(
    model: torch.nn.Module,
    score: Callable[[Iterator[SourceBatch]], dict[str, Any]],
    run: Run,
    source: Source,
    position: Position,
    metrics_log: MetricsLog,
) -> tuple[dict[str, Any], str | None]:
    """Evaluate the best checkpoint on the test rows, or else on the validation rows."""
    if source.test_rows is None and not source.validation_rows:
        return dict.fromkeys(METRICS) | {"eval_rows": 0, "missing_labels": 0}, None
    best = best_checkpoint(run.checkpoints)
    assert best is not None, "a finished position was saved"
    load_weights(model, best)
    kind = "validation" if source.test_rows is None else "test"
    metrics = score(source.validation() if source.test_rows is None else source.test())
    if kind == "test":
        metrics_log.add({"kind": kind, "step": position.step, "epoch": position.epoch, **metrics})
    return metrics, kind


def _report(found: Compilation, position: Position, log: Callable[[str], None], metrics_log: MetricsLog) -> None:
    """Tell of programs that were compiled."""
    number = "1 program" if found.programs == 1 else f"{found.programs} programs"
    line = f"compiled {number} for {found.activity}, {found.shape()}: {found.seconds:.1f} s"
    log(f"warning: {line}: {found.unexpected}" if found.unexpected else line)
    entry = dataclasses.asdict(found) | {"seconds": round(found.seconds, 3)}
    metrics_log.add({"kind": "compilation", "step": position.step, "epoch": position.epoch, **entry})


def _warnings(metrics: dict[str, Any], evaluated_on: str | None, position: Position) -> list[str]:
    found = []
    if position.label_range is None:
        found.append("no training row has a label: nothing was learnt.")
    elif position.label_range[0] == position.label_range[1]:
        found.append(f"all training labels are {position.label_range[0]:g}: there was nothing to tell apart.")
    if position.missing_labels:
        found.append(f"{position.missing_labels} of {position.rows_seen} training rows have no label; they are masked.")
    if evaluated_on is not None:
        found += label_warnings(metrics, f"the {evaluated_on} data")
    for table, counts in position.ids.items():
        handled = ", ".join(f"{number} {reason}" for reason, number in counts.items() if reason != "ids" and number)
        if handled:
            found.append(f"table {table!r}: of {counts['ids']} ids in training, handled by the id policy: {handled}.")
    return found


def label_warnings(metrics: dict[str, Any], what: str) -> list[str]:
    """Say what the labels of an evaluation do not define.

    Args:
        metrics: as `pipelines.evaluation.evaluate` gives them.
        what: what was evaluated, such as `the test data`.

    Returns:
        Lines for people; empty if all is well.
    """
    found = []
    labelled = metrics["eval_rows"] - metrics["missing_labels"]
    if labelled == 0:
        found.append(f"{what}: none of {metrics['eval_rows']} rows has a label: there are no metrics.")
    elif metrics["auc"] is None:
        found.append(f"{what}: all {labelled} labels are {metrics['mean_label']:g}: AUC is undefined.")
    if metrics["missing_labels"] and labelled:
        found.append(f"{what}: {metrics['missing_labels']} of {metrics['eval_rows']} rows have no label; left out.")
    return found


def _line(kind: str, metrics: dict[str, Any]) -> str:
    shown = {key: metrics[key] for key in ("auc", "log_loss", "normalized_entropy", "calibration")}
    return f"{kind} " + ", ".join(f"{key} {'undefined' if v is None else f'{v:.5f}'}" for key, v in shown.items())


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Run a block with a number of torch threads, and go back to the number before.

    Args:
        number: threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
