"""The RUN folder: what a training run leaves behind, how it is resumed, and how others load it.

RUN/recipe.toml      the resolved recipe
RUN/schema.toml      the schema, the recipe's id policy applied
RUN/data.json        fingerprints of the training and test data
RUN/plan.json        the sharding plan, of a run with workers
RUN/checkpoints/     the last ones and the best
RUN/metrics.jsonl    one line a log or evaluation
RUN/tensorboard/     the same as TensorBoard events
RUN/result.json      what `train --json` prints; only of a finished run
RUN/.lock            held while a process trains into the folder
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.order import Manifest
from pipelines.recipe import Recipe, read_recipe
from tpurec import atomic
from tpurec.config import to_toml
from tpurec.errors import ConfigError, TpurecError
from tpurec.features import Schema
from tpurec.sharding.checkpoint import CheckpointManifest, best_checkpoint, list_checkpoints, read_manifest

if TYPE_CHECKING:
    from torch import nn

# Keys that may differ between the run and its resumption: they change no number of it (workers and plan: but by
# rounding), or are compared by content.
FREE_KEYS = (
    "data.train",
    "data.test",
    "data.schema",
    "data.reader_workers",
    "train.log_every_steps",
    "device.kind",
    "device.execution",
    "device.on_recompile",
    "device.check",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
    "checkpoint.asynchronous",
    "export.examples",
    "sharding.num_workers",
    "sharding.slice",
    "sharding.plan",
)
FREE_SECTION = "sharding.constraints."


@dataclass(frozen=True)
class Run:
    """A RUN folder by its parts.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def schema_file(self) -> Path:
        """The schema."""
        return self.path / "schema.toml"

    @property
    def data_file(self) -> Path:
        """Fingerprints of the data."""
        return self.path / "data.json"

    @property
    def plan_file(self) -> Path:
        """The sharding plan."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """Metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def result_file(self) -> Path:
        """The result of a finished run."""
        return self.path / "result.json"

    def result(self) -> dict[str, Any] | None:
        """Return the result of a finished run.

        Returns:
            What `train --json` printed; None if the run is not finished.
        """
        if not self.result_file.exists():
            return None
        return _read_json(self.result_file)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder's lock; the system frees it when the process ends, however it ends.

        Yields:
            The lock's file descriptor. A process that inherits it holds the lock, too.

        Raises:
            TpurecError: another process trains into this folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TpurecError(
                    f"{self.path}: another process is training into this RUN.", "Wait for it, or give another --out."
                ) from None
            yield stream.fileno()

    def check_recipe(self, recipe: Recipe) -> None:
        """Refuse a recipe that would make other numbers than those the folder already holds.

        Args:
            recipe: the one to go on with.

        Raises:
            ConfigError: naming the first keys that differ, with both values; or the folder is no RUN.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; a RUN is a folder.", "Give another --out.")
        if not self.recipe_file.exists():
            foreign = (
                [entry.name for entry in self.path.iterdir() if entry.name != ".lock"] if self.path.exists() else []
            )
            if foreign and not _unfinished_start(foreign):
                raise ConfigError(
                    f"{self.path}: is not a RUN (it has {foreign[0]!r} but no recipe.toml).", "Give another --out."
                )
            return
        before, now = _flat(dataclasses.asdict(read_recipe(self.recipe_file))), _flat(dataclasses.asdict(recipe))
        differ = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
        changed = [key for key in differ if key not in FREE_KEYS and not key.startswith(FREE_SECTION)]
        if changed:
            shown = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:3])
            more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ConfigError(
                f"{self.path}: this RUN was begun with another recipe: {shown}{more}.",
                "Give another --out for a new run, or the recipe it was begun with.",
            )

    def begin(self, recipe: Recipe, schema: Schema, train: Manifest, test: Manifest | None) -> None:
        """Write what the run is made of; or check, if it was begun before, that it is still the same.

        Args:
            recipe: the resolved recipe.
            schema: with the recipe's id policy.
            train: the training data.
            test: the test data, if there is any.

        Raises:
            ConfigError: the recipe or the schema differs from the run's.
            TpurecError: the data differ from the run's.
        """
        self.check_recipe(recipe)
        data = {"train": _describe(train), "test": None if test is None else _describe(test)}
        if self.data_file.exists():
            before = _read_json(self.data_file)
            for part in data:
                if before[part] != data[part]:
                    raise TpurecError(
                        f"{self.path}: the {part} data of this RUN were {_shown(before[part])}, "
                        f"now they are {_shown(data[part])}.",
                        "Give another --out for a new run, or the data it was begun with.",
                    )
        if self.schema_file.exists():
            before = Schema.load(self.schema_file)
            if before.fingerprint() != schema.fingerprint():
                raise ConfigError(
                    f"{self.path}: this RUN was begun with another schema ({before.fingerprint()}, now "
                    f"{schema.fingerprint()}).",
                    "Give another --out for a new run, or the schema it was begun with.",
                )
        atomic.write_text(self.data_file, json.dumps(data, indent=1))
        atomic.write_text(self.schema_file, schema.to_text())
        # Last: a folder with a recipe has everything else.
        atomic.write_text(self.recipe_file, to_toml(recipe))

    def fingerprints(self) -> dict[str, Any]:
        """Return what the run is made of, for its checkpoints.

        Returns:
            Fingerprints of schema, training and test data.
        """
        data = _read_json(self.data_file)
        parts = {part: entry and entry["fingerprint"] for part, entry in data.items()}
        return {"schema": Schema.load(self.schema_file).fingerprint(), **parts}


@dataclass(frozen=True)
class LoadedRun:
    """A trained run, ready to score.

    Args:
        run: the folder.
        recipe: its recipe.
        schema: its schema, the recipe's id policy applied.
        model: with the best checkpoint's weights, in evaluation mode.
        checkpoint: the best checkpoint.
        result: of the finished run; None if the run is not finished.
    """

    run: Run
    recipe: Recipe
    schema: Schema
    model: nn.Module
    checkpoint: CheckpointManifest
    result: dict[str, Any] | None


def load_run(path: str | Path) -> LoadedRun:
    """Load a RUN's best checkpoint for scoring.

    Args:
        path: the RUN folder; it need not be finished.

    Returns:
        Recipe, schema and model.

    Raises:
        ConfigError: not a RUN.
        TpurecError: it has no checkpoint yet, or the checkpoint is damaged.
    """
    from pipelines.training_state import load_weights
    from tpurec.models import build_model

    run = Run(Path(path))
    if not run.recipe_file.exists():
        raise ConfigError(
            f"{path}: is not a RUN: it has no recipe.toml.", "Give the folder that `tpurec train` printed."
        )
    recipe, schema = read_recipe(run.recipe_file), Schema.load(run.schema_file)
    best = best_checkpoint(run.checkpoints)
    if best is None:
        raise TpurecError(f"{path}: has no checkpoint yet.", "Train on: run `tpurec train` with --out set to it.")
    model = build_model(recipe.model, recipe.tables, schema)
    load_weights(model, best)
    return LoadedRun(run, recipe, schema, model.eval(), read_manifest(best), run.result())


def last_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint to resume from.

    Args:
        run: the folder.

    Returns:
        The newest complete checkpoint; None if there is none.
    """
    checkpoints = list_checkpoints(run.checkpoints)
    return checkpoints[-1] if checkpoints else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        remedy = "Remove it; `tpurec train` with the same --out writes it again from the last checkpoint."
        raise TpurecError(f"{path}: damaged: {error}.", remedy) from None


def _unfinished_start(names: list[str]) -> bool:
    """A process killed before recipe.toml was there leaves only these."""
    return all(name in ("data.json", "schema.toml") or name.startswith(".") for name in names)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None and value != {}:
            flat[f"{prefix}{key}"] = value
    return flat


def _describe(manifest: Manifest) -> dict[str, Any]:
    return {"fingerprint": manifest.fingerprint(), "rows": manifest.num_rows, "files": len(manifest.files)}


def _shown(entry: Mapping[str, Any] | None) -> str:
    return f"{entry['rows']} rows in {entry['files']} files ({entry['fingerprint'][:12]})" if entry else "none"
