"""Let tables trade places: each takes the other's sharding and ranks.

Changing one table at a time cannot repair a wrong pairing: which tables are cut and which are whole, and which of them
share a rank, is mostly right as a pattern but held by the wrong tables. A trade keeps the pattern. On the fullest rank
every table is offered to every other one, and the trade that lowers the power mean of the loads most is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpurec.sharding.space import NUM_PARTS, State

_PATIENCE = 24  # fullest ranks without a trade that helps, before it ends
_NEGLIGIBLE = 1e-6  # columns that add less than this share are not looked at
_HIGHEST = 4.0  # loads this many times the fullest rank's need not be told apart; keeps powers inside float64
_ENOUGH = 1e-7  # relative gain below which a trade is not worth it


def trade(state: State, price: np.ndarray, power: int, most_trades: int, out_of_time: Callable[[], bool]) -> State:
    """Trade places between pairs of items until nothing helps.

    Args:
        state: all items placed; not changed.
        price: per column, seconds that a unit of it costs.
        power: of the mean over ranks that is minimised; the higher, the nearer to the maximum.
        most_trades: trades at most.
        out_of_time: asked between trades; True ends it.

    Returns:
        A new state.
    """
    items = _Items(state, price, power)
    tried = np.zeros(len(items.powered), dtype=bool)
    for _ in range(most_trades + _PATIENCE):
        weight = np.where(tried, -1.0, items.weight())
        rank = int(np.argmax(weight))
        if weight[rank] < 0 or tried.sum() >= _PATIENCE or out_of_time():
            break
        touched = items.relieve(rank)
        if touched is None:
            tried[rank] = True
        else:
            tried[touched] = False
    return items.state()


class _Items:
    """Where items are, what each would load in another's place, and powers of the loads in the columns that count."""

    def __init__(self, state: State, price: np.ndarray, power: int) -> None:
        self._space, self._power = state.space, power
        items = state.space.items
        self._choice, self._ranks = list(state.choice), list(state.ranks)
        most = state.load.max(axis=0) * price
        self._columns = np.flatnonzero(most > _NEGLIGIBLE * most.sum())
        self._unit = np.maximum(state.load[:, self._columns].max(axis=0), 1e-30)
        self._price = price[self._columns] * self._unit
        self._load = np.maximum(state.load[:, self._columns], 0.0) / self._unit
        self.powered = self._load**power
        kinds: dict[tuple[object, ...], int] = {}
        for item in items:
            for choice in item.choices:
                kinds.setdefault((*choice.key, choice.exchange), len(kinds))
        shape = (len(kinds), len(items))
        self._position = np.full(shape, -1)
        self._lump = np.zeros((*shape, len(self._columns)))
        self._even = np.full(shape, np.inf)  # inf: the item cannot have this kind
        self._padded, self._pairs = np.zeros(shape), np.zeros(shape)
        for number, item in enumerate(items):
            for position, choice in enumerate(item.choices):
                kind = kinds[(*choice.key, choice.exchange)]
                self._position[kind, number] = position
                self._lump[kind, number] = choice.lump[self._columns] / self._unit
                self._even[kind, number] = price @ choice.uniform
                self._padded[kind, number] = price[:NUM_PARTS] @ choice.padded[:NUM_PARTS]
                self._pairs[kind, number] = choice.pair_ids
        self._kind = np.array(
            [
                kinds[(*item.choices[pick].key, item.choices[pick].exchange)]
                for item, pick in zip(items, state.choice, strict=True)
            ]
        )
        self._movable = np.array([item.pinned is None for item in items])
        self._padded_now, self._pairs_now = float(price[:NUM_PARTS] @ state.padded[:NUM_PARTS]), state.pair_ids
        self._on: list[set[int]] = [set() for _ in range(len(self._load))]
        for item, ranks in enumerate(self._ranks):
            for rank in ranks.tolist():
                self._on[rank].add(item)
        self._group: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._refresh_groups()

    def _refresh_groups(self) -> None:
        """Items by kind, with their ranks as one array."""
        self._group = []
        for kind in np.unique(self._kind):
            members = np.flatnonzero((self._kind == kind) & self._movable)
            if len(members):
                self._group.append((int(kind), members, np.array([self._ranks[item] for item in members])))

    def weight(self) -> np.ndarray:
        """What each rank adds to the value."""
        sums = np.maximum(self.powered.sum(axis=0), 1e-300)
        return self.powered @ (self._price * sums ** (1 / self._power - 1))

    def _value(self, sums: np.ndarray) -> np.ndarray:
        return (np.maximum(sums, 0.0) / len(self.powered)) ** (1 / self._power) @ self._price

    def relieve(self, rank: int) -> np.ndarray | None:
        """Make the best trade of an item on a rank.

        Args:
            rank: the rank.

        Returns:
            The ranks whose loads changed; None if no trade helps.
        """
        sums = self.powered.sum(axis=0)
        padding = self._space.padding(self._pairs_now)
        now = float(self._value(sums)) + padding * self._padded_now
        best, found = -_ENOUGH * (now + self._space.constant_seconds), None
        for item in sorted(self._on[rank]):
            if self._movable[item]:
                for kind, members, places in self._group:
                    gains = self._gains(item, kind, members, places, sums) - now
                    other = int(np.argmin(gains))
                    if gains[other] < best:
                        best, found = float(gains[other]), (item, int(members[other]))
        return None if found is None else self._trade(*found)

    def _gains(self, item: int, kind: int, members: np.ndarray, places: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Value after an item traded with each of those that have one kind of choice."""
        mine, power = self._kind[item], self._power
        here = self._ranks[item]
        left = self._load[here] - self._lump[mine, item]
        arriving = np.clip(left[None] + self._lump[mine, members][:, None], 0.0, _HIGHEST) ** power
        after = sums - self.powered[here].sum(axis=0) + arriving.sum(axis=1)
        even = self._even[kind, item] + self._even[mine, members] - self._even[mine, item] - self._even[kind, members]
        barred = members == item
        if places.shape[1]:
            there = self._load[places] - self._lump[kind, members][:, None] + self._lump[kind, item]
            after += (np.clip(there, 0.0, _HIGHEST) ** power).sum(axis=1) - self.powered[places].sum(axis=1)
            barred = barred | np.isin(places, here).any(axis=1)
        padded = self._padded_now + self._padded[kind, item] + self._padded[mine, members]
        padded = padded - self._padded[mine, item] - self._padded[kind, members]
        pairs = self._pairs_now + self._pairs[kind, item] + self._pairs[mine, members]
        pairs = pairs - self._pairs[mine, item] - self._pairs[kind, members]
        if pairs.any():
            padded = padded * np.array([self._space.padding(max(float(pair), 0.0)) for pair in pairs])
        return np.where(barred, np.inf, self._value(after) + even + padded)

    def _trade(self, one: int, other: int) -> np.ndarray:
        before = [(item, int(self._kind[item]), self._ranks[item]) for item in (one, other)]
        for (item, kind, ranks), (_, new_kind, _) in zip(before, before[::-1], strict=True):
            self._load[ranks] -= self._lump[kind, item]
            self._padded_now += self._padded[new_kind, item] - self._padded[kind, item]
            self._pairs_now = max(self._pairs_now + self._pairs[new_kind, item] - self._pairs[kind, item], 0.0)
            for rank in ranks.tolist():
                self._on[rank].discard(item)
        for (item, _, _), (_, new_kind, new_ranks) in zip(before, before[::-1], strict=True):
            self._load[new_ranks] += self._lump[new_kind, item]
            self._kind[item], self._ranks[item] = new_kind, new_ranks
            self._choice[item] = int(self._position[new_kind, item])
            for rank in new_ranks.tolist():
                self._on[rank].add(item)
        touched = np.concatenate([before[0][2], before[1][2]])
        self._load[touched] = np.maximum(self._load[touched], 0.0)
        self.powered[touched] = self._load[touched] ** self._power
        self._refresh_groups()
        return touched

    def state(self) -> State:
        """The state with everything where it is now."""
        new = State(self._space)
        for item, (choice, ranks) in enumerate(zip(self._choice, self._ranks, strict=True)):
            new.put(item, choice, ranks)
        return new
