"""From a plan to storages of equal shape on every rank, and to the places that a batch's ids go to.

A *place* is one shard of one table inside a *stack*: the storage of all shards of one width, dtype and optimizer. On
every rank a stack has as many rows as on its fullest rank, so that all ranks run one program. A *slot* is one feature's
lookup in one place: it fills a fixed group of columns of a collection's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec import EmbeddingBagConfig, PoolingType

from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.errors import ConfigError
from tpurec.sharding.plan import PlacedTable, Plan, Shard


@dataclass(frozen=True)
class ShardedTable:
    """A table of a model and where the plan puts it.

    Args:
        config: TorchRec's configuration; of sequence collections with a pooling of NONE.
        placed: the plan's entry.
        collection: number of its collection among the model's.
        dtype: of the weights as they are stored.
        frozen: whether its weights never change.
    """

    config: EmbeddingBagConfig
    placed: PlacedTable
    collection: int
    dtype: torch.dtype
    frozen: bool = False

    @property
    def unpooled(self) -> bool:
        """Whether each id gets a vector of its own."""
        return self.config.pooling is PoolingType.NONE


@dataclass(frozen=True)
class Place:
    """One shard of a table in a stack.

    Args:
        table: number of the table.
        shard: of the plan.
        exchange: `bags` (owners pool), `rows` (distinct rows travel, the requester pools) or `local` (every rank has
            a copy).
        row_starts: for each of the shard's ranks its first storage row.
    """

    table: int
    shard: Shard
    exchange: str
    row_starts: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One feature's lookup in one place.

    Args:
        feature: key in the batch.
        place: number of the place within the stack.
        column: first column in the collection's output.
        is_mean: whether the requester divides by the bag's length.
        owners: ranks that answer for it; none if the requester pools.
        answers: for each owner the number of the slot among those that it answers for.
    """

    feature: str
    place: int
    column: int
    is_mean: bool
    owners: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stack:
    """A storage that has the same shape on every rank.

    Args:
        width: columns.
        dtype: of the weights.
        optimizer: its kind of state and its hyper-parameters.
        collection: the collection that it belongs to, whose learning rate it takes.
        frozen: whether its rows never change.
        unpooled: whether its lookups are sequences, with a vector an id; then distinct rows travel, or are here.
        squares: whether its rows are columns of longer rows whose steps need a sum over all columns: for accumulators
            per row, or to clip gradients.
        num_rows: rows on every rank, those of its fullest one.
        places: the shards in it.
        bag_slots: lookups that owners pool, by output column.
        local_slots: lookups that the requester pools, or that are sequences, by output column.
        num_answers: slots that every rank answers for, those of the busiest one.
        num_replicated: rows that are the same on every rank; they come first.
    """

    width: int
    dtype: torch.dtype
    optimizer: EmbeddingOptimizer
    collection: int
    frozen: bool
    unpooled: bool
    squares: bool
    num_rows: int
    places: tuple[Place, ...]
    bag_slots: tuple[Slot, ...]
    local_slots: tuple[Slot, ...]
    num_answers: int
    num_replicated: int


def tables_of(
    plan: Plan,
    collections: Sequence[tuple[Sequence[EmbeddingBagConfig], Sequence[torch.dtype], Sequence[bool]]],
) -> tuple[ShardedTable, ...]:
    """Match a model's tables with a plan's.

    Args:
        plan: the plan.
        collections: for each collection of the model its tables, their dtypes, and which of them are frozen.

    Returns:
        The model's tables, in order.

    Raises:
        ConfigError: a table that the plan does not have or has with another size; one that it has and the model lacks;
            or two of one name.
    """
    found: dict[str, ShardedTable] = {}
    for number, (configs, dtypes, frozen) in enumerate(collections):
        for config, dtype, is_frozen in zip(configs, dtypes, frozen, strict=True):
            if config.name in found:
                raise ConfigError(
                    f"two collections of the model have a table {config.name!r}.", "A plan needs unique table names."
                )
            placed = plan.table(config.name)
            _check_size(config, placed)
            found[config.name] = ShardedTable(config, placed, number, dtype, is_frozen)
    spare = [placed.name for placed in plan.tables if placed.name not in found]
    if spare:
        raise ConfigError(f"the plan has a table {spare[0]!r} that the model lacks.", "Plan this model's tables.")
    return tuple(found.values())


def _check_size(config: EmbeddingBagConfig, placed: PlacedTable) -> None:
    planned = (placed.table.num_embeddings, placed.table.embedding_dim)
    if planned != (config.num_embeddings, config.embedding_dim):
        raise ConfigError(
            f"table {config.name!r}: {config.num_embeddings} x {config.embedding_dim} in the model, "
            f"{planned[0]} x {planned[1]} in the plan.",
            "Plan this model's tables.",
        )


def make_stacks(
    tables: Sequence[ShardedTable], optimizers: Sequence[EmbeddingOptimizer], num_ranks: int
) -> tuple[Stack, ...]:
    """Lay the shards of all tables out.

    Args:
        tables: of `tables_of`.
        optimizers: of each collection.
        num_ranks: ranks of the process group.

    Returns:
        The stacks, the same on every rank.

    Raises:
        ConfigError: a stack of 2^31 rows or more on one rank, which ids of 32 bits cannot reach; or columns whose rows
            are spread, under an optimizer that needs whole rows.
    """
    groups: dict[tuple, list[tuple[int, Shard]]] = {}
    for number, table in enumerate(tables):
        optimizer = optimizers[table.collection]
        squares = len(table.placed.shards) > 1 and _needs_whole_rows(optimizer) and not table.frozen
        if squares:
            _check_whole_columns(table, optimizer)
        for shard in table.placed.shards:
            width = shard.columns[1] - shard.columns[0]
            key = (width, table.dtype, table.collection, table.frozen, table.unpooled, squares)
            groups.setdefault(key, []).append((number, shard))
    columns = _first_columns(tables)
    stacks = []
    for (width, dtype, collection, frozen, unpooled, squares), shards in groups.items():
        places, num_replicated, num_rows = _laid_out(tables, shards, num_ranks)
        if num_rows >= 2**31:
            raise ConfigError(
                f"{num_rows} rows of width {width} on one rank; 2^31 - 1 is the limit of 32-bit ids.",
                "Plan more ranks, or more column shards.",
            )
        bags, local, num_answers = _slots(tables, places, columns, num_ranks)
        stacks.append(
            Stack(
                width,
                dtype,
                optimizers[collection],
                collection,
                frozen,
                unpooled,
                squares,
                num_rows,
                places,
                bags,
                local,
                num_answers,
                num_replicated,
            )
        )
    return tuple(stacks)


def _needs_whole_rows(optimizer: EmbeddingOptimizer) -> bool:
    """Whether a step of some columns of a row depends on its other columns."""
    return optimizer.max_gradient_norm is not None or any(kind == "row" for _, kind in optimizer.states)


def _check_whole_columns(table: ShardedTable, optimizer: EmbeddingOptimizer) -> None:
    """The all-reduce of squares adds what the column shards have at the same place: they must own the same rows."""
    spread = next((shard for shard in table.placed.shards if shard.rule != "all"), None)
    if spread is not None:
        raise ConfigError(
            f"table {table.config.name!r}: columns {spread.columns[0]} to {spread.columns[1]} have the row rule "
            f"{spread.rule!r}, and {type(optimizer).__name__} needs whole rows.",
            "Give each column shard all rows of its columns (rule 'all'), or do not split the columns.",
        )


def _laid_out(
    tables: Sequence[ShardedTable], shards: list[tuple[int, Shard]], num_ranks: int
) -> tuple[tuple[Place, ...], int, int]:
    """Places, replicated rows, and rows of the fullest rank."""
    used = [0] * num_ranks
    places: list[Place] = []
    num_replicated = 0
    for replicated in (True, False):  # replicated rows lie in front, where they are the same on every rank
        for number, shard in shards:
            if (shard.rule == "replicated") != replicated:
                continue
            starts = []
            for rank in shard.ranks:
                starts.append(used[rank])
                used[rank] += shard.num_rows(rank, tables[number].config.num_embeddings)
            places.append(Place(number, shard, _exchange(tables[number], shard), tuple(starts)))
        if replicated:
            num_replicated = used[0]
    return tuple(places), num_replicated, max(1, *used)


def _exchange(table: ShardedTable, shard: Shard) -> str:
    if shard.rule == "replicated":
        return "local"
    if table.unpooled:  # whatever the plan says: there are no pools to send, and a row that repeats travels once
        return "rows"
    placed = table.placed
    # A plan that came from elsewhere may leave the exchange of row-wise tables open.
    rows = placed.exchange == "unique_rows" or (placed.exchange == "none" and shard.rule == "modulo")
    return "rows" if rows else "bags"


def _first_columns(tables: Sequence[ShardedTable]) -> list[list[int]]:
    """For every table and each of its features the first column in its collection's output, as TorchRec orders them."""
    width: dict[int, int] = {}
    columns = []
    for table in tables:
        start = width.get(table.collection, 0)
        dim = table.config.embedding_dim
        columns.append([start + number * dim for number in range(len(table.config.feature_names))])
        width[table.collection] = start + dim * len(table.config.feature_names)
    return columns


def _slots(
    tables: Sequence[ShardedTable], places: Sequence[Place], columns: list[list[int]], num_ranks: int
) -> tuple[tuple[Slot, ...], tuple[Slot, ...], int]:
    bags, local = [], []
    for number, place in enumerate(places):
        config = tables[place.table].config
        for feature, name in enumerate(config.feature_names):
            column = columns[place.table][feature] + place.shard.columns[0]
            owners = place.shard.ranks if place.exchange == "bags" else ()
            slot = Slot(name, number, column, config.pooling is PoolingType.MEAN, owners)
            (bags if place.exchange == "bags" else local).append(slot)
    bags.sort(key=lambda slot: slot.column)
    local.sort(key=lambda slot: slot.column)
    used = [0] * num_ranks
    answers: dict[int, tuple[int, ...]] = {}
    # Slots with one owner come first on each: their ids need no sorting by owner, those of split tables do.
    for slot in sorted(bags, key=lambda slot: len(slot.owners) > 1):
        answers[id(slot)] = tuple(used[rank] for rank in slot.owners)
        for rank in slot.owners:
            used[rank] += 1
    numbered = tuple(
        Slot(slot.feature, slot.place, slot.column, slot.is_mean, slot.owners, answers[id(slot)]) for slot in bags
    )
    return numbered, tuple(local), max(used, default=0)
