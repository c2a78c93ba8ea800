"""The planner's front door: tables and a slice in, a plan or the reason why there is none out."""

from __future__ import annotations

from collections.abc import Sequence

from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.plan import Infeasible, Plan
from tpurec.sharding.tables import TableSpec
from tpurec.topology.slices import SliceTopology


def plan(
    tables: Sequence[TableSpec],
    slice_: SliceTopology | str,
    batch_size: int,
    assumptions: Assumptions | None = None,
    seconds: float | None = None,
) -> Plan | Infeasible:
    """Shard tables over a slice so that the step of its slowest rank is short and every rank's memory suffices.

    Deterministic, and the same whatever the order of the tables.

    Args:
        tables: what to place.
        slice_: where: a slice or its name.
        batch_size: global examples per step; must divide evenly among the ranks.
        assumptions: by default all defaults (`read_tables` returns those of the file).
        seconds: stop searching after this long and return the best plan so far; by default search to the end.

    Returns:
        A plan (`.fits` is True, `.summary()` has the keys of `tpurec plan --json`), or `Infeasible`.

    Raises:
        ConfigError: bad input: names twice, a sharding that a table cannot have, a batch that the ranks cannot share.
    """
    raise NotImplementedError
