"""A sharding plan: which rank owns which rows and columns of which table, and what it costs.

Row rules: `all` (the rank has every row of its columns), `modulo` (row r lives on `ranks[(r + shift) % n]`, n ranks, at
local row `r // n`) and `replicated` (every rank has a full copy). Each table has a shift of its own, because the
hottest rows of all tables would otherwise meet on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from tpurec import atomic
from tpurec.errors import ConfigError
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.infeasible import Infeasible, Problem
from tpurec.sharding.plan_check import check_plan
from tpurec.sharding.tables import FeatureSpec, TableSpec
from tpurec.topology.slices import SliceTopology


@dataclass(frozen=True)
class Shard:
    """Columns of a table, and the ranks that own their rows.

    Args:
        ranks: the owners, in the order of the row rule.
        rule: `all`, `modulo` or `replicated`.
        columns: first column, and the one after the last.
        shift: of the modulo rule.
        bytes: memory of the fullest owner: weights and optimizer state, padding included.
    """

    ranks: tuple[int, ...]
    rule: str
    columns: tuple[int, int]
    shift: int = 0
    bytes: int = 0

    def owner(self, row: int) -> int:
        """The rank that owns a row (the first of them if the shard is replicated).

        Args:
            row: global row.

        Returns:
            A rank.
        """
        return self.ranks[(row + self.shift) % len(self.ranks)] if self.rule == "modulo" else self.ranks[0]

    def num_rows(self, rank: int, num_embeddings: int) -> int:
        """Rows that a rank owns.

        Args:
            rank: any rank.
            num_embeddings: rows of the table.

        Returns:
            How many; 0 if the rank is not an owner.
        """
        if rank not in self.ranks:
            return 0
        if self.rule != "modulo":
            return num_embeddings
        count = len(self.ranks)
        first = (self.ranks.index(rank) - self.shift) % count
        return max(0, ceil((num_embeddings - first) / count))


@dataclass(frozen=True)
class PlacedTable:
    """Where one table is, and what it costs.

    Args:
        table: the table as it was given.
        sharding: `data_parallel`, `table_wise`, `column_wise`, `row_wise` or `table_row_wise`.
        exchange: `none`, `bags` (ids go to the owners, pooled vectors come back), `unique_rows` or `partial_pools`.
        shards: together they own every row and column exactly once.
        seconds: what it adds to the step of a rank that owns a shard, all parts of the step together.
        parts: those seconds by part of the step.
        reason: why this sharding, for people.
    """

    table: TableSpec
    sharding: str
    exchange: str
    shards: tuple[Shard, ...]
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Owners of any shard, ascending."""
        if len(self.shards) == 1:
            return tuple(sorted(self.shards[0].ranks))
        return tuple(sorted({rank for shard in self.shards for rank in shard.ranks}))

    @property
    def bytes(self) -> int:
        """Memory of the fullest owner."""
        if len(self.shards) == 1:
            return self.shards[0].bytes
        per_rank: dict[int, int] = {}
        for shard in self.shards:
            for rank in shard.ranks:
                per_rank[rank] = per_rank.get(rank, 0) + shard.bytes
        return max(per_rank.values())


@dataclass(frozen=True)
class StackPlan:
    """A storage that has the same shape on every rank.

    Args:
        name: unique in the plan.
        width: elements of a stored row.
        dtype: of the weights.
        optimizer: whose state its rows carry.
        rows: stored rows on every rank: those of its fullest rank.
        tables: tables with shards in it, in the order in which each rank lays them out.
        num_tensors: tensors that its weights are cut into, because an operand of a kernel has 16 GiB at most.
        bytes: weights and optimizer state on every rank.
    """

    name: str
    width: int
    dtype: str
    optimizer: str
    rows: int
    tables: tuple[str, ...]
    num_tensors: int
    bytes: int


@dataclass(frozen=True)
class Estimates:
    """What the cost model says of a plan; see `tpurec.sharding.costs` for the parts of a step.

    Args:
        step_seconds: sum over parts of the maximum over ranks.
        step_parts: seconds by part.
        lower_bound_seconds: no plan for these tables on this slice is faster under the same cost model.
        lower_bound_kind: how that was proven: `enumeration` (the plan is optimal), `boxes` or
            `mixed program`.
        samples_per_second: batch size / step.
        hbm_bytes_max: memory of the fullest rank; stacks count as allocated, with equal shapes everywhere.
        hbm_bytes_mean: memory in use, mean over ranks.
        hbm_bytes_capacity: what libtpu lets a program use on one rank.
        hbm_bytes_budget: the capacity less the reserve: what the plan had to fit into.
        hbm_parts: bytes of the fullest rank by use.
        rank_seconds: load of every rank, all parts of the step together, waiting excluded.
        rank_bytes: memory in use on every rank.
        idle_ranks: ranks that own no row of any table that is not replicated everywhere.
    """

    step_seconds: float
    step_parts: dict[str, float]
    lower_bound_seconds: float
    lower_bound_kind: str
    samples_per_second: float
    hbm_bytes_max: int
    hbm_bytes_mean: int
    hbm_bytes_capacity: int
    hbm_bytes_budget: int
    hbm_parts: dict[str, int]
    rank_seconds: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    idle_ranks: int


@dataclass(frozen=True)
class Rungs:
    """Static sizes of the even exchange, per (requester, owner) pair and step.

    Args:
        bag_ids: ids to owners that pool whole bags.
        bag_vectors: pooled elements back.
        pooled_ids: ids, each with its bag number, to owners that pool parts.
        unique_rows: distinct rows, of all tables that exchange unique rows.
    """

    bag_ids: int
    bag_vectors: int
    pooled_ids: int
    unique_rows: int


@dataclass(frozen=True)
class Plan:
    """A plan that fits.

    Args:
        slice: the slice's name.
        batch_size: global examples per step.
        tables: in the order of the table list.
        stacks: storages, the same on every rank.
        rungs: sizes of the exchange.
        assumptions: with the slice's figures filled in.
        estimates: of the cost model; None for a plan that came from elsewhere.
        plan_seconds: time the search took; not part of the plan's identity.
        stopped_early: whether `seconds` cut the search short.
    """

    slice: str
    batch_size: int
    tables: tuple[PlacedTable, ...]
    stacks: tuple[StackPlan, ...]
    rungs: Rungs
    assumptions: Assumptions
    estimates: Estimates | None = None
    plan_seconds: float = field(default=0.0, compare=False)
    stopped_early: bool = False

    fits = True

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def topology(self) -> SliceTopology:
        """The slice."""
        return SliceTopology.parse(self.slice)

    def table(self, name: str) -> PlacedTable:
        """Find a table.

        Args:
            name: its name.

        Returns:
            Where it is.

        Raises:
            ConfigError: the plan has no such table.
        """
        for placed in self.tables:
            if placed.name == name:
                return placed
        raise ConfigError(f"the plan has no table {name!r}.", f"It has: {', '.join(p.name for p in self.tables)}.")

    def summary(self) -> dict[str, Any]:
        """What `tpurec plan --json` prints.

        Returns:
            Plain values: fits, slice, num_chips, num_ranks, idle_ranks, step_seconds, step_parts, lower_bound_seconds,
            samples_per_second, hbm_bytes_max, hbm_bytes_mean, hbm_bytes_capacity, plan_seconds, tables, problems; and
            lower_bound_kind, hbm_parts, stopped_early.
        """
        slice_, found = self.topology, self.estimates
        if found is None:
            raise ConfigError("this plan has no estimates.", "Make it with tpurec plan, or evaluate it first.")
        return {
            "fits": True,
            "slice": self.slice,
            "num_chips": slice_.num_chips,
            "num_ranks": slice_.num_ranks,
            "idle_ranks": found.idle_ranks,
            "step_seconds": found.step_seconds,
            "step_parts": dict(found.step_parts),
            "lower_bound_seconds": found.lower_bound_seconds,
            "lower_bound_kind": found.lower_bound_kind,
            "samples_per_second": found.samples_per_second,
            "hbm_bytes_max": found.hbm_bytes_max,
            "hbm_bytes_mean": found.hbm_bytes_mean,
            "hbm_bytes_capacity": found.hbm_bytes_capacity,
            "hbm_parts": dict(found.hbm_parts),
            "plan_seconds": self.plan_seconds,
            "stopped_early": self.stopped_early,
            "tables": [
                {
                    "name": placed.name,
                    "sharding": placed.sharding,
                    "exchange": placed.exchange,
                    "ranks": list(placed.ranks),
                    "bytes": placed.bytes,
                    "seconds": placed.seconds,
                    "parts": dict(placed.parts),
                    "reason": placed.reason,
                }
                for placed in self.tables
            ],
            "problems": [],
        }

    def to_json(self) -> str:
        """The plan as versioned JSON text (`tpurec/sharding/plan_json.py`), the same for the same plan.

        Returns:
            Text that `from_json` reads back to an equal plan.
        """
        from tpurec.sharding.plan_json import to_json

        return to_json(self)

    def save(self, path: str | Path) -> None:
        """Write the JSON form; the file appears whole or not at all.

        Args:
            path: the file.
        """
        atomic.write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file and check it.

        Args:
            path: the file.

        Returns:
            The plan.

        Raises:
            ConfigError: the file is missing or no plan, its version is unknown, or its shards do not own every row and
                column of every table exactly once.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file.", "Check the path.") from None
        except IsADirectoryError:
            raise ConfigError(
                f"{path}: is a folder, a plan file is expected.", "Make one: tpurec plan --out."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not a sharding plan: {error}.", "Make one: tpurec plan --out.") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read the JSON form and check it.

        Args:
            text: what `to_json` wrote.
            where: what to call it in errors.

        Returns:
            The plan.

        Raises:
            ConfigError: see `load`.
        """
        from tpurec.sharding.plan_json import from_json

        return from_json(text, where)


__all__ = ["Estimates", "FeatureSpec", "Infeasible", "PlacedTable", "Plan", "Problem", "Rungs", "Shard", "StackPlan"]
