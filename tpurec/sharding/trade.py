"""Let tables trade places: each takes the other's sharding and ranks.

Changing one table at a time cannot repair a wrong pairing: which tables are cut and which are whole, and which of them
share a rank, is mostly right as a pattern but held by the wrong tables. A trade keeps the pattern. On the fullest rank
every table is offered to every other one, and the trade that lowers the power mean of the loads most is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpurec.sharding.loads import Loads, relieve_fullest
from tpurec.sharding.space import NUM_PARTS, State

_PATIENCE = 24  # fullest ranks without a trade that helps, before it ends
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
    places = _Places(state, price, power)
    relieve_fullest(places.loads, places.relieve, most_trades, _PATIENCE, out_of_time)
    return places.state()


class _Places:
    """The pattern: places of each kind of sharding, each on its ranks and held by an item; only holders change."""

    def __init__(self, state: State, price: np.ndarray, power: int) -> None:
        self._space, self._state = state.space, state
        self.loads = Loads(state, price, power)
        kinds = state.space.kinds
        self._position, self._pairs = kinds.position, kinds.pairs
        self._lump = self.loads.share(kinds.lump)
        self._even = np.where(kinds.position >= 0, kinds.uniform @ price, np.inf)  # inf: the item cannot have this kind
        self._padded = kinds.padded[..., :NUM_PARTS] @ price[:NUM_PARTS]
        held: dict[int, list[int]] = {}
        for number, (item, choice) in enumerate(zip(state.space.items, state.choice, strict=True)):
            if item.pinned is None:
                held.setdefault(kinds.of_choice[number][choice], []).append(number)
        self._holders = {kind: np.array(held[kind]) for kind in sorted(held)}
        self._ranks = {kind: np.array([state.ranks[i] for i in found]) for kind, found in self._holders.items()}
        self._on: list[list[tuple[int, int]]] = [[] for _ in range(len(state.load))]  # places on each rank
        for kind, ranks in self._ranks.items():
            for place, owners in enumerate(ranks.tolist()):
                for rank in owners:
                    self._on[rank].append((kind, place))
        self._padded_now, self._pairs_now = float(price[:NUM_PARTS] @ state.padded[:NUM_PARTS]), state.pair_ids

    def relieve(self, rank: int) -> np.ndarray | None:
        """Make the best trade of an item on a rank.

        Args:
            rank: the rank.

        Returns:
            The ranks whose loads changed; None if no trade helps.
        """
        now = float(self.loads.value(self.loads.sums)) + self._space.padding(self._pairs_now) * self._padded_now
        best, found = -_ENOUGH * (now + self._space.constant_seconds), None
        for mine in self._on[rank]:
            for kind in self._holders:
                gains = self._gains(*mine, kind) - now
                other = int(np.argmin(gains))
                if gains[other] < best:
                    best, found = float(gains[other]), (mine, (kind, other))
        return None if found is None else self._trade(*found)

    def _gains(self, mine: int, place: int, kind: int) -> np.ndarray:
        """Value after the holder of a place traded with each of those that have one kind of sharding."""
        loads, item, members, places = self.loads, self._holders[mine][place], self._holders[kind], self._ranks[kind]
        here = self._ranks[mine][place]
        left = loads.load[:, here] - self._lump[:, mine, item, None]
        arriving = loads.raised(np.maximum(left[:, None] + self._lump[:, mine, members, None], 0.0))
        after = (loads.sums - loads.powered[:, here].sum(axis=1))[:, None] + arriving.sum(axis=2)
        even = self._even[kind, item] + self._even[mine, members] - self._even[mine, item] - self._even[kind, members]
        barred = members == item
        if places.shape[1]:
            lumps = self._lump[:, kind, item, None] - self._lump[:, kind, members]
            there = loads.raised(np.maximum(loads.load[:, places] + lumps[:, :, None], 0.0))
            after += there.sum(axis=2) - loads.powered[:, places].sum(axis=2)
            taken = np.zeros(loads.load.shape[1], dtype=bool)
            taken[here] = True
            barred |= taken[places].any(axis=1)
        padded = self._padded_now + self._padded[kind, item] + self._padded[mine, members]
        padded = padded - self._padded[mine, item] - self._padded[kind, members]
        pairs = self._pairs_now + self._pairs[kind, item] + self._pairs[mine, members]
        pairs = pairs - self._pairs[mine, item] - self._pairs[kind, members]
        if padded.any():
            padded = padded * self._space.paddings(np.maximum(pairs, 0.0))
        return np.where(barred, np.inf, loads.value(after) + even + padded)

    def _trade(self, mine: tuple[int, int], other: tuple[int, int]) -> np.ndarray:
        touched = []
        held = self._holders[mine[0]][mine[1]], self._holders[other[0]][other[1]]
        for (kind, place), old, new in ((mine, *held), (other, *held[::-1])):
            ranks = self._ranks[kind][place]
            self.loads.add(ranks, self._lump[:, kind, new] - self._lump[:, kind, old])
            self._padded_now += self._padded[kind, new] - self._padded[kind, old]
            self._pairs_now = max(self._pairs_now + self._pairs[kind, new] - self._pairs[kind, old], 0.0)
            self._holders[kind][place] = new
            touched.append(ranks)
        return np.concatenate(touched)

    def state(self) -> State:
        """The state with everything where it is now."""
        new, choices, ranks = State(self._space), list(self._state.choice), list(self._state.ranks)
        for kind, holders in self._holders.items():
            for item, owners in zip(holders.tolist(), self._ranks[kind], strict=True):
                choices[item], ranks[item] = int(self._position[kind, item]), owners
        for item, (choice, owners) in enumerate(zip(choices, ranks, strict=True)):
            new.put(item, choice, owners)
        return new
