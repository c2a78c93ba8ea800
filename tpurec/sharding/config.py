"""The recipe's section [sharding]: how many workers, which slice, which plan, and what the planner may do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tpurec.config import from_mapping
from tpurec.errors import ConfigError
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.tables import TableSpec
from tpurec.topology.slices import SliceTopology

WireDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TableConstraint:
    """What the planner may do with one table; the fields of `tpurec.sharding.tables.TableSpec` of these names.

    Args:
        allow: shardings that may be chosen; None for all.
        forbid: shardings that may not be chosen.
        pin: the one sharding to use.
        pin_ranks: with `pin`: the ranks that own the shards, in order.
        keep_together: tables with the same label get the same sharding and the same ranks.
    """

    allow: list[str] | None = None
    forbid: list[str] = field(default_factory=list)
    pin: str | None = None
    pin_ranks: list[int] | None = None
    keep_together: str | None = None


@dataclass(frozen=True)
class ShardingConfig:
    """How the tables are spread over workers.

    Args:
        num_workers: training processes, each with one torch device; 0 trains in one process without sharding. The
            slice has as many ranks.
        slice: where the workers run, such as `v6e-16` (with `device.kind = "tpu"`); None for `cpu-N`.
        plan: plan file, as `tpurec plan --out` writes it; None to plan when training begins.
        wire_dtype: of pooled vectors and gradients between workers: `float32`, or `bfloat16` for half the bytes.
        constraints: table name to what the planner may do with it.
        assumptions: of the planner, name to value: fields of `tpurec.sharding.assumptions.Assumptions`. They come
            before what the recipe itself says of its dense part and its wire.
    """

    num_workers: int = 0
    slice: str | None = None
    plan: str | None = None
    wire_dtype: WireDtype = "float32"
    constraints: dict[str, TableConstraint] = field(default_factory=dict)
    assumptions: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers = {self.num_workers}: must be 0 (no sharding), 1 or more")
        try:
            self.assume({})
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.slice is None:
            return
        try:
            ranks = SliceTopology.parse(self.slice).num_ranks
        except ConfigError as error:
            raise ValueError(f"slice = {self.slice!r}: {error.problem} {error.remedy}".rstrip()) from None
        if self.num_workers not in (0, ranks):
            raise ValueError(
                f"num_workers = {self.num_workers}, but slice = {self.slice!r} has {ranks} ranks: "
                f"leave num_workers out, or set it to {ranks}"
            )

    @property
    def num_ranks(self) -> int:
        """Training processes; 0 without sharding."""
        return self.num_workers if self.slice is None else SliceTopology.parse(self.slice).num_ranks

    @property
    def topology(self) -> SliceTopology:
        """The slice; only with sharding."""
        return SliceTopology.parse(self.slice or f"cpu-{self.num_workers}")

    def assume(self, known: Mapping[str, float]) -> Assumptions:
        """What the planner takes for granted.

        Args:
            known: assumptions that the rest of the recipe decides.

        Returns:
            The defaults, with those, the wire's width and this section's `assumptions` in their place.

        Raises:
            ConfigError: there is no such assumption, or its value is out of range.
        """
        wire = {"vector_bytes": 2} if self.wire_dtype == "bfloat16" else {}
        return from_mapping(Assumptions, {**known, **wire, **self.assumptions}, "assumptions")

    def constrain(self, tables: Sequence[TableSpec]) -> tuple[TableSpec, ...]:
        """Put the constraints into a table list.

        Args:
            tables: the tables of the recipe.

        Returns:
            The tables, constrained.

        Raises:
            ConfigError: a constraint for a table that is not there, or one that cannot be kept.
        """
        known = [table.name for table in tables]
        unknown = sorted(self.constraints.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"sharding.constraints.{unknown[0]}: there is no table {unknown[0]!r}.",
                f"The tables: {', '.join(known)}.",
            )
        found = []
        for table in tables:
            constraint = self.constraints.get(table.name)
            if constraint is not None:
                table = dataclasses.replace(
                    table,
                    allow=None if constraint.allow is None else tuple(constraint.allow),
                    forbid=tuple(constraint.forbid),
                    pin=constraint.pin,
                    pin_ranks=None if constraint.pin_ranks is None else tuple(constraint.pin_ranks),
                    keep_together=constraint.keep_together,
                )
            found.append(table)
        return tuple(found)
