"""The train loop: plain torch. It takes an iterator of batches and calls back; it knows neither files nor Ray.

What one step is, `pipelines.step` says; `Position` is all the loop remembers between steps besides tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pipelines.feed import DeviceFeed, Feed, Ready
from pipelines.position import Clock, Position
from pipelines.reading import SourceBatch
from pipelines.schedule import Decay, learning_rate_factor
from pipelines.step import DenseOptimizer, TrainStep
from pipelines.tally import Tally
from pipelines.world import SINGLE, World
from tpurec.errors import DataError, TpurecError


@dataclass(frozen=True)
class TrainConfig:
    """The recipe's section [train]. Learning rates of the tables are in [tables].

    Args:
        batch_size: rows of a global batch, over all workers.
        epochs: passes over the training rows.
        max_steps: stop after so many steps even if epochs remain; 0 for no such limit.
        seed: of initial weights, row order and validation cut.
        optimizer: of the dense part: `adam`, `adagrad` or `sgd`.
        learning_rate: of the dense part, before the schedule's factor.
        weight_decay: of the dense part.
        warmup_steps: steps over which both learning rates climb linearly.
        decay: `none`, `linear` or `cosine`, after the warm-up, over the steps that remain.
        final_factor: where the decay ends, as a share of the learning rate.
        evaluate_every_steps: validate after so many steps; 0 for the end of each epoch only. The end of each epoch
            always validates.
        patience: stop after so many validations in a row without a better one; 0 for never.
        monitor: what "better" means: lower `log_loss` or higher `auc` on the validation rows.
        eval_batch_size: rows of a batch in evaluation.
        log_every_steps: steps between two lines of training metrics.
    """

    batch_size: int = 2048
    epochs: int = 1
    max_steps: int = 0
    seed: int = 0
    optimizer: DenseOptimizer = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay: Decay = "none"
    final_factor: float = 0.0
    evaluate_every_steps: int = 0
    patience: int = 0
    monitor: Literal["log_loss", "auc"] = "log_loss"
    eval_batch_size: int = 8192
    log_every_steps: int = 50

    def __post_init__(self) -> None:
        for key in ("batch_size", "epochs", "eval_batch_size", "log_every_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)}: must be 1 or more")
        for key in ("max_steps", "warmup_steps", "evaluate_every_steps", "patience", "seed", "weight_decay"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} = {getattr(self, key)}: must not be negative")
        if self.seed >= 2**63:
            raise ValueError(f"seed = {self.seed}: must be below 2^63")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate = {self.learning_rate}: must be above 0")
        if not 0 <= self.final_factor <= 1:
            raise ValueError(f"final_factor = {self.final_factor}: must lie between 0 and 1")


@dataclass(frozen=True)
class Callbacks:
    """What the loop calls.

    Args:
        log: takes a line of metrics: `kind`, `step`, `epoch` and numbers.
        validate: evaluates the model as it is; None if there are no validation rows.
        save: writes a checkpoint; takes the position and the validation's score, or None if it was not evaluated.
        progress: takes the rows just trained on and the loss of the last step whose loss was read.
    """

    log: Callable[[dict[str, Any]], None]
    validate: Callable[[], dict[str, Any]] | None
    save: Callable[[Position, float | None], None]
    progress: Callable[[int, float], None] = lambda rows, loss: None


class TrainLoop:
    """Trains a model.

    Where a device works while the host goes on, losses are read when a line of metrics, a validation or a checkpoint is
    due, not after every step.

    Args:
        step: does one step; owns model and optimizers.
        config: the recipe's section [train].
        table_learning_rate: of the tables, before the schedule's factor.
        batches_per_epoch: batches of an epoch.
        checkpoint_every_steps: steps between checkpoints.
        feed: makes batches ready for the step; None moves them to the step's device.
        world: the ranks, of which each has its share of every batch; all of them run the loop.
        check: called after every step; raises DataError if it was wrong. None for no check.
    """

    def __init__(
        self,
        step: TrainStep,
        config: TrainConfig,
        table_learning_rate: float,
        batches_per_epoch: int,
        checkpoint_every_steps: int,
        feed: Feed | None = None,
        world: World = SINGLE,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.clock = Clock()
        self._step = step
        self._feed = feed or DeviceFeed(step.device)
        self._world = world
        self._check = check
        self._tally = Tally()  # of this rank's rows, since all were last added up
        self._table_learning_rate = table_learning_rate
        self._batches_per_epoch = batches_per_epoch
        self._checkpoint_every_steps = checkpoint_every_steps
        self.total_steps = total_steps(config, batches_per_epoch)
        self._unread: list[tuple[int, Tensor, int]] = []  # step, loss, labelled rows
        self._last_loss = 0.0

    def run(self, batches: Iterable[SourceBatch], position: Position, callbacks: Callbacks) -> None:
        """Train until the steps are done or patience runs out.

        Args:
            batches: from `position` on, over all epochs that remain.
            position: where the run stands; updated in place.
            callbacks: what to call.

        Raises:
            TpurecError: the loss is not finite, or the batches end too early.
        """
        self._step.model.train()
        source = self._feed(batches)
        while not position.finished:
            started = time.perf_counter()
            ready = next(source, None)
            if ready is None:
                raise TpurecError(
                    f"the training data ended at step {position.step} of {self.total_steps}.",
                    "It must not change while a run is trained.",
                )
            received = time.perf_counter()
            self.step(ready, position)
            self._advance(ready.item, position)
            if self._due(position):
                self._read_losses(position)
                self._add_up(position)
            stepped = time.perf_counter()
            self.clock.add_step(ready.item.num_rows, received - started, stepped - received, self._step.compiled)
            callbacks.progress(ready.item.num_rows, self._last_loss)
            self._report(position, callbacks)
            self.clock.other_seconds += time.perf_counter() - stepped
        source.close()  # which ends what is under way for later batches

    def step(self, ready: Ready, position: Position) -> None:
        """Do one optimizer step.

        Args:
            ready: the batch.
            position: gives the step of the schedule; its loss sums are updated, on a TPU mostly later.

        Raises:
            TpurecError: the loss is not finite.
            DataError: of the check.
        """
        factor = self._factor(position.step)
        self._step.set_learning_rates(self.config.learning_rate * factor, self._table_learning_rate * factor)
        loss = self._step(ready.batch(), ready.num_labelled)
        if self._check is not None:
            try:
                self._check()
            except DataError as error:
                raise DataError(f"step {position.step + 1}: {error.problem}", error.remedy) from None
        self._unread.append((position.step + 1, loss, ready.num_labelled))
        if self._step.device.type == "cpu" or self._step.compiled:  # the step is done, reading costs nothing
            self._read_losses(position)

    def _read_losses(self, position: Position) -> None:
        unread, self._unread = self._unread, []
        for step, loss, labelled in unread:
            value = loss.item()
            if not math.isfinite(value):
                found = f" (seen after step {position.step})" if position.step > step else ""
                raise TpurecError(
                    f"the loss is {value} at step {step}{found}.",
                    "Lower train.learning_rate and tables.learning_rate, or add train.warmup_steps.",
                )
            position.log_loss_sum += value * labelled
            position.log_rows += labelled
            self._last_loss = value

    def _factor(self, step: int) -> float:
        config = self.config
        return learning_rate_factor(step, self.total_steps, config.warmup_steps, config.decay, config.final_factor)

    def _advance(self, item: SourceBatch, position: Position) -> None:
        position.step += 1
        position.batch += 1
        if position.batch == self._batches_per_epoch:
            position.epoch, position.batch = position.epoch + 1, 0
        position.rows_seen += item.num_rows
        self._tally.count(item)
        position.finished = position.step >= self.total_steps

    def _add_up(self, position: Position) -> None:
        own, self._tally = self._tally, Tally()
        total = Tally(position.missing_labels, position.label_range, position.ids)
        for tally in self._world.gather_json(own.to_json()):
            total.add(Tally(**tally))
        position.missing_labels, position.label_range, position.ids = total.missing_labels, total.label_range, total.ids

    def _log_due(self, position: Position) -> bool:
        return position.step % self.config.log_every_steps == 0 or position.finished

    def _validation_due(self, position: Position) -> bool:
        every = self.config.evaluate_every_steps
        return position.batch == 0 or position.finished or bool(every and position.step % every == 0)

    def _checkpoint_due(self, position: Position) -> bool:
        return position.finished or position.step % self._checkpoint_every_steps == 0

    def _due(self, position: Position) -> bool:
        return self._log_due(position) or self._validation_due(position) or self._checkpoint_due(position)

    def _report(self, position: Position, callbacks: Callbacks) -> None:
        if self._log_due(position):
            callbacks.log(
                {
                    "kind": "train",
                    "step": position.step,
                    "epoch": position.epoch,
                    "log_loss": position.log_loss_sum / position.log_rows if position.log_rows else None,
                    "learning_rate": self.config.learning_rate * self._factor(position.step - 1),
                    "rows_seen": position.rows_seen,
                    "rows_per_second": round(self.clock.rows_per_second, 1),
                }
            )
            position.log_loss_sum, position.log_rows = 0.0, 0
        if callbacks.validate is not None and self._validation_due(position):
            self._validate(position, callbacks)
        elif self._checkpoint_due(position):
            callbacks.save(position, None)

    def _validate(self, position: Position, callbacks: Callbacks) -> None:
        metrics = callbacks.validate()
        self._step.model.train()
        callbacks.log({"kind": "validation", "step": position.step, "epoch": position.epoch, **metrics})
        score = score_of(metrics, self.config.monitor)
        if score is None:
            remedy = "Set data.validation_share higher, or to 0 to train without validation."
            if position.label_range is not None and position.label_range[0] == position.label_range[1]:
                remedy = f"All labels trained on, too, are {position.label_range[0]:g}: give rows with other labels."
            raise TpurecError(
                f"the validation rows do not define {self.config.monitor}: {metrics['eval_rows']} rows, "
                f"{metrics['missing_labels']} of them without a label, mean label {metrics['mean_label']}.",
                remedy,
            )
        if position.best_score is None or score > position.best_score:
            position.best_score, position.best_step = score, position.step
            position.validations_without_better = 0
        else:
            position.validations_without_better += 1
            if self.config.patience and position.validations_without_better >= self.config.patience:
                position.stopped_early = not position.finished
                position.finished = True
        callbacks.save(position, score)


def total_steps(config: TrainConfig, batches_per_epoch: int) -> int:
    """Return the steps of a whole run, without early stopping.

    Args:
        config: the recipe's section [train].
        batches_per_epoch: batches of an epoch.

    Returns:
        Steps.
    """
    steps = config.epochs * batches_per_epoch
    return min(steps, config.max_steps) if config.max_steps else steps


def score_of(metrics: dict[str, Any], monitor: str) -> float | None:
    """Return how good a validation is, higher is better.

    Args:
        metrics: of the validation rows.
        monitor: `log_loss` or `auc`.

    Returns:
        The score, None if the metric is undefined.
    """
    value = metrics[monitor]
    return None if value is None else (-value if monitor == "log_loss" else value)
