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
from tpurec.sharding.loads import Loads, relieve_fullest
from tpurec.sharding.space import State

_PATIENCE = 32  # fullest ranks without a better place for any of their shards, before it ends
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
    relieve_fullest(shards.loads, shards.relieve, most_moves, _PATIENCE, out_of_time)
    return shards.state()


class _Shards:
    """Single shards that may move, and items that may move as a whole between groups of ranks."""

    def __init__(self, state: State, price: np.ndarray, power: int) -> None:
        self._space, self._state = state.space, state
        self.loads = Loads(state, price, power)
        items, groups = state.space.items, state.space.groups
        placed = [i for i, pick in enumerate(state.choice) if pick >= 0 and items[i].pinned is None]
        chosen = {i: items[i].choices[state.choice[i]] for i in placed}
        free = [i for i in placed if chosen[i].copies and chosen[i].group is None]
        self._item = np.array([i for i in free for _ in state.ranks[i]], dtype=np.int64)
        self._rank = np.array([rank for i in free for rank in state.ranks[i]], dtype=np.int64)
        self._lump = self._lumps([chosen[i] for i in self._item])
        self._owns = np.zeros((len(items), len(state.load)), dtype=bool)
        self._owns[self._item, self._rank] = True
        self._whole: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # kind: items, their groups, lumps
        self._group_of: dict[str, np.ndarray] = {}  # kind: group of each rank
        for kind, members in groups.items():
            mine = [i for i in placed if chosen[i].group == kind]
            self._group_of[kind] = np.zeros(len(state.load), dtype=np.int64)
            self._group_of[kind][members] = np.arange(len(members))[:, None]
            at = self._group_of[kind][[int(state.ranks[i][0]) for i in mine]]
            self._whole[kind] = np.array(mine, dtype=np.int64), at, self._lumps([chosen[i] for i in mine])

    def _lumps(self, chosen: list[Choice]) -> np.ndarray:
        return self.loads.share(np.array([choice.lump for choice in chosen]).reshape(-1, self._space.num_columns))

    def relieve(self, rank: int) -> np.ndarray | None:
        """Move a shard or a group's item off a rank, or trade it, if that helps.

        Args:
            rank: the rank.

        Returns:
            The ranks whose loads changed; None if nothing helps.
        """
        best = float(self.loads.value(self.loads.sums)) * (1 - _ENOUGH)
        change: Callable[[], np.ndarray] | None = None
        for shard in np.flatnonzero(self._rank == rank):
            value, found = self._best_of_shard(int(shard), rank)
            if value < best:
                best, change = value, found
        for kind, (_, at, _) in self._whole.items():
            for number in np.flatnonzero(at == self._group_of[kind][rank]):
                value, found = self._best_of_item(kind, int(number))
                if value < best:
                    best, change = value, found
        return None if change is None else change()

    def _best_of_shard(self, shard: int, rank: int) -> tuple[float, Callable[[], np.ndarray]]:
        loads, item, lump, there = self.loads, self._item[shard], self._lump[:, [shard]], self._rank
        left = np.maximum(loads.load[:, [rank]] - lump, 0.0)
        without = (loads.sums - loads.powered[:, rank])[:, None]
        moved = without + loads.raised(left) - loads.powered + loads.raised(loads.load + lump)
        moving = np.where(self._owns[item], np.inf, loads.value(moved))
        to = int(np.argmin(moving))
        theirs = np.maximum(loads.load[:, there] - self._lump, 0.0) + lump
        traded = without - loads.powered[:, there] + loads.raised(left + self._lump) + loads.raised(theirs)
        barred = self._owns[item][there] | self._owns[self._item, rank]
        trading = np.where(barred, np.inf, loads.value(traded))
        other = int(np.argmin(trading))
        if moving[to] <= trading[other]:
            return float(moving[to]), lambda: self._move(shard, to)
        return float(trading[other]), lambda: self._trade(shard, other)

    def _best_of_item(self, kind: str, number: int) -> tuple[float, Callable[[], np.ndarray]]:
        loads, members, (_, at, lumps) = self.loads, self._space.groups[kind], self._whole[kind]
        lump, here = lumps[:, number, None, None], at[number]
        left = np.maximum(loads.load[:, members[[here]]] - lump, 0.0)
        before = loads.powered[:, members].sum(axis=2)
        without = (loads.sums - before[:, here])[:, None]
        moved = without + loads.raised(left).sum(axis=2) - before
        moving = loads.value(moved + loads.raised(loads.load[:, members] + lump).sum(axis=2))
        moving[here] = np.inf
        to = int(np.argmin(moving))
        theirs = np.maximum(loads.load[:, members[at]] - lumps[:, :, None], 0.0) + lump
        ours = left + lumps[:, :, None]
        traded = without - before[:, at] + loads.raised(ours).sum(axis=2) + loads.raised(theirs).sum(axis=2)
        trading = np.where(at == here, np.inf, loads.value(traded))
        other = int(np.argmin(trading))
        if moving[to] <= trading[other]:
            return float(moving[to]), lambda: self._move_item(kind, number, to)
        return float(trading[other]), lambda: self._trade_items(kind, number, other)

    def _move_item(self, kind: str, number: int, to: int) -> np.ndarray:
        _, at, lumps = self._whole[kind]
        members = self._space.groups[kind]
        old, new = members[at[number]], members[to]
        self.loads.add(old, -lumps[:, number])
        self.loads.add(new, lumps[:, number])
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
        self.loads.add(np.array([at]), -self._lump[:, shard])
        self.loads.add(np.array([to]), self._lump[:, shard])
        self._rank[shard] = to
        return np.array([at, to])

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
