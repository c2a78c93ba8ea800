"""What the search decides over: items (tables, or tables kept together), their choices, and what a state costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpurec.errors import ConfigError
from tpurec.sharding.choices import Choice, ChoiceMaker, stacks_of
from tpurec.sharding.costs import LATENCY_FLAGS, PARTS, CostModel
from tpurec.sharding.skew import fullest_pair, fullest_pairs
from tpurec.sharding.tables import TableSpec

NUM_PARTS = len(PARTS)
_BITS = np.arange(len(LATENCY_FLAGS))


@dataclass(frozen=True)
class Item:
    """Tables that get one choice and one set of ranks.

    Args:
        tables: positions in the space's table list.
        choices: what can be chosen.
        pinned: the ranks that have to carry the lump, in order; None if the search decides.
    """

    tables: tuple[int, ...]
    choices: tuple[Choice, ...]
    pinned: tuple[int, ...] | None


@dataclass(frozen=True)
class Placement:
    """A complete decision.

    Args:
        choices: per item, the position of its choice.
        ranks: per item, the ranks that carry its lump, ascending; empty if all of its load is uniform.
    """

    choices: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cost:
    """What a placement costs.

    Args:
        seconds: one step.
        bytes: memory of the fullest rank.
        columns: per part (seconds) and per stack and for buffers (bytes): the maximum over ranks.
    """

    seconds: float
    bytes: float
    columns: np.ndarray


class Space:
    """Items and choices of one problem under one set of assumptions, in an order that does not depend on the input's.

    Args:
        tables: all tables.
        model: the costs.

    Raises:
        ConfigError: a constraint that cannot be met on this slice.
    """

    def __init__(self, tables: Sequence[TableSpec], model: CostModel) -> None:
        self.model = model
        self.tables = sorted(tables, key=_canonical)
        self.stacks = stacks_of(self.tables, model.num_ranks)
        self.maker = ChoiceMaker(model, self.stacks)
        self.num_columns = self.maker.num_columns
        self.items = _items(self.tables, self.maker)
        self.groups = {kind: np.array(ranks) for kind, (_, ranks) in model.groups.items()}
        self.constant_parts = model.constant_seconds(self.tables)
        self.constant_uses = model.constant_bytes(self.tables)
        self._constant_seconds = sum(self.constant_parts.values())
        self._constant_bytes = sum(self.constant_uses.values())
        self.latency = np.array([model.latency.get(name, 0.0) for name in LATENCY_FLAGS])

    @cached_property
    def kinds(self) -> Kinds:
        """All choices as arrays."""
        return Kinds(self.items)

    @property
    def constant_seconds(self) -> float:
        """Seconds that every placement takes."""
        return self._constant_seconds

    @property
    def constant_bytes(self) -> float:
        """Bytes that every placement takes on every rank."""
        return self._constant_bytes

    def padding(self, pair_ids: float) -> float:
        """Factor by which the even exchange of unique rows exceeds the mean.

        Args:
            pair_ids: ids of a mean rank pair, all tables that exchange unique rows together.

        Returns:
            At least 1.
        """
        return fullest_pair(pair_ids, self.model.num_ranks) / pair_ids if pair_ids > 0 else 1.0

    def paddings(self, pair_ids: np.ndarray) -> np.ndarray:
        """Many of `padding` at once.

        Args:
            pair_ids: float64, any shape.

        Returns:
            float64 of the same shape.
        """
        ids = np.where(pair_ids > 0, pair_ids, 1.0)
        return np.where(pair_ids > 0, fullest_pairs(ids, self.model.num_ranks) / ids, 1.0)

    def cost(self, placement: Placement) -> Cost:
        """Evaluate a placement from scratch.

        Args:
            placement: the decision.

        Returns:
            Its cost.
        """
        state = State(self)
        for position, (choice, ranks) in enumerate(zip(placement.choices, placement.ranks, strict=True)):
            state.put(position, choice, np.array(ranks, dtype=np.int64))
        return state.cost()


class Kinds:
    """All choices of all items as arrays, by kind of sharding.

    Args:
        items: of the space.

    Attributes:
        of_choice: per item, the kind of each of its choices.
        position: int64 `[kinds, items]`, the item's choice of a kind; -1 if it has none.
        lump, uniform, padded: float64 `[kinds, items, columns]`, of that choice.
        pairs: float64 `[kinds, items]`, its ids of a mean rank pair.
    """

    def __init__(self, items: list[Item]) -> None:
        numbers: dict[tuple[object, ...], int] = {}
        for item in items:
            for choice in item.choices:
                numbers.setdefault((*choice.key, choice.exchange), len(numbers))
        self.of_choice = [[numbers[(*choice.key, choice.exchange)] for choice in item.choices] for item in items]
        shape = (len(numbers), len(items))
        self.position, self.pairs = np.full(shape, -1), np.zeros(shape)
        wide = (*shape, len(items[0].choices[0].lump))
        self.lump, self.uniform, self.padded = np.zeros(wide), np.zeros(wide), np.zeros(wide)
        for number, item in enumerate(items):
            for position, (kind, choice) in enumerate(zip(self.of_choice[number], item.choices, strict=True)):
                self.position[kind, number], self.pairs[kind, number] = position, choice.pair_ids
                self.lump[kind, number], self.uniform[kind, number] = choice.lump, choice.uniform
                self.padded[kind, number] = choice.padded


class State:
    """A placement under construction, with the loads of every rank.

    Args:
        space: the problem.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.load = np.zeros((space.model.num_ranks, space.num_columns))
        self.uniform = np.zeros(space.num_columns)
        self.padded = np.zeros(space.num_columns)
        self.pair_ids = 0.0
        self.flags = np.zeros(len(LATENCY_FLAGS), dtype=np.int64)
        self.choice = [-1] * len(space.items)
        self.ranks: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(space.items)

    def put(self, item: int, choice: int, ranks: np.ndarray) -> None:
        """Place an item that is not placed.

        Args:
            item: its position.
            choice: the position of the choice.
            ranks: int64 ranks that carry the lump; empty if there is none.
        """
        self._add(self.space.items[item].choices[choice], ranks, 1)
        self.choice[item], self.ranks[item] = choice, ranks

    def take(self, item: int) -> tuple[int, np.ndarray]:
        """Remove an item.

        Args:
            item: its position.

        Returns:
            The choice and ranks that it had.
        """
        choice, ranks = self.choice[item], self.ranks[item]
        self._add(self.space.items[item].choices[choice], ranks, -1)
        self.choice[item] = -1
        return choice, ranks

    def _add(self, chosen: Choice, ranks: np.ndarray, sign: int) -> None:
        self.uniform += sign * chosen.uniform
        self.padded += sign * chosen.padded
        self.pair_ids += sign * chosen.pair_ids
        if len(ranks) == 1:
            self.load[ranks[0]] += sign * chosen.lump
        elif len(ranks):
            np.add.at(self.load, ranks, sign * chosen.lump)  # a plan from elsewhere may repeat a rank
        if chosen.flags:
            self.flags += sign * (chosen.flags >> _BITS & 1)

    def even(self) -> np.ndarray:
        """Load of every rank that does not depend on where lumps are, padding included."""
        return self.uniform + self.space.padding(self.pair_ids) * self.padded

    def cost(self) -> Cost:
        """What the present loads cost."""
        return self.total(self.even() + self.load.max(axis=0), self.flags > 0)

    def total(self, columns: np.ndarray, flags: np.ndarray) -> Cost:
        """Add up columns.

        Args:
            columns: maximum over ranks per column.
            flags: bool per latency.

        Returns:
            The cost.
        """
        space = self.space
        seconds = space.constant_seconds + float(columns[:NUM_PARTS].sum()) + float(space.latency @ flags)
        stacks = columns[NUM_PARTS:-1]
        workspace = space.model.assume.workspace_bytes * int((stacks > 0.5).sum())
        return Cost(seconds, space.constant_bytes + float(columns[NUM_PARTS:].sum()) + workspace, columns)

    def placement(self) -> Placement:
        """The decision, frozen."""
        return Placement(tuple(self.choice), tuple(tuple(int(r) for r in ranks) for ranks in self.ranks))

    @classmethod
    def of(cls, space: Space, placement: Placement) -> State:
        """A state with a placement's loads.

        Args:
            space: the problem.
            placement: the decision.

        Returns:
            A new state.
        """
        state = cls(space)
        for item, (choice, ranks) in enumerate(zip(placement.choices, placement.ranks, strict=True)):
            state.put(item, choice, np.array(ranks, dtype=np.int64))
        return state


def _canonical(table: TableSpec) -> tuple[object, ...]:
    """Tables in an order of their own: heavy ones first, names break ties."""
    return (-table.weight_bytes, -table.ids_per_example * table.embedding_dim, table.name)


def _items(tables: list[TableSpec], maker: ChoiceMaker) -> list[Item]:
    together: dict[str, list[int]] = {}
    for position, table in enumerate(tables):
        label = f"={table.keep_together}" if table.keep_together is not None else f"#{position}"
        together.setdefault(label, []).append(position)
    items = []
    for members in together.values():
        names = ", ".join(repr(tables[m].name) for m in members)
        common: dict[tuple[str, str, str, int], Choice] = {}
        for order, member in enumerate(members):
            own = {choice.key: choice for choice in maker.of_table(tables[member])}
            common = own if order == 0 else {k: common[k].plus(own[k]) for k in common if k in own}
        if not common:
            raise ConfigError(
                f"tables {names} are kept together but have no sharding in common.", "Change allow or forbid."
            )
        pins = {tables[m].pin_ranks for m in members if tables[m].pin_ranks is not None}
        if len(pins) > 1:
            raise ConfigError(f"tables {names} are kept together but pinned to different ranks.", "Pin one of them.")
        choices, pinned = tuple(common.values()), None
        if pins:
            choices, pinned = _pinned(names, choices, next(iter(pins)), maker.model)
        items.append(Item(tuple(members), choices, pinned))
    return items


def _pinned(
    names: str, choices: tuple[Choice, ...], ranks: tuple[int, ...], model: CostModel
) -> tuple[tuple[Choice, ...], tuple[int, ...] | None]:
    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"table {names}: pin_ranks = {list(ranks)}: {reason}.", "Change pin_ranks or leave it out.")

    outside = [rank for rank in ranks if not 0 <= rank < model.num_ranks]
    if outside or len(set(ranks)) != len(ranks):
        raise refuse(f"ranks must be different and 0 to {model.num_ranks - 1} on {model.slice.name}")
    sharding = choices[0].sharding
    if sharding in ("data_parallel", "row_wise"):
        if set(ranks) != set(range(model.num_ranks)):
            raise refuse(f"{sharding} uses all {model.num_ranks} ranks of {model.slice.name}")
        return choices, None
    fitting = tuple(choice for choice in choices if choice.copies == len(ranks))
    if sharding == "table_row_wise":
        sets = {kind: [set(members) for members in groups] for kind, (_, groups) in model.groups.items()}
        fitting = tuple(choice for choice in fitting if set(ranks) in sets[choice.group or ""])
    if not fitting:
        counts = sorted({choice.copies for choice in choices})
        what = "the ranks of one host, torus line or plane" if sharding == "table_row_wise" else f"{counts} ranks"
        raise refuse(f"{sharding} needs {what}")
    return fitting, tuple(ranks)
