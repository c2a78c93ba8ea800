"""One TOML recipe a run: its sections, read into frozen dataclasses that live beside what they configure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.device import DeviceConfig
from pipelines.reading import DataConfig
from pipelines.train_loop import TrainConfig
from tpurec.config import apply_overrides, from_mapping, read_toml
from tpurec.models.config import ModelConfig, TablesConfig
from tpurec.sharding.checkpoint import CheckpointConfig
from tpurec.sharding.config import ShardingConfig


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
