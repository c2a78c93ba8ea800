"""One TOML recipe a run: its sections, read into frozen dataclasses that live beside what they configure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipelines.device import DeviceConfig
from pipelines.schedule import Decay
from tpurec.config import apply_overrides, from_mapping, read_toml
from tpurec.models.config import ModelConfig, TablesConfig


@dataclass(frozen=True)
class DataConfig:
    """Which rows to train and test on, and how they are read. Relative paths are relative to the current folder.

    Args:
        train: Parquet file, folder or glob pattern with the training rows, or a list of them.
        test: the same for the held-out rows; None to train without a test.
        schema: schema TOML; None to take the schema out of the training data's Parquet metadata.
        id_policy: `error`, `skip` or `hash` in place of the schema's policy for every table; None to keep the schema's.
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


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Learning rates of the tables are in [tables].

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
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
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
            if getattr(self, key) < 0:
                raise ValueError(f"{key} = {getattr(self, key)}: must not be negative")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate = {self.learning_rate}: must be above 0")
        if not 0 <= self.final_factor <= 1:
            raise ValueError(f"final_factor = {self.final_factor}: must lie between 0 and 1")


@dataclass(frozen=True)
class ShardingConfig:
    """How the tables are spread.

    Args:
        num_workers: training processes; 1, because sharded training is not built yet.
    """

    num_workers: Literal[1] = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """When to checkpoint and what to keep. Validation always writes one too, so that the best can be kept.

    Args:
        every_steps: steps between checkpoints; a killed run loses at most so many.
        keep_last: newest checkpoints to keep; the best one is kept besides.
    """

    every_steps: int = 1000
    keep_last: int = 2

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_last < 1:
            raise ValueError("every_steps and keep_last must be 1 or more")


@dataclass(frozen=True)
class ExportConfig:
    """What a bundle carries besides the weights.

    Args:
        examples: rows of the test data (else of the training data) stored with their scores, to check a bundle with.
    """

    examples: int = 64

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"examples = {self.examples}: must be 1 or more")


@dataclass(frozen=True)
class Recipe:
    """Everything one run is made from."""

    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: the TOML file.
        overrides: texts `section.key=value` that replace or add values.

    Returns:
        The recipe with every default filled in.

    Raises:
        ConfigError: no such file, not TOML, unknown key, or bad value, each with its key and what to do.
    """
    return from_mapping(Recipe, apply_overrides(read_toml(path), overrides), str(path))
