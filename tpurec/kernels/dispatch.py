"""Which implementation runs an op: named by the caller, or looked up by chip and shape in `tuning.toml`.

An implementation is a module with three names: `run` (same arguments for every implementation of an op), `limit`, which
says in words what of a shape it cannot take (None: it takes it), and `Config`, a frozen dataclass of its tuning knobs.
No environment variable and no device is asked: the chip is an argument, None where there is no TPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

from tpurec.config import from_mapping
from tpurec.errors import ConfigError, TpurecError
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import CHIPS, Chip

# Op -> implementation -> module. `plain` takes every shape on every backend.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "embedding_bag": {
        "plain": "tpurec.kernels.embedding_bag_plain",
        "sparsecore": "tpurec.kernels.embedding_bag_sparsecore",
        "tensorcore": "tpurec.kernels.embedding_bag_tensorcore",
    },
    "embedding_update": {
        "plain": "tpurec.kernels.embedding_update_plain",
        "sparsecore": "tpurec.kernels.embedding_update_sparsecore",
        "tensorcore": "tpurec.kernels.embedding_update_tensorcore",
    },
}
_CONDITIONS = {"chips", "min_row_words", "max_row_words", "min_ids_per_bag", "max_ids_per_bag"}


class KernelLimit(TpurecError):
    """A kernel was asked for by name and cannot take the shape."""


@dataclass(frozen=True)
class Shape:
    """What an implementation is chosen by.

    Args:
        storage: the tables.
        num_bags: bags of one call, all features together.
        num_ids: capacity of the ids array.
        weighted: there is a weight per id.
        pooling: `sum` or `mean`.
        optimizer: for `embedding_update`: a name of `optimizers.ACCUMULATORS`; empty otherwise.
        plain_only: what is asked of the optimizer that no Pallas kernel does, in words; empty if there is a kernel.
    """

    storage: Storage
    num_bags: int
    num_ids: int
    weighted: bool = False
    pooling: str = "sum"
    optimizer: str = ""
    plain_only: str = ""

    def __post_init__(self) -> None:
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"pooling {self.pooling!r}: expected sum or mean.")


@dataclass(frozen=True)
class Choice:
    """The implementation chosen, and why.

    Args:
        op: such as `embedding_bag`.
        implementation: a key of `IMPLEMENTATIONS[op]`.
        config: its tuning knobs.
        reason: one sentence.
    """

    op: str
    implementation: str
    config: Any
    reason: str

    @property
    def module(self) -> ModuleType:
        """The implementation's module."""
        return importlib.import_module(IMPLEMENTATIONS[self.op][self.implementation])


def choose(op: str, shape: Shape, chip: Chip | None, implementation: str | None = None, config: Any = None) -> Choice:
    """Choose the implementation of an op.

    Args:
        op: `embedding_bag` or `embedding_update`.
        shape: what it will be called with.
        chip: facts of the TPU that the program is compiled for; None if it is not compiled for a TPU.
        implementation: a name to use whatever the table says; None to look it up.
        config: the implementation's `Config`; None for the table's.

    Returns:
        The choice, with its reason.

    Raises:
        ConfigError: no such op or implementation.
        KernelLimit: `implementation` was given and cannot take the shape; the limit is named.
    """
    if op not in IMPLEMENTATIONS:
        raise ConfigError(f"op {op!r} is not known.", f"Known ops: {', '.join(IMPLEMENTATIONS)}.")
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS[op]:
            known = ", ".join(IMPLEMENTATIONS[op])
            raise ConfigError(f"{op} has no implementation {implementation!r}.", f"There are: {known}.")
        choice = _with_config(op, implementation, shape, chip, config, "asked for by name")
        problem = choice.module.limit(shape, chip, choice.config)
        if problem:
            raise KernelLimit(f"{op}, implementation {implementation!r}: {problem}.", "Use implementation='plain'.")
        return choice
    if chip is None:
        return _with_config(op, "plain", shape, chip, config, "no TPU is targeted")
    entry = _entry(op, shape, chip)
    if entry is None:
        return _with_config(op, "plain", shape, chip, config, f"the tuning table has nothing for {chip.name}")
    name = entry["implementation"]
    choice = _with_config(op, name, shape, chip, config, f"the tuning table's entry for {chip.name}: {entry['why']}")
    problem = choice.module.limit(shape, chip, choice.config)
    if problem:
        return _with_config(op, "plain", shape, chip, None, f"{name} cannot take it: {problem}")
    return choice


def explain(op: str, shape: Shape, chip: Chip | None, implementation: str | None = None) -> str:
    """Say which implementation runs and why.

    Args:
        op: such as `embedding_bag`.
        shape: what it will be called with.
        chip: the TPU compiled for, or None.
        implementation: as of `choose`.

    Returns:
        One line, such as `embedding_bag: sparsecore, because the tuning table's entry for v6e: ...`.

    Raises:
        As `choose`.
    """
    choice = choose(op, shape, chip, implementation)
    return f"{op}: {choice.implementation}, because {choice.reason}; {choice.config}"


def _with_config(op: str, implementation: str, shape: Shape, chip: Chip | None, config: Any, reason: str) -> Choice:
    choice = Choice(op, implementation, None, reason)
    if config is None:
        entry = _entry(op, shape, chip, implementation) if chip else None
        config = from_mapping(choice.module.Config, entry.get("config", {}) if entry else {}, f"tuning.toml {op}")
    return dataclasses.replace(choice, config=config)


def _entry(op: str, shape: Shape, chip: Chip, implementation: str | None = None) -> dict[str, Any] | None:
    """The first entry whose conditions hold."""
    words, length = shape.storage.row_words, shape.num_ids / max(shape.num_bags, 1)
    for entry in tuning_table().get(op, ()):
        when = entry["when"]
        if (
            chip.name in when.get("chips", CHIPS)
            and when.get("min_row_words", 0) <= words <= when.get("max_row_words", words)
            and when.get("min_ids_per_bag", 0) <= length <= when.get("max_ids_per_bag", length)
            and implementation in (None, entry["implementation"])
        ):
            return entry
    return None


@cache
def tuning_table() -> dict[str, list[dict[str, Any]]]:
    """The content of `tuning.toml`, checked.

    Returns:
        Op to entries in order of preference; each has `implementation`, `why`, `when` (conditions) and `config`.

    Raises:
        ConfigError: an entry with an unknown op, implementation or condition.
    """
    table = tomllib.loads(files("tpurec.kernels").joinpath("tuning.toml").read_text(encoding="utf-8"))
    for op, entries in table.items():
        for entry in entries:
            name = entry.get("implementation")
            if name not in IMPLEMENTATIONS.get(op, {}):
                raise ConfigError(f"tuning.toml [{op}]: implementation {name!r} is not known.")
            keys = {"implementation", "why", "when", "config"}
            wrong = (set(entry) - keys) | (keys - {"config"} - set(entry)) | (set(entry.get("when", ())) - _CONDITIONS)
            if wrong:
                raise ConfigError(f"tuning.toml [{op}] {name}: unknown or missing keys: {', '.join(sorted(wrong))}.")
    return table
