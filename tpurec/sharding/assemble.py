"""From the search's placement to shards, stacks, rungs and estimates; and back, to cost a plan from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from tpurec.errors import ConfigError
from tpurec.kernels.limits import num_tensors
from tpurec.sharding.choices import Choice
from tpurec.sharding.costs import PARTS, TableTraffic
from tpurec.sharding.plan import Estimates, PlacedTable, Rungs, Shard, StackPlan
from tpurec.sharding.space import NUM_PARTS, Cost, Placement, Space, State

_GOLDEN = 0.6180339887498949  # steps of this share of a circle spread any number of shifts evenly


class Assembly:
    """A placement in a space, described.

    Args:
        space: the problem.
        placement: the decision.
    """

    def __init__(self, space: Space, placement: Placement) -> None:
        self.space, self.placement = space, placement
        self.cost: Cost = space.cost(placement)
        self._everyone = tuple(range(space.model.num_ranks))
        self._item_of = {t: i for i, item in enumerate(space.items) for t in item.tables}
        self._state = State.of(space, placement)

    def _choice(self, position: int) -> tuple[Choice, tuple[int, ...]]:
        item = self._item_of[position]
        return self.space.items[item].choices[self.placement.choices[item]], self.placement.ranks[item]

    def placed(self, names: Sequence[str]) -> tuple[PlacedTable, ...]:
        """Every table with its shards.

        Args:
            names: tables in the order wanted.

        Returns:
            One entry per name.
        """
        positions = {table.name: position for position, table in enumerate(self.space.tables)}
        return tuple(self._placed(positions[name]) for name in names)

    def _placed(self, position: int) -> PlacedTable:
        space, table = self.space, self.space.tables[position]
        choice, ranks = self._choice(position)
        own = self._own_choice(position, choice)
        dim, row_bytes = table.embedding_dim, space.model.row_bytes
        if choice.sharding == "data_parallel":
            size = int(space.model.stored_rows(table.num_embeddings) * row_bytes(table, dim))
            shards = [Shard(self._everyone, "replicated", (0, dim), 0, size)]
        elif choice.sharding in ("table_wise", "column_wise"):
            width = dim // choice.copies
            size = int(space.model.stored_rows(table.num_embeddings) * row_bytes(table, width))
            owners = space.items[self._item_of[position]].pinned or ranks
            shards = [
                Shard((rank,), "all", (number * width, (number + 1) * width), 0, size)
                for number, rank in enumerate(owners)
            ]
        else:
            owners = self._everyone if choice.sharding == "row_wise" else ranks
            rows = space.model.stored_rows(ceil(table.num_embeddings / len(owners)))
            shift = int(position * _GOLDEN * len(owners)) % len(owners)
            shards = [Shard(owners, "modulo", (0, dim), shift, int(rows * row_bytes(table, dim)))]
        padding = space.padding(self._state.pair_ids)
        load = own.uniform + padding * own.padded + own.lump
        parts = {name: float(load[i]) for i, name in enumerate(PARTS) if load[i] > 0}
        seconds, why = sum(parts.values(), 0.0), self._reason(position)
        return PlacedTable(table, choice.sharding, choice.exchange, tuple(shards), seconds, parts, why)

    def _own_choice(self, position: int, choice: Choice) -> Choice:
        """The table's share of a choice that it may make together with other tables."""
        if len(self.space.items[self._item_of[position]].tables) == 1:
            return choice
        return {own.key: own for own in self.space.maker.of_table(self.space.tables[position])}[choice.key]

    def _reason(self, position: int) -> str:
        table, model = self.space.tables[position], self.space.model
        choice, _ = self._choice(position)
        item = self.space.items[self._item_of[position]]
        if table.pin:
            return "pinned"
        if len(item.tables) > 1:
            others = len(item.tables) - 1
            return f"kept together with {others} other table{'s' if others > 1 else ''} ({table.keep_together})"
        if len({own.sharding for own in item.choices}) == 1:
            return "the only sharding allowed"
        traffic = TableTraffic(table, model)
        if choice.sharding == "data_parallel":
            return f"small ({_size(table.weight_bytes)}): a copy on every rank needs no exchange"
        if table.pooling == "none" and choice.sharding == "table_wise":
            return "sequences, whose distinct rows travel, and one rank can carry it"
        if table.pooling == "none" and choice.sharding == "column_wise":
            return (
                f"sequences, whose distinct rows travel; {choice.copies} owners share it, one would be the slowest rank"
            )
        if choice.exchange == "unique_rows":
            what = "id" if table.pooling == "none" else "pooled vector"
            per_vector = traffic.local_unique * model.num_ranks / max(traffic.vectors, 1e-9)
            return f"even load on all ranks; {per_vector:.2g} distinct rows travel per {what}"
        if choice.sharding == "row_wise":
            return "even load on all ranks; long bags, so owners pool and parts are summed on the way"
        if choice.sharding == "table_row_wise":
            return f"long bags, pooled by the {choice.copies} ranks of one {choice.group}"
        if choice.sharding == "column_wise":
            return f"one vector a bag travels; {choice.copies} owners share it, one would be the slowest rank"
        return "one vector a bag travels, and one rank can carry it"

    def stacks(self) -> tuple[StackPlan, ...]:
        """Storages in use, the same shape on every rank."""
        space, found = self.space, []
        for number, stack in enumerate(space.stacks):
            size = float(self.cost.columns[NUM_PARTS + number])
            if size < 0.5:
                continue
            members = []
            for position, table in enumerate(space.tables):
                choice, _ = self._choice(position)
                width = table.embedding_dim // (choice.copies if choice.sharding == "column_wise" else 1)
                same = (width, table.dtype, table.optimizer) == (
                    stack.width,
                    stack.dtype,
                    stack.optimizer,
                )
                members += [table] if same else []
            row_bytes = space.model.row_bytes(members[0], stack.width)
            rows, row = round(size / row_bytes), stack.width * members[0].element_bytes
            limit = space.model.assume.max_tensor_bytes
            found.append(
                StackPlan(
                    f"{stack.dtype}x{stack.width}_{stack.optimizer}",
                    stack.width,
                    stack.dtype,
                    stack.optimizer,
                    rows,
                    tuple(table.name for table in members),
                    num_tensors(rows, row, limit) if space.model.slice.chip else 1,
                    round(size),
                )
            )
        return tuple(found)

    def rungs(self) -> Rungs:
        """Sizes of the even exchange per rank pair."""
        space, model = self.space, self.space.model
        ranks = model.num_ranks
        bags, vectors, pooled, rows = (np.zeros(ranks) for _ in range(4))
        for position, table in enumerate(space.tables):
            choice, owners = self._choice(position)
            traffic = TableTraffic(table, model)
            local, where = traffic.local_ids * model.assume.rung_padding, list(owners)
            if choice.exchange == "bags":
                bags[where] += local
                vectors[where] += traffic.vectors / ranks * table.embedding_dim / choice.copies
            elif choice.exchange == "unique_rows" and choice.copies:
                rows[where] += traffic.local_unique
            elif choice.sharding == "table_row_wise":
                pooled[where] += local * traffic.fullest_share(choice.copies)
                vectors[where] += traffic.vectors / ranks * table.embedding_dim / choice.copies
            elif choice.exchange == "partial_pools":
                pooled += local * traffic.fullest_share(ranks)
        unique = self._state.pair_ids * space.padding(self._state.pair_ids)
        return Rungs(ceil(bags.max()), ceil(vectors.max()), ceil(pooled.max()), ceil(unique + rows.max()))

    def estimates(self, bound_seconds: float, bound_kind: str) -> Estimates:
        """What the plan costs.

        Args:
            bound_seconds: the proven lower bound.
            bound_kind: how it was proven.

        Returns:
            The estimates.
        """
        space, cost = self.space, self.cost
        parts = {name: float(cost.columns[i]) for i, name in enumerate(PARTS)}
        for name, seconds in space.constant_parts.items():
            parts[name] = parts.get(name, 0.0) + seconds
        parts["latency"] = float(space.latency @ (self._state.flags > 0))
        loads = self._state.even()[None, :] + self._state.load
        stacks = cost.columns[NUM_PARTS:-1]
        uses = dict(space.constant_uses)
        uses["tables_and_optimizer"] = float(stacks.sum())
        uses["exchange_buffers"] = float(cost.columns[-1])
        uses["workspace"] = float(space.model.assume.workspace_bytes * int((stacks > 0.5).sum()))
        fixed = space.constant_bytes + uses["workspace"]
        in_use = fixed + loads[:, NUM_PARTS:].sum(axis=1)
        busy = space.constant_seconds + parts["latency"] + loads[:, :NUM_PARTS].sum(axis=1)
        return Estimates(
            step_seconds=cost.seconds,
            step_parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            lower_bound_seconds=bound_seconds,
            lower_bound_kind=bound_kind,
            samples_per_second=space.model.batch_size / cost.seconds,
            hbm_bytes_max=round(cost.bytes),
            hbm_bytes_mean=round(float(in_use.mean())),
            hbm_bytes_capacity=round(space.model.assume.hbm_bytes),
            hbm_bytes_budget=round(space.model.capacity_bytes),
            hbm_parts={name: round(size) for name, size in uses.items()},
            rank_seconds=tuple(float(value) for value in busy),
            rank_bytes=tuple(round(float(value)) for value in in_use),
            idle_ranks=self.idle_ranks(),
        )

    def idle_ranks(self) -> int:
        """Ranks that own no row of a table that is not replicated; none if all tables are replicated."""
        owners: set[int] = set()
        sharded = False
        for position, table in enumerate(self.space.tables):
            choice, _ = self._choice(position)
            if choice.sharding == "data_parallel":
                continue
            sharded = True
            if choice.sharding == "row_wise" and table.num_embeddings >= len(self._everyone):
                return 0
            placed = self._placed(position).shards
            owners |= {r for s in placed for r in s.ranks if s.rule == "all" or s.num_rows(r, table.num_embeddings)}
        return len(self._everyone) - len(owners) if sharded else 0


def placement_of(space: Space, placed: Sequence[PlacedTable]) -> Placement:
    """Find a plan's tables among a space's choices, to cost a plan that another planner made.

    Args:
        space: the problem, over the same tables.
        placed: where they are; for row_wise with an exchange of `none` the cheaper exchange is taken.

    Returns:
        The placement.

    Raises:
        ConfigError: a table's shards are not what any choice of the space makes.
    """
    by_name = {entry.name: entry for entry in placed}
    choices, ranks = [], []
    for item in space.items:
        entry = by_name[space.tables[item.tables[0]].name]
        owners = entry.ranks
        if entry.sharding == "column_wise":
            owners = tuple(rank for shard in entry.shards for rank in shard.ranks)  # a rank may own several
        fitting = []
        for number, choice in enumerate(item.choices):
            exchange = entry.exchange in ("none", choice.exchange) or choice.sharding != "row_wise"
            if choice.sharding != entry.sharding or not exchange:
                continue
            if choice.copies and choice.copies != len(owners):
                continue
            if choice.group and not any(set(owners) == set(map(int, g)) for g in space.groups[choice.group]):
                continue
            load = float((choice.uniform + choice.padded + choice.lump)[:NUM_PARTS].sum())
            fitting.append((load, number, owners if choice.copies else ()))
        if not fitting:
            raise ConfigError(
                f"table {entry.name!r}: {entry.sharding} on {len(owners)} ranks is not a choice on "
                f"{space.model.slice.name}.",
                "Plan it again.",
            )
        _, number, where = min(fitting)
        choices.append(number)
        ranks.append(where)
    return Placement(tuple(choices), tuple(ranks))


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    raise AssertionError
