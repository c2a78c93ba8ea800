"""Even the loads of ranks while every item keeps its choice: shards move to other ranks, or trade places.

Improving one item at a time moves all of its shards at once and never trades two. Where a rank carries only a few
large shards, as with many tables on many ranks, that leaves ranks a quarter above the mean. Here the shards of the
fullest ranks move or trade places with a shard of any other rank, whichever lowers the power mean of the loads most;
and items on a host, line or plane move to another one, or trade places with an item there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpurec.sharding.choices import Choice
from tpurec.sharding.space import State

_PATIENCE = 64  # fullest ranks without a better place for any of their shards, before it ends
_NEGLIGIBLE = 1e-6  # columns that add less than this share are not looked at
_ENOUGH = 1e-9  # relative gain below which a move is noise


def balance(state: State, price: np.ndarray, power: int, most_moves: int, out_of_time: Callable[[], bool]) -> State:
    """Move and trade single shards until nothing helps.

    Args:
        state: some or all items placed; not changed.
        price: per column, seconds that a unit of its maximum costs.
        power: of the mean over ranks that is minimised; the higher, the nearer to the maximum.
        most_moves: moves and trades at most.
        out_of_time: asked between moves; True ends it.

    Returns:
        A new state with the same choices.
    """
    shards = _Shards(state, price, power)
    tried = np.zeros(len(shards.powered), dtype=bool)  # fullest ranks that no move helps, until they change
    for _ in range(most_moves):
        if out_of_time():
            break
        weight = np.where(tried, -1.0, shards.weight())
        rank = int(np.argmax(weight))
        if weight[rank] < 0 or tried.sum() >= _PATIENCE:
            break
        touched = shards.relieve(rank)
        if touched is None:
            tried[rank] = True
        else:
            tried[touched] = False
    return shards.state()


class _Shards:
    """Single shards that may move, and powers of the loads of every rank in the columns that count."""

    def __init__(self, state: State, price: np.ndarray, power: int) -> None:
        self._space, self._state, self._power = state.space, state, power
        items, groups = state.space.items, state.space.groups
        most = state.load.max(axis=0) * price
        self._columns = np.flatnonzero(most > _NEGLIGIBLE * most.sum())
        self._unit = state.load[:, self._columns].max(axis=0)  # loads near 1 keep their powers inside float64
        self._price = price[self._columns] * self._unit
        placed = [i for i, pick in enumerate(state.choice) if pick >= 0 and items[i].pinned is None]
        chosen = {i: items[i].choices[state.choice[i]] for i in placed}
        free = [i for i in placed if chosen[i].copies and chosen[i].group is None]
        self._item = np.array([i for i in free for _ in state.ranks[i]], dtype=np.int64)
        self._rank = np.array([rank for i in free for rank in state.ranks[i]], dtype=np.int64)
        self._lump = self._lumps([chosen[i] for i in self._item])
        self._owns = np.zeros((len(items), len(state.load)), dtype=bool)
        self._owns[self._item, self._rank] = True
        self._load = np.maximum(state.load[:, self._columns], 0.0) / self._unit
        self.powered = self._load**power
        self._whole: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # kind: items, their groups, lumps
        for kind, members in groups.items():
            mine = [i for i in placed if chosen[i].group == kind]
            first = {int(group.min()): number for number, group in enumerate(members)}
            at = np.array([first[int(min(state.ranks[i]))] for i in mine], dtype=np.int64)
            self._whole[kind] = np.array(mine, dtype=np.int64), at, self._lumps([chosen[i] for i in mine])

    def _lumps(self, chosen: list[Choice]) -> np.ndarray:
        return (
            np.array([choice.lump[self._columns] for choice in chosen]).reshape(len(chosen), len(self._columns))
            / self._unit
        )

    def weight(self) -> np.ndarray:
        """What each rank adds to the value."""
        sums = self.powered.sum(axis=0)
        return self.powered @ (self._price * sums ** (1 / self._power - 1))

    def _value(self, sums: np.ndarray) -> np.ndarray:
        return (np.maximum(sums, 0.0) / len(self.powered)) ** (1 / self._power) @ self._price

    def relieve(self, rank: int) -> np.ndarray | None:
        """Move a shard or a group's item off a rank, or trade it, if that helps.

        Args:
            rank: the rank.

        Returns:
            The ranks whose loads changed; None if nothing helps.
        """
        sums = self.powered.sum(axis=0)
        best = float(self._value(sums)) * (1 - _ENOUGH)
        change: Callable[[], np.ndarray] | None = None
        for shard in np.flatnonzero(self._rank == rank):
            value, found = self._best_of_shard(int(shard), rank, sums)
            if value < best:
                best, change = value, found
        for kind, (_, at, _) in self._whole.items():
            group = int(np.flatnonzero((self._space.groups[kind] == rank).any(axis=1))[0])
            for number in np.flatnonzero(at == group):
                value, found = self._best_of_item(kind, int(number), sums)
                if value < best:
                    best, change = value, found
        return None if change is None else change()

    def _best_of_shard(self, shard: int, rank: int, sums: np.ndarray) -> tuple[float, Callable[[], np.ndarray]]:
        item, lump, power = self._item[shard], self._lump[shard], self._power
        left = np.maximum(self._load[rank] - lump, 0.0)
        without = sums - self.powered[rank]
        moved = without + left**power - self.powered + (self._load + lump) ** power
        moving = np.where(self._owns[item], np.inf, self._value(moved))
        to = int(np.argmin(moving))
        there = self._rank
        theirs = np.maximum(self._load[there] - self._lump, 0.0) + lump
        traded = without - self.powered[there] + (left + self._lump) ** power + theirs**power
        barred = self._owns[item][there] | self._owns[self._item, rank]
        trading = np.where(barred, np.inf, self._value(traded))
        other = int(np.argmin(trading))
        if moving[to] <= trading[other]:
            return float(moving[to]), lambda: self._move(shard, to)
        return float(trading[other]), lambda: self._trade(shard, other)

    def _best_of_item(self, kind: str, number: int, sums: np.ndarray) -> tuple[float, Callable[[], np.ndarray]]:
        _, at, lumps = self._whole[kind]
        members, power, lump, here = self._space.groups[kind], self._power, lumps[number], at[number]
        left = np.maximum(self._load[members[here]] - lump, 0.0)
        without = sums - self.powered[members[here]].sum(axis=0)
        before = self.powered[members].sum(axis=1)
        moved = without + (left**power).sum(axis=0) - before
        moving = self._value(moved + ((self._load[members] + lump) ** power).sum(axis=1))
        moving[here] = np.inf
        to = int(np.argmin(moving))
        theirs = np.maximum(self._load[members[at]] - lumps[:, None], 0.0) + lump
        traded = without - before[at] + ((left + lumps[:, None]) ** power).sum(axis=1) + (theirs**power).sum(axis=1)
        trading = np.where(at == here, np.inf, self._value(traded))
        other = int(np.argmin(trading))
        if moving[to] <= trading[other]:
            return float(moving[to]), lambda: self._move_item(kind, number, to)
        return float(trading[other]), lambda: self._trade_items(kind, number, other)

    def _move_item(self, kind: str, number: int, to: int) -> np.ndarray:
        _, at, lumps = self._whole[kind]
        members = self._space.groups[kind]
        old, new = members[at[number]], members[to]
        self._add(old, -lumps[number])
        self._add(new, lumps[number])
        at[number] = to
        return np.concatenate([old, new])

    def _trade_items(self, kind: str, number: int, other: int) -> np.ndarray:
        at = self._whole[kind][1]
        here, there = int(at[number]), int(at[other])
        self._move_item(kind, other, here)
        return self._move_item(kind, number, there)

    def _trade(self, shard: int, other: int) -> np.ndarray:
        here, there = int(self._rank[shard]), int(self._rank[other])
        self._move(other, here)
        return self._move(shard, there)

    def _move(self, shard: int, to: int) -> np.ndarray:
        at, item = int(self._rank[shard]), self._item[shard]
        self._owns[item, at], self._owns[item, to] = False, True
        self._add(np.array([at]), -self._lump[shard])
        self._add(np.array([to]), self._lump[shard])
        self._rank[shard] = to
        return np.array([at, to])

    def _add(self, ranks: np.ndarray, lump: np.ndarray) -> None:
        self._load[ranks] = np.maximum(self._load[ranks] + lump, 0.0)
        self.powered[ranks] = self._load[ranks] ** self._power

    def state(self) -> State:
        """The state with everything where it is now."""
        new = State(self._space)
        where: dict[int, list[int]] = {}
        for item, rank in zip(self._item.tolist(), self._rank.tolist(), strict=True):
            where.setdefault(item, []).append(rank)
        for kind, (items, at, _) in self._whole.items():
            for item, group in zip(items.tolist(), at.tolist(), strict=True):
                where[item] = self._space.groups[kind][group].tolist()
        for item, choice in enumerate(self._state.choice):
            if choice >= 0:
                ranks = np.array(sorted(where[item]), dtype=np.int64) if item in where else self._state.ranks[item]
                new.put(item, choice, ranks)
        return new
