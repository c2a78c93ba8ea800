"""Whether a plan owns every row and column of every table exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpurec.errors import ConfigError
from tpurec.sharding.tables import SHARDINGS, check_names

if TYPE_CHECKING:
    from tpurec.sharding.plan import PlacedTable, Plan

EXCHANGES = ("none", "bags", "unique_rows", "partial_pools")
ROW_RULES = ("all", "modulo", "replicated")


def check_plan(plan: Plan) -> None:
    """Check that every row and column of every table is owned exactly once, by ranks that exist.

    Args:
        plan: the plan.

    Raises:
        ConfigError: naming the table and what is wrong, or another value that no plan has.
    """
    check_names([placed.table for placed in plan.tables])
    num_ranks = plan.topology.num_ranks
    if isinstance(plan.batch_size, bool) or plan.batch_size < 1:
        raise ConfigError(
            f"plan: batch_size = {plan.batch_size!r} is not 1 or more.", "Make the plan again with tpurec plan."
        )
    for placed in plan.tables:
        _check_table(placed, num_ranks)


def _check_table(placed: PlacedTable, num_ranks: int) -> None:
    def fail(message: str) -> None:
        raise ConfigError(f"plan, table {placed.name!r}: {message}.", "Make the plan again with tpurec plan.")

    for what, found, known in (("sharding", placed.sharding, SHARDINGS), ("exchange", placed.exchange, EXCHANGES)):
        if found not in known:
            fail(f"{what} {found!r} is not one of {', '.join(known)}")
    expected = 0
    for shard in sorted(placed.shards, key=lambda shard: shard.columns):
        start, stop = shard.columns
        if start != expected or stop <= start:
            what = "more than once" if start < expected else "by no rank"
            fail(f"columns {min(start, expected)} to {max(start, expected)} are owned {what}")
        expected = stop
        if not shard.ranks or len(set(shard.ranks)) != len(shard.ranks):
            fail(f"the owners {shard.ranks} of columns {start} to {stop} are empty or repeat a rank")
        outside = [rank for rank in shard.ranks if not 0 <= rank < num_ranks]
        if outside:
            fail(f"rank {outside[0]} is not on the slice, which has {num_ranks} ranks")
        if shard.rule not in ROW_RULES:
            fail(f"row rule {shard.rule!r} is not one of {', '.join(ROW_RULES)}")
        if shard.rule == "all" and len(shard.ranks) != 1:
            fail(f"{len(shard.ranks)} ranks each own all rows of columns {start} to {stop}")
        if shard.rule == "replicated" and len(shard.ranks) != num_ranks:
            fail("a replicated table needs a copy on every rank")
        if not 0 <= shard.shift < len(shard.ranks):
            fail(f"shift {shard.shift} is not between 0 and {len(shard.ranks) - 1}")
    if expected != placed.table.embedding_dim:
        fail(f"columns {expected} to {placed.table.embedding_dim} are owned by no rank")
