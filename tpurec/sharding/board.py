"""A state under a power mean: what placing, removing or changing one item does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tpurec.sharding.costs import LATENCY_FLAGS
from tpurec.sharding.space import NUM_PARTS, Item, State

if TYPE_CHECKING:
    from tpurec.sharding.packing import Packer

_ENOUGH = 1e-9  # relative gain below which a move is noise
_NO_RANKS = np.zeros(0, dtype=np.int64)


class Board:
    """A state, and per column a power mean of its loads (power 0: the maximum).

    Ranks are chosen at `price` per column, by default the packer's.
    """

    def __init__(self, packer: Packer, state: State, power: int, price: np.ndarray | None = None) -> None:
        self._packer, self.state, self._power = packer, state, power
        self._price = packer.price if price is None else price
        self._ranks = packer.space.model.num_ranks
        # Neither a lump nor a load is above 1 to begin with, so powers stay inside float64.
        self._scale = np.maximum(packer.scale, state.load.max(axis=0))
        self._powered = self._raise(state.load / self._scale)
        self._sums = self._summed()

    def _raise(self, loads: np.ndarray) -> np.ndarray:
        for _ in range(self._power.bit_length() - 1 if self._power else 0):
            loads = loads * loads
        return loads

    def put(self, item: int, choice: int, ranks: np.ndarray) -> None:
        """Place an item."""
        self.state.put(item, choice, ranks)
        self._refresh(ranks)

    def take(self, item: int) -> tuple[int, np.ndarray]:
        """Remove an item."""
        found = self.state.take(item)
        self._refresh(found[1])
        return found

    def _refresh(self, ranks: np.ndarray) -> None:
        if len(ranks):
            self._powered[ranks] = self._raise(np.maximum(self.state.load[ranks], 0.0) / self._scale)
            self._sums = self._summed()

    def _summed(self) -> np.ndarray:
        return self._powered.sum(axis=0) if self._power else self._powered.max(axis=0)

    def _means(self, sums: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return scale * (sums / self._ranks) ** (1 / self._power) if self._power else scale * sums

    def value(self) -> float:
        """Seconds, with power means for maxima and memory at its price."""
        return self._total(self.state.even() + self._means(self._sums, self._scale), self.state.flags > 0)

    def _total(self, columns: np.ndarray, flags: np.ndarray) -> float:
        cost = self.state.total(columns, flags)
        return cost.seconds + self._packer.byte_price * cost.bytes

    def best_ranks(self, item: int, choice: int) -> np.ndarray:
        """Where the lump of an item that is not placed raises the value least.

        Args:
            item: the item.
            choice: its choice.

        Returns:
            int64 ranks, ascending; empty if all load is uniform.
        """
        packer, space = self._packer, self._packer.space
        chosen = space.items[item].choices[choice]
        if not chosen.copies:
            return _NO_RANKS
        pinned = space.items[item].pinned
        if pinned is not None:
            return np.array(sorted(pinned), dtype=np.int64)
        columns = packer.options[item].columns[choice]
        scale, price = self._scale[columns], self._price[columns]
        loads = self.state.load[:, columns] / scale
        after = self._raise(loads + chosen.lump[columns] / scale)
        sums = self._sums[columns]
        members = space.groups[chosen.group] if chosen.group else None
        if self._power:
            added = after - self._powered[:, columns]
            if members is not None:
                added = added[members].sum(axis=1)
            score = self._means(sums + added, scale) @ price
        else:
            if members is not None:
                after = after[members].max(axis=1)
                loads = loads[members].max(axis=1)
            score = (np.maximum(after, sums) * scale) @ price + 1e-3 * ((loads * scale) @ price)
        if members is not None:
            return np.sort(members[int(np.argmin(score))]).astype(np.int64)
        if chosen.copies == 1:
            return np.array([int(np.argmin(score))], dtype=np.int64)
        return np.sort(np.argsort(score, kind="stable")[: chosen.copies]).astype(np.int64)

    def improve(self, item: int, best: float) -> float:
        """Give an item the choice and ranks with the least value.

        Args:
            item: the item.
            best: value of the present state.

        Returns:
            Value of the state after it.
        """
        found = self.take(item)
        least = self._least(item)
        for choice in np.argsort(least, kind="stable").tolist():
            if least[choice] >= best * (1 - _ENOUGH):
                break
            ranks = self.best_ranks(item, choice)
            value = self._value_with(item, choice, ranks)
            if value < best * (1 - _ENOUGH):
                best, found = value, (choice, ranks)
        self.put(item, *found)
        return best

    def _value_with(self, item: int, choice: int, ranks: np.ndarray) -> float:
        """Value if an item that is not placed were put somewhere."""
        packer, state, many = self._packer, self.state, self._packer.options[item]
        sums, columns = self._sums, many.columns[choice]
        if len(ranks):
            at, scale = np.ix_(ranks, columns), self._scale[columns]
            after = self._raise((state.load[at] + many.lump[choice, columns]) / scale)
            sums = sums.copy()
            if self._power:
                sums[columns] += (after - self._powered[at]).sum(axis=0)
            else:
                sums[columns] = np.maximum(sums[columns], after.max(axis=0))
        padding = packer.space.padding(state.pair_ids + many.pair_ids[choice])
        even = state.uniform + many.uniform[choice] + padding * (state.padded + many.padded[choice])
        return self._total(even + self._means(sums, self._scale), (state.flags + many.flags[choice]) > 0)

    def _least(self, item: int) -> np.ndarray:
        """Per choice the value if its lump met no other load."""
        packer, space, state = self._packer, self._packer.space, self.state
        many = packer.options[item]
        lumps = self._raise(many.lump / self._scale)
        alone = self._sums + many.copies[:, None] * lumps if self._power else np.maximum(self._sums, lumps)
        padding = space.paddings(state.pair_ids + many.pair_ids)
        even = state.uniform + many.uniform + padding[:, None] * (state.padded + many.padded)
        columns = even + self._means(alone, self._scale)
        flags = (state.flags + many.flags) > 0
        seconds = space.constant_seconds + columns[:, :NUM_PARTS].sum(axis=1) + flags @ space.latency
        workspace = space.model.assume.workspace_bytes * (columns[:, NUM_PARTS:-1] > 0.5).sum(axis=1)
        size = space.constant_bytes + columns[:, NUM_PARTS:].sum(axis=1) + workspace
        return seconds + packer.byte_price * size


class Options:
    """An item's choices as arrays, one row a choice."""

    def __init__(self, item: Item) -> None:
        choices = item.choices
        self.uniform = np.array([choice.uniform for choice in choices])
        self.padded = np.array([choice.padded for choice in choices])
        self.lump = np.array([choice.lump for choice in choices])
        self.copies = np.array([choice.copies for choice in choices])
        self.pair_ids = np.array([choice.pair_ids for choice in choices])
        bits = np.arange(len(LATENCY_FLAGS))
        self.flags = np.array([choice.flags >> bits & 1 for choice in choices])
        self.columns = [np.flatnonzero(choice.lump) for choice in choices]
