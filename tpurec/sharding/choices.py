"""The ways to shard a table, each with what it costs; and why a way that was asked for is impossible."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from tpurec.errors import ConfigError
from tpurec.kernels.limits import DIM_MULTIPLE, problem_of_rows
from tpurec.sharding.costs import GROUP_PARTS, LATENCY_FLAGS, PARTS, CostModel, Stack, TableTraffic
from tpurec.sharding.tables import OPTIMIZER_STATE, SHARDINGS, TableSpec

COLUMN_MULTIPLE = 8  # the kernels move rows as vectors of 8 or 16 lanes
_FLAG = {name: 1 << bit for bit, name in enumerate(LATENCY_FLAGS)}
_PART = {name: position for position, name in enumerate(PARTS)}


@dataclass(frozen=True)
class Choice:
    """One way to shard one table, or the tables that are kept together.

    Vectors have one entry per part of the step (seconds), one per stack (bytes), and one for exchange buffers (bytes).

    Args:
        sharding: `data_parallel`, `table_wise`, `column_wise`, `row_wise` or `table_row_wise`.
        exchange: `none`, `bags`, `unique_rows` or `partial_pools`.
        group: kind of rank group for table_row_wise: `host`, `line` or `plane`; else None.
        copies: ranks that carry `lump`; 0 if all load is uniform.
        uniform: load of every rank.
        padded: load of every rank that the padding of the even exchange multiplies.
        pair_ids: ids of a mean (requester, owner) pair in the exchange that is padded.
        lump: load of each rank that owns a shard.
        flags: which latencies this choice causes, a bit set over LATENCY_FLAGS.
    """

    sharding: str
    exchange: str
    group: str | None
    copies: int
    uniform: np.ndarray
    padded: np.ndarray
    pair_ids: float
    lump: np.ndarray
    flags: int

    def plus(self, other: Choice) -> Choice:
        """The two tables sharded the same way on the same ranks.

        Args:
            other: the same kind of choice of another table.

        Returns:
            The sum of both loads.
        """
        return Choice(
            self.sharding,
            self.exchange,
            self.group,
            self.copies,
            self.uniform + other.uniform,
            self.padded + other.padded,
            self.pair_ids + other.pair_ids,
            self.lump + other.lump,
            self.flags | other.flags,
        )

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes two tables' choices the same kind."""
        return (self.sharding, self.exchange, self.group or "", self.copies)


def column_splits(table: TableSpec, num_ranks: int, on_tpu: bool = False) -> list[int]:
    """Into how many column shards a table can be cut.

    Args:
        table: the table.
        num_ranks: each shard goes to a rank of its own.
        on_tpu: whether the ranks are TPUs, whose kernels must take the shards.

    Returns:
        Divisors of the dim, 2 or more, that leave a multiple of 8 columns, and on TPUs rows that the kernels take.
    """
    dim = table.embedding_dim
    splits = [k for k in range(2, min(num_ranks, dim) + 1) if dim % k == 0 and (dim // k) % COLUMN_MULTIPLE == 0]
    return [k for k in splits if not on_tpu or problem_of_rows(dim // k, table.dtype) is None]


def impossible(table: TableSpec, sharding: str, model: CostModel) -> str | None:
    """Why a table cannot be sharded in some way on this slice.

    Args:
        table: the table.
        sharding: the way.
        model: for the slice.

    Returns:
        The reason; None if it is possible.
    """
    ranks, name, on_tpu = model.num_ranks, model.slice.name, model.slice.chip is not None
    if sharding == "column_wise" and not column_splits(table, ranks, on_tpu):
        if ranks == 1:
            return f"column_wise needs 2 ranks or more, {name} has 1"
        multiple = DIM_MULTIPLE.get(table.dtype, COLUMN_MULTIPLE) if on_tpu else COLUMN_MULTIPLE
        return (
            f"column_wise needs shards of equal width, a multiple of {multiple} columns; "
            f"embedding_dim {table.embedding_dim} cannot be cut so into 2 to {ranks}"
        )
    whole = problem_of_rows(table.embedding_dim, table.dtype) if on_tpu and sharding != "column_wise" else None
    if whole is not None:
        return f"{sharding} has whole rows on a rank: {whole[0].rstrip('.')}"
    if sharding == "row_wise" and ranks == 1:
        return f"row_wise needs 2 ranks or more, {name} has 1"
    if sharding == "table_row_wise":
        if not model.groups:
            return f"table_row_wise needs hosts or torus lines smaller than the slice, {name} has none"
        if table.pooling == "none":
            return "table_row_wise sums partial pools, pooling 'none' has no pools"
    return None


class ChoiceMaker:
    """Makes the choices of tables for one cost model.

    Args:
        model: the costs.
        stacks: the stacks that any choice of any table may use, in column order.
    """

    def __init__(self, model: CostModel, stacks: list[Stack]) -> None:
        self.model = model
        self._column = {stack: len(PARTS) + position for position, stack in enumerate(stacks)}
        self.num_columns = len(PARTS) + len(stacks) + 1

    def of_table(self, table: TableSpec) -> list[Choice]:
        """All choices that a table's constraints and the slice leave.

        Args:
            table: the table.

        Returns:
            At least one choice.

        Raises:
            ConfigError: the table is pinned to what it cannot have, or its constraints leave nothing.
        """
        model, traffic = self.model, TableTraffic(table, self.model)
        reasons = [impossible(table, sharding, model) for sharding in table.allowed]
        possible = [way for way, reason in zip(table.allowed, reasons, strict=True) if reason is None]
        whole = problem_of_rows(table.embedding_dim, table.dtype) if model.slice.chip else None
        if not possible and whole is not None:
            raise ConfigError(f"table {table.name!r} cannot be trained on {model.slice.name}: {whole[0]}", whole[1])
        if not possible:
            others = [way for way in SHARDINGS if impossible(table, way, model) is None]
            raise ConfigError(
                f"table {table.name!r} cannot be {' or '.join(table.allowed)} on {model.slice.name}: "
                f"{'; '.join(reason for reason in reasons if reason)}.",
                f"Allow another sharding: it can be {' or '.join(others)}.",
            )
        choices: list[Choice] = []
        for sharding in possible:
            if sharding == "data_parallel":
                choices.append(self._data_parallel(table, traffic))
            elif sharding == "table_wise":
                choices.append(self._columns(table, traffic, 1))
            elif sharding == "column_wise":
                choices += [
                    self._columns(table, traffic, k)
                    for k in column_splits(table, model.num_ranks, model.slice.chip is not None)
                ]
            elif sharding == "row_wise":
                choices.append(self._unique_rows(table, traffic))
                if table.pooling != "none":
                    choices.append(self._partial_pools(table, traffic))
            else:
                choices += [self._group_pools(table, traffic, kind) for kind in model.groups]
        return choices

    def _vector(self, parts: dict[str, float] | None = None) -> np.ndarray:
        vector = np.zeros(self.num_columns)
        for part, seconds in (parts or {}).items():
            vector[_PART[part]] = seconds
        return vector

    def _store(self, vector: np.ndarray, table: TableSpec, rows: int, columns: int, buffers: float) -> np.ndarray:
        stack = Stack(columns, table.dtype, table.optimizer)
        vector[self._column[stack]] += self.model.stored_rows(rows) * self.model.row_bytes(table, columns)
        vector[-1] += buffers
        return vector

    def _choice(self, sharding: str, exchange: str, **given: object) -> Choice:
        empty = dict.fromkeys(("uniform", "padded", "lump"))
        merged = {**empty, "group": None, "copies": 0, "pair_ids": 0.0, "flags": 0, **given}
        for key in empty:
            if merged[key] is None:
                merged[key] = self._vector()
        return Choice(sharding, exchange, **merged)

    def _data_parallel(self, table: TableSpec, traffic: TableTraffic) -> Choice:
        """Every rank has the whole table: local lookups, gradients all-reduced, the same step everywhere."""
        model, dim = self.model, table.embedding_dim
        gradient = float(table.num_embeddings * dim * 4)
        alone = model.num_ranks == 1
        uniform = self._vector(
            {
                "rows": model.read_seconds(traffic.local_ids, dim, table.element_bytes)
                + model.update_seconds(table, traffic.local_ids, traffic.unique, dim),
                "all_reduce": 0.0 if alone else model.all_reduce.seconds_per_byte * gradient,
            }
        )
        self._store(uniform, table, table.num_embeddings, dim, 0.0 if alone else gradient)
        return self._choice("data_parallel", "none", uniform=uniform)

    def _columns(self, table: TableSpec, traffic: TableTraffic, num_shards: int) -> Choice:
        """Each owner has all rows of some columns; it gets every id and sends pooled vectors.

        Of sequences it gets the distinct rows of every rank and sends those; the ranks copy them to the ids' places.
        """
        model, assume = self.model, self.model.assume
        width = table.embedding_dim // num_shards
        unpooled = table.pooling == "none"
        asked = traffic.local_unique * model.num_ranks if unpooled else traffic.ids
        ids = asked * assume.id_bytes * (1.0 if unpooled else assume.rung_padding)
        vectors = (asked if unpooled else traffic.vectors) * width * assume.vector_bytes
        wire = model.all_to_all.seconds_per_byte
        update = model.update_seconds(table, asked, traffic.unique, width)
        flags = _FLAG["exchange"] if model.num_ranks > 1 else 0
        if num_shards > 1 and OPTIMIZER_STATE[table.optimizer][0]:
            # state per row needs the sum of squares over all columns: each owner sends its part to the others
            update += wire * traffic.unique * 4 * (num_shards - 1)
            flags |= _FLAG["squares"]
        lump = self._vector(
            {
                "exchange_ids": wire * ids,
                "rows": model.read_seconds(asked, width, table.element_bytes)
                + 2 * model.stream_seconds(vectors)
                + update,
                "exchange_vectors": 2 * wire * vectors,
            }
        )
        self._store(lump, table, table.num_embeddings, width, ids + vectors)
        sharding = "table_wise" if num_shards == 1 else "column_wise"
        if not unpooled:
            return self._choice(sharding, "bags", copies=num_shards, lump=lump, flags=flags)
        spread = self._vector(
            {"pool": 2 * num_shards * model.read_seconds(traffic.local_ids, width, assume.vector_bytes)}
        )
        spread[-1] = traffic.local_unique * table.embedding_dim * assume.vector_bytes  # the rows that come
        return self._choice(sharding, "unique_rows", copies=num_shards, uniform=spread, lump=lump, flags=flags)

    def _unique_rows(self, table: TableSpec, traffic: TableTraffic) -> Choice:
        """Rows dealt to all ranks by modulo; each rank asks for its distinct rows once and pools them itself."""
        model, assume, dim = self.model, self.model.assume, table.embedding_dim
        wire = model.all_to_all.seconds_per_byte
        ids = traffic.local_unique * assume.id_bytes
        rows = traffic.local_unique * dim * assume.vector_bytes
        pooled = 2 * model.read_seconds(traffic.local_ids, dim, assume.vector_bytes)  # pool rows; sum gradients per row
        uniform = self._vector(
            {
                "rows": model.read_seconds(traffic.local_unique, dim, table.element_bytes)
                + model.stream_seconds(rows)
                + model.update_seconds(table, traffic.local_unique, traffic.unique / model.num_ranks, dim),
                "pool": pooled,
            }
        )
        self._store(uniform, table, ceil(table.num_embeddings / model.num_ranks), dim, 0.0)
        padded = self._vector({"exchange_ids": wire * ids, "exchange_vectors": 2 * wire * rows})
        padded[-1] = ids + 2 * rows
        pair = traffic.local_unique / model.num_ranks
        return self._choice(
            "row_wise", "unique_rows", uniform=uniform, padded=padded, pair_ids=pair, flags=_FLAG["exchange"]
        )

    def _partial_pools(self, table: TableSpec, traffic: TableTraffic) -> Choice:
        """Rows dealt to all ranks by modulo; owners pool what they have, a reduce-scatter sums the parts."""
        model, assume, dim = self.model, self.model.assume, table.embedding_dim
        share = traffic.fullest_share(model.num_ranks)  # every pair is padded to the owner of the hottest row
        ids = traffic.ids * share * (assume.id_bytes + assume.bag_bytes) * assume.rung_padding
        pools = traffic.vectors * dim * assume.vector_bytes
        uniform = self._vector(
            {
                "exchange_ids": model.all_to_all.seconds_per_byte * ids,
                "rows": model.read_seconds(traffic.ids * share, dim, table.element_bytes)
                + 2 * model.stream_seconds(pools)
                + model.update_seconds(table, traffic.ids * share, traffic.unique / model.num_ranks, dim),
                "reduce_all": 2 * model.reduce_all.seconds_per_byte * pools,
            }
        )
        self._store(uniform, table, ceil(table.num_embeddings / model.num_ranks), dim, ids + pools)
        return self._choice("row_wise", "partial_pools", uniform=uniform, flags=_FLAG["exchange"] | _FLAG["reduce_all"])

    def _group_pools(self, table: TableSpec, traffic: TableTraffic, kind: str) -> Choice:
        """Rows dealt by modulo to the ranks of one host, torus line or plane; parts are summed there, then sent."""
        model, assume, dim = self.model, self.model.assume, table.embedding_dim
        size = len(model.groups[kind][1][0])
        share = traffic.fullest_share(size)
        wire = model.all_to_all.seconds_per_byte
        ids = traffic.ids * share * (assume.id_bytes + assume.bag_bytes) * assume.rung_padding
        pools = traffic.vectors * dim * assume.vector_bytes
        lump = self._vector(
            {
                "exchange_ids": wire * ids,
                "rows": model.read_seconds(traffic.ids * share, dim, table.element_bytes)
                + 2 * model.stream_seconds(pools)
                + model.update_seconds(table, traffic.ids * share, traffic.unique / size, dim),
                GROUP_PARTS[kind]: 2 * model.group_reduce[kind].seconds_per_byte * pools,
                "exchange_vectors": 2 * wire * pools / size,
            }
        )
        self._store(lump, table, ceil(table.num_embeddings / size), dim, ids + pools)
        flags = _FLAG["exchange"] | _FLAG[GROUP_PARTS[kind]]
        return self._choice("table_row_wise", "partial_pools", group=kind, copies=size, lump=lump, flags=flags)


def stacks_of(tables: list[TableSpec], num_ranks: int) -> list[Stack]:
    """Every stack that some choice of some table can use.

    Args:
        tables: all tables.
        num_ranks: ranks of the slice.

    Returns:
        Stacks in a fixed order.
    """
    found = set()
    for table in tables:
        for shards in [1, *(column_splits(table, num_ranks) if "column_wise" in table.allowed else [])]:
            found.add(Stack(table.embedding_dim // shards, table.dtype, table.optimizer))
    return sorted(found, key=lambda stack: (stack.width, stack.dtype, stack.optimizer))
