"""What changes between two plans of the same tables, and what going from one to the other would move."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from tpurec.errors import ConfigError
from tpurec.sharding.plan import PlacedTable, Plan, Shard
from tpurec.sharding.tables import OPTIMIZER_STATE, TableSpec

_SAME = "Compare plans of the same tables."


@dataclass(frozen=True)
class TableChange:
    """One table in both plans.

    Args:
        name: the table.
        before: sharding in the old plan, such as `column_wise on 4 ranks`, and what else changes: exchange, dtype,
            optimizer.
        after: the same in the new plan.
        bytes_total: weights and optimizer state that the new plan's ranks hold, copies counted.
        bytes_moved: the part that a rank of the new plan does not have under the same number in the old one.
    """

    name: str
    before: str
    after: str
    bytes_total: int
    bytes_moved: int


@dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans.

    Args:
        before: slice of the old plan.
        after: slice of the new plan.
        tables: every table, in the new plan's order.
        batch_size: global examples per step of both plans.
        step_seconds: step of both plans; None where a plan has no estimates.
        hbm_bytes_max: memory of the fullest rank of both plans; likewise.
    """

    before: str
    after: str
    tables: tuple[TableChange, ...]
    batch_size: tuple[int, int]
    step_seconds: tuple[float | None, float | None]
    hbm_bytes_max: tuple[int | None, int | None]

    @property
    def bytes_moved(self) -> int:
        """Bytes that ranks of the new plan have to receive."""
        return sum(table.bytes_moved for table in self.tables)

    @property
    def bytes_total(self) -> int:
        """Bytes that ranks of the new plan hold."""
        return sum(table.bytes_total for table in self.tables)

    def summary(self) -> dict[str, Any]:
        """What `tpurec plan-diff --json` prints.

        Returns:
            Plain values: before, after, bytes_total, bytes_moved, batch_size, step_seconds, hbm_bytes_max, tables.
        """
        return {
            "before": self.before,
            "after": self.after,
            "bytes_total": self.bytes_total,
            "bytes_moved": self.bytes_moved,
            "batch_size": list(self.batch_size),
            "step_seconds": list(self.step_seconds),
            "hbm_bytes_max": list(self.hbm_bytes_max),
            "tables": [
                {
                    "name": table.name,
                    "before": table.before,
                    "after": table.after,
                    "changed": table.before != table.after or table.bytes_moved > 0,
                    "bytes_total": table.bytes_total,
                    "bytes_moved": table.bytes_moved,
                }
                for table in self.tables
            ],
        }


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans. Rank r of the one counts as rank r of the other, also if the slices differ.

    A table may have another optimizer or dtype in the new plan: weights count as kept where they stay (a rank can cast
    its own), the state of another optimizer does not.

    Args:
        before: the old plan.
        after: the new plan.

    Returns:
        What changes and what moves.

    Raises:
        ConfigError: the plans are not of the same tables.
    """
    old, new = {entry.name: entry for entry in before.tables}, {entry.name: entry for entry in after.tables}
    for name in [*old, *new]:
        if name not in old or name not in new:
            which = "old" if name in old else "new"
            raise ConfigError(f"table {name!r} is in only one of the plans, the {which} one.", _SAME)
        shapes = [f"{t.num_embeddings} rows x {t.embedding_dim}" for t in (old[name].table, new[name].table)]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"table {name!r} has another shape in the two plans: {' and '.join(shapes)}.", _SAME)
    changes = tuple(_change(old[name], new[name]) for name in new)
    estimates = (before.estimates, after.estimates)
    return PlanDiff(
        before.slice,
        after.slice,
        changes,
        (before.batch_size, after.batch_size),
        tuple(found.step_seconds if found else None for found in estimates),
        tuple(found.hbm_bytes_max if found else None for found in estimates),
    )


def _change(old: PlacedTable, new: PlacedTable) -> TableChange:
    table, total, kept = new.table, 0.0, 0.0
    same_state = old.table.optimizer == table.optimizer
    for shard in new.shards:
        row_bytes = _row_bytes(table, shard.columns[1] - shard.columns[0])
        total += row_bytes * sum(_rows_of(shard, table.num_embeddings))
        for had in old.shards:
            common = min(shard.columns[1], had.columns[1]) - max(shard.columns[0], had.columns[0])
            if common > 0:
                kept += _row_bytes(table, common, same_state) * _rows_in_both(had, shard, table.num_embeddings)
    return TableChange(new.name, _describe(old, new), _describe(new, old), round(total), round(max(total - kept, 0.0)))


def _describe(placed: PlacedTable, other: PlacedTable) -> str:
    """Sharding and ranks, and what else the other plan has otherwise."""
    count = len(placed.ranks)
    words = [f"{placed.sharding} on {count} rank{'s' if count != 1 else ''}"]
    if placed.sharding == other.sharding and placed.exchange != other.exchange:
        words.append(placed.exchange.replace("_", " "))  # of one sharding; others come with an exchange of their own
    for value, its in ((placed.table.dtype, other.table.dtype), (placed.table.optimizer, other.table.optimizer)):
        words += [value] if value != its else []
    return ", ".join(words)


def _row_bytes(table: TableSpec, columns: int, with_state: bool = True) -> float:
    per_row, per_element = OPTIMIZER_STATE[table.optimizer] if with_state else (0, 0)
    share = columns / table.embedding_dim  # state per row travels with its columns
    return columns * (table.element_bytes + 4 * per_element) + 4 * per_row * share


def _rows_of(shard: Shard, num_embeddings: int) -> list[int]:
    if shard.rule != "modulo":
        return [num_embeddings] * len(shard.ranks)
    count = len(shard.ranks)
    return [_count(count, (position - shard.shift) % count, 1, 0, num_embeddings) for position in range(count)]


def _rows_in_both(had: Shard, has: Shard, num_embeddings: int) -> int:
    """Rows that a rank had and has, summed over ranks."""
    if had.rule == has.rule == "modulo" and (had.ranks, had.shift) == (has.ranks, has.shift):
        return num_embeddings
    where = {rank: position for position, rank in enumerate(had.ranks)}
    rows = 0
    for position, rank in enumerate(has.ranks):
        if rank in where:
            old = _residue(had, where[rank])
            new = _residue(has, position)
            rows += _count(*old, *new, num_embeddings)
    return rows


def _residue(shard: Shard, position: int) -> tuple[int, int]:
    """Rows of an owner as (modulus, residue)."""
    if shard.rule != "modulo":
        return 1, 0
    count = len(shard.ranks)
    return count, (position - shard.shift) % count


def _count(first: int, first_rest: int, second: int, second_rest: int, limit: int) -> int:
    """How many of 0 .. limit - 1 leave both remainders (Chinese remainder theorem)."""
    common = gcd(first, second)
    if (first_rest - second_rest) % common:
        return 0
    period = first // common * second
    reduced = second // common
    steps = (second_rest - first_rest) // common * pow(first // common, -1, reduced) % reduced if reduced > 1 else 0
    start = (first_rest + first * steps) % period
    return max(0, -(-(limit - start) // period)) if limit > start else 0
