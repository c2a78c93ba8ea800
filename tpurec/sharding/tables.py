"""Table lists: what the planner is asked to place, read from TOML or JSON.

batch_size = 65536            # optional; the command's --batch-size wins

[[tables]]
name = "user"
num_embeddings = 40_000_000
embedding_dim = 128
features = [{name = "user_id", ids_per_example = 1.0}]

[assumptions]                 # optional: any field of tpurec.sharding.assumptions.Assumptions
zipf_exponent = 1.2
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpurec.config import from_mapping, read_toml
from tpurec.errors import ConfigError
from tpurec.sharding.assumptions import Assumptions

if TYPE_CHECKING:
    from tpurec.sharding.measure import Measurement

SHARDINGS = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POOLINGS = ("sum", "mean", "none")
# Optimizer state: float32 elements per row, and per element of a row.
OPTIMIZER_STATE = {
    "sgd": (0, 0),
    "row_wise_adagrad": (1, 0),
    "adagrad": (0, 1),
    "partial_rowwise_adam": (1, 1),
    "adam": (0, 2),
}
# As TorchRec writes it; and as a recipe writes what TorchRec calls partial.
_OPTIMIZER_ALIASES = {
    "rowwise_adagrad": "row_wise_adagrad",
    "row_wise_adam": "partial_rowwise_adam",
    "rowwise_adam": "partial_rowwise_adam",
}


@dataclass(frozen=True)
class FeatureSpec:
    """An input column that looks rows up in a table.

    Args:
        name: the column.
        ids_per_example: mean number of ids in one example's bag.
        weighted: whether each id comes with a weight.

    Raises:
        ConfigError: the mean is negative or not finite.
    """

    name: str
    ids_per_example: float = 1.0
    weighted: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ids_per_example < 1e6:
            raise ConfigError(
                f"feature {self.name!r}: ids_per_example = {self.ids_per_example!r} is not between 0 and 1,000,000."
            )


@dataclass(frozen=True)
class TableSpec:
    """An embedding table, the features that use it, and what the planner may do with it.

    Args:
        name: unique.
        num_embeddings: rows.
        embedding_dim: elements of a row.
        features: the features that look up here; several may share the table.
        dtype: of the weights: `float32`, `bfloat16`, `float16`. Optimizer state is float32.
        pooling: `sum` or `mean` give one vector a bag, `none` one vector an id.
        optimizer: `sgd`, `row_wise_adagrad`, `adagrad`, `partial_rowwise_adam` or `adam`; TorchRec's
            spelling `rowwise_adagrad` is read as `row_wise_adagrad`, a recipe's `row_wise_adam` as
            `partial_rowwise_adam`.
        zipf_exponent: measured skew of the ids; None takes `unique_share`, or else the assumption.
        unique_share: measured distinct ids / ids, in a sample of `unique_share_ids` ids.
        unique_share_ids: size of that sample.
        allow: shardings that may be chosen; None for all.
        forbid: shardings that may not be chosen.
        pin: the one sharding to use.
        pin_ranks: with `pin`: the ranks that own the shards, in order.
        keep_together: tables with the same label get the same sharding and the same ranks.

    Raises:
        ConfigError: a value is out of range or unknown; the text names the table.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[FeatureSpec, ...]
    dtype: str = "float32"
    pooling: str = "sum"
    optimizer: str = "row_wise_adagrad"
    zipf_exponent: float | None = None
    unique_share: float | None = None
    unique_share_ids: int | None = None
    allow: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()
    pin: str | None = None
    pin_ranks: tuple[int, ...] | None = None
    keep_together: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", _OPTIMIZER_ALIASES.get(self.optimizer, self.optimizer))
        self._check(self.name != "", "name", "must not be empty")
        self._check(1 <= self.num_embeddings < 2**53, "num_embeddings", "must be 1 to 2^53 - 1")
        self._check(1 <= self.embedding_dim <= 2**16, "embedding_dim", "must be 1 to 65536")
        self._check(len(self.features) > 0, "features", "must name at least one feature")
        self._one_of("dtype", DTYPE_BYTES)
        self._one_of("pooling", POOLINGS)
        self._one_of("optimizer", OPTIMIZER_STATE)
        for key in ("allow", "forbid"):
            for sharding in getattr(self, key) or ():
                self._check(sharding in SHARDINGS, key, f"{sharding!r} is not one of {', '.join(SHARDINGS)}")
        self._check(self.allow is None or len(self.allow) > 0, "allow", "must not be empty; leave it out to allow all")
        if self.pin is not None:
            self._one_of("pin", SHARDINGS)
            self._check(self.pin in self.allowed, "pin", "is forbidden by this table's allow or forbid")
        self._check(self.pin_ranks is None or self.pin is not None, "pin_ranks", "needs pin")
        self._check(self.allowed != (), "forbid", "leaves no sharding")
        self._check(self.zipf_exponent is None or 0 <= self.zipf_exponent <= 4, "zipf_exponent", "must be 0 to 4")
        both = (self.unique_share is None) == (self.unique_share_ids is None)
        self._check(both, "unique_share", "goes with unique_share_ids: a share means nothing without its sample size")
        self._check(
            self.unique_share is None or 0 < self.unique_share <= 1, "unique_share", "must be above 0, at most 1"
        )
        self._check(self.unique_share_ids is None or self.unique_share_ids > 0, "unique_share_ids", "must be 1 or more")

    def _check(self, good: bool, key: str, message: str) -> None:
        if not good:
            raise ConfigError(f"table {self.name!r}: {key} = {getattr(self, key)!r}: {message}.")

    def _one_of(self, key: str, known: Any) -> None:
        self._check(getattr(self, key) in known, key, f"must be one of {', '.join(known)}")

    @property
    def allowed(self) -> tuple[str, ...]:
        """Shardings that this table's constraints leave."""
        chosen = (self.pin,) if self.pin else (SHARDINGS if self.allow is None else self.allow)
        return tuple(sharding for sharding in SHARDINGS if sharding in chosen and sharding not in self.forbid)

    @property
    def ids_per_example(self) -> float:
        """Mean number of ids of one example, all features together."""
        return sum(feature.ids_per_example for feature in self.features)

    @property
    def vectors_per_example(self) -> float:
        """Vectors that one example gets: one a bag, or one an id if nothing is pooled."""
        return self.ids_per_example if self.pooling == "none" else float(len(self.features))

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without padding."""
        return self.num_embeddings * self.embedding_dim * self.element_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state, without padding."""
        per_row, per_element = OPTIMIZER_STATE[self.optimizer]
        return self.num_embeddings * 4 * (per_row + per_element * self.embedding_dim)


@dataclass(frozen=True)
class TableList:
    """A table list as it was read.

    Args:
        tables: the tables, in the file's order.
        assumptions: the defaults with the file's changes.
        batch_size: the file's global batch size; None if it names none.
        measured: what was measured of the tables, if anything was.
    """

    tables: tuple[TableSpec, ...]
    assumptions: Assumptions = field(default_factory=Assumptions)
    batch_size: int | None = None
    measured: Measurement | None = None

    def __post_init__(self) -> None:
        check_names(self.tables)


def check_names(tables: tuple[TableSpec, ...] | list[TableSpec]) -> None:
    """Check what only the whole list shows.

    Args:
        tables: the tables.

    Raises:
        ConfigError: there is none, or two have one name, or one feature is in two tables.
    """
    if not tables:
        raise ConfigError("the table list is empty.", "Add [[tables]] entries.")
    for name, count in Counter(table.name for table in tables).items():
        if count > 1:
            raise ConfigError(f"table {name!r} is listed {count} times.", "Table names must be unique.")
    users = [(feature.name, table.name) for table in tables for feature in table.features]
    for name, count in Counter(feature for feature, _ in users).items():
        if count > 1:
            where = ", ".join(dict.fromkeys(repr(table) for feature, table in users if feature == name))
            raise ConfigError(
                f"feature {name!r} is listed {count} times (table {where}).",
                "A feature looks up in one table: give each its own name.",
            )


def read_tables(path: str | Path) -> TableList:
    """Read a table list.

    Args:
        path: a `.toml` or `.json` file.

    Returns:
        Tables, assumptions and batch size.

    Raises:
        ConfigError: naming file, table, key, value and remedy.
    """
    path = Path(path)
    mapping = _read_json(path) if path.suffix == ".json" else read_toml(path)
    return from_table_mapping(mapping, str(path))


def from_table_mapping(mapping: dict[str, Any], where: str) -> TableList:
    """Read a table list that is already parsed.

    Args:
        mapping: keys `tables`, and optionally `assumptions`, `batch_size`.
        where: what to call it in errors, such as the file's path.

    Returns:
        Tables, assumptions and batch size.

    Raises:
        ConfigError: naming table, key, value and remedy.
    """
    unknown = set(mapping) - {"tables", "assumptions", "batch_size"}
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {sorted(unknown)[0]!r}.", "Known keys: tables, assumptions, batch_size."
        )
    entries = mapping.get("tables")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: has no list 'tables'.", "Write one [[tables]] section a table.")
    tables = []
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: tables[{position}] = {entry!r}: a table is a mapping of keys and values.")
        with _named(where):
            tables.append(_table(entry, f"{where} tables[{position}] ({entry.get('name', 'no name')})"))
    section = mapping.get("assumptions", {})
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: assumptions = {section!r}: must be a section.", "Write [assumptions] above it.")
    with _named(where):
        assumptions = from_mapping(Assumptions, section, f"{where} [assumptions]")
    batch_size = mapping.get("batch_size")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ConfigError(f"{where}: batch_size = {batch_size!r}: must be a whole number, 1 or more.")
    with _named(where):
        return TableList(tuple(tables), assumptions, batch_size)


def _table(entry: dict[str, Any], where: str) -> TableSpec:
    features = entry.get("features")
    wrong = [one for one in features if not isinstance(one, dict)] if isinstance(features, list) else [features]
    if "features" in entry and wrong:
        raise ConfigError(
            f"{where}: features = {features!r}: must be a list of mappings.", 'Write features = [{name = "user_id"}].'
        )
    return from_mapping(TableSpec, entry, where)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Put the file's name before what a table or feature says of itself."""
    try:
        yield
    except ConfigError as error:
        named = error.problem if error.problem.startswith(where) else f"{where}: {error.problem}"
        raise ConfigError(named, error.remedy) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.", "Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, a JSON file is expected.", "Check the path.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}.", "A table list is JSON or TOML text.") from None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: the top level must be an object with a list 'tables'.")
    return mapping
