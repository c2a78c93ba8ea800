"""Heuristics: choose a sharding per item and ranks for its shards, then improve by changing one item at a time.

What counts per column is the maximum over ranks, but a search on the maximum alone is blind: as long as two ranks
share it, no single move helps. So the search first minimises a power mean over ranks, (mean of load^p)^(1/p), which
is at most the maximum and equal to it for even loads, with p rising, and the maximum itself last.

All of it is deterministic and counts memory only at a price, so that what it finds does not depend on how much there
is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpurec.sharding.balance import balance
from tpurec.sharding.bound import fractional_choices
from tpurec.sharding.boxes import Boxes
from tpurec.sharding.costs import GROUP_PARTS, LATENCY_FLAGS, PARTS
from tpurec.sharding.space import NUM_PARTS, Item, Placement, Space, State

_ENOUGH = 1e-9  # relative gain below which a move is noise
_POWERS = (16,)  # powers of two: computed by squaring
_IMPROVE_ALL = 300  # items x ranks up to which every start is improved
_RELIEVE = 60_000  # items x ranks up to which uneven columns are relieved
_RELIEF_ROUNDS = 12
_BALANCE_POWERS = (16, 64)
_MOST_MOVES = 4000
_BOXED = 200_000  # items x ranks above which choices come from boxes, and loads are evened shard by shard
_BOXES = 400
_BOX_STARTS = 6
_UNEVENNESS = 1.12  # of ranks, that many tables on many ranks leave
_NO_RANKS = np.zeros(0, dtype=np.int64)


class Packer:
    """Places items of one space.

    Args:
        space: the problem.
        byte_price: seconds per byte with which memory counts.
        out_of_time: asked between moves; True ends the search.
    """

    def __init__(self, space: Space, byte_price: float, out_of_time: Callable[[], bool]) -> None:
        self.space = space
        self.out_of_time = out_of_time
        self.byte_price = byte_price
        self.price = np.concatenate([np.ones(NUM_PARTS), np.full(space.num_columns - NUM_PARTS, byte_price)])
        lumps = [choice.lump for item in space.items for choice in item.choices]
        self.scale = np.maximum(np.max(lumps, axis=0), 1e-30)  # keeps powers of loads inside float64
        self.options = [_Options(item) for item in space.items]

    def value(self, state: State) -> float:
        """What the search minimises in the end: seconds, with memory at its price.

        Args:
            state: a complete state.

        Returns:
            Seconds.
        """
        cost = state.cost()
        return cost.seconds + self.byte_price * cost.bytes

    def construct(self, picks: list[int], power: int = 16) -> State:
        """Place all items with given choices, heavy lumps first.

        Args:
            picks: per item, the position of its choice.
            power: of the mean that placing minimises.

        Returns:
            A complete state.
        """
        items = self.space.items
        chosen = [item.choices[pick] for item, pick in zip(items, picks, strict=True)]
        weight = [float(self.price @ choice.lump) for choice in chosen]
        for position, choice in enumerate(chosen):
            if choice.group:  # sums inside groups come in few sizes, powers of two: large before small packs them best
                weight[position] += 1e3 * float(choice.lump[PARTS.index(GROUP_PARTS[choice.group])])
        order = sorted(range(len(picks)), key=lambda i: (chosen[i].group is None, -weight[i], i))
        board, grouped = _Board(self, State(self.space), power), True
        for item in order:
            if grouped and chosen[item].group is None:  # shards fill what the groups leave, so those are evened first
                grouped, board = False, _Board(self, self.balance(board.state), power)
            board.put(item, picks[item], board.best_ranks(item, picks[item]))
        return self.balance(board.state)

    def balance(self, state: State) -> State:
        """Even the loads with the choices as they are; only where there are many of them and many ranks.

        Args:
            state: some or all items placed.

        Returns:
            A state with the same choices.
        """
        if len(self.space.items) * self.space.model.num_ranks <= _BOXED:
            return state
        for power in _BALANCE_POWERS:
            state = balance(state, self.price, power, _MOST_MOVES, self.out_of_time)
        return state

    def picks(self, largest_lump: float) -> list[int]:
        """Per item the choice with the least mean load whose lump is not too large.

        Args:
            largest_lump: seconds that a lump may add to a rank.

        Returns:
            Positions of choices; where all lumps are larger, the smallest.
        """
        space, ranks = self.space, self.space.model.num_ranks
        padding = space.padding(sum(max(c.pair_ids for c in item.choices) for item in space.items))
        found = []
        for item in space.items:
            keys = []
            for position, choice in enumerate(item.choices):
                even = choice.uniform + padding * choice.padded
                mean = float(self.price @ (even + choice.lump * (choice.copies / ranks)))
                peak = float(self.price @ choice.lump)
                keys.append((max(peak, largest_lump), mean, position))
            found.append(min(keys)[2])
        return found

    def improve(self, state: State, powers: tuple[int, ...] = _POWERS, sweeps: int = 6) -> State:
        """Change one item after the other to the choice and ranks that help most, until nothing helps.

        Args:
            state: a complete state; changed in place.
            powers: of the means to minimise before the maximum.
            sweeps: passes over all items at most, for each of them.

        Returns:
            The same state, or an earlier and better one.
        """
        best, kept = self.value(state), state.placement()
        for power in (*powers, 0):
            board = _Board(self, state, power)
            now = board.value()
            for _ in range(sweeps):
                before = now
                for item in self._busy_first(state):
                    if self.out_of_time():
                        break
                    now = board.improve(item, now)
                if now > before * (1 - 1e-3) or self.out_of_time():
                    break
            value = self.value(state)
            if value < best:
                best, kept = value, state.placement()
        return state if state.placement() == kept else State.of(self.space, kept)

    def _busy_first(self, state: State) -> list[int]:
        """Items by what they add to the fullest ranks."""
        top = state.load.argmax(axis=0)
        keys = []
        for position, item in enumerate(self.space.items):
            choice = item.choices[state.choice[position]]
            on_top = np.isin(top, state.ranks[position]) if choice.copies else False
            share = choice.uniform + choice.padded + np.where(on_top, choice.lump, 0.0)
            keys.append((-float(self.price @ share), position))
        return [position for _, position in sorted(keys)]

    def search(self, limits: int = 4) -> Placement:
        """Start from several placements, improve the most promising ones (of small problems all), and keep the best.

        The starts: smallest lumps; what the linear program favours; least mean load under several limits on lumps; and,
        because latencies fall only when the last table that causes them changes, no exchange at all.

        Args:
            limits: how many limits on lumps to try.

        Returns:
            A complete placement.
        """
        smallest = self.construct(self.picks(0.0))
        starts = {tuple(smallest.choice): smallest}
        high = max(float(self.price @ choice.lump) for item in self.space.items for choice in item.choices) + 1e-12
        size = len(self.space.items) * self.space.model.num_ranks
        program: list[int] | None = None
        if size > _BOXED:
            wanted = self._from_boxes(self.value(smallest))
        else:
            program = fractional_choices(self.space, self.value(smallest))
            wanted = [] if program is None else [program]
            wanted += [self.picks(float(limit)) for limit in np.geomspace(high / 1e3, high, limits)]
        wanted += self._without_exchange()
        for picks in wanted:
            if tuple(picks) not in starts and not self.out_of_time():
                starts[tuple(picks)] = self.construct(picks)
        if size > _IMPROVE_ALL:
            best_made = min(starts.values(), key=self.value)
            by_program = smallest if program is None else starts.get(tuple(program), smallest)
            chosen = {id(state): state for state in (smallest, by_program, best_made)}
        else:
            chosen = {id(state): state for state in starts.values()}
        powers, sweeps = ((64,), 2) if size > _BOXED else (_POWERS, 6)  # balanced starts need less
        best = min((self.improve(state, powers, sweeps) for state in chosen.values()), key=self.value)
        small = len(self.space.items) * self.space.model.num_ranks <= _RELIEVE
        return (self._relieve(best) if small else best).placement()

    def _from_boxes(self, known_seconds: float) -> list[list[int]]:
        """Choices of boxes with small bounds, from the first ones to the last, memory not counted."""
        boxes = Boxes(self.space, known_seconds, float("inf"), _UNEVENNESS)
        nodes = [node for node in boxes.explore(_BOXES) if node.seconds < known_seconds]
        step = max(1, len(nodes) // _BOX_STARTS)
        return [boxes.picks(node) for node in nodes[::-1][::step][:_BOX_STARTS]]

    def _relieve(self, state: State, rounds: int = _RELIEF_ROUNDS) -> State:
        """Take large lumps out of unevenly loaded columns, all at once: one by one none of them would help.

        Args:
            state: a complete state.
            rounds: columns and limits to try at most.

        Returns:
            The best state found.
        """
        tried: set[tuple[int, float]] = set()
        for _ in range(rounds):
            limits = [limit for limit in self._limits(state) if limit not in tried]
            if not limits or self.out_of_time():
                break
            tried.add(limits[0])
            other = self._limited(state, *limits[0])
            if self.value(other) < self.value(state) * (1 - 1e-4):
                state = other
                tried.clear()
        return state

    def _limits(self, state: State) -> list[tuple[int, float]]:
        """Columns with a limit on lumps (none at all, or half of the largest), those with the most to gain first."""
        found = []
        slack = (state.load.max(axis=0) - state.load.mean(axis=0)) * self.price
        for column in range(NUM_PARTS):
            lumps = [item.choices[pick].lump[column] for item, pick in zip(self.space.items, state.choice, strict=True)]
            for limit in (0.0, 0.5 * max(lumps)):
                if slack[column] > 1e-3 * self.value(state):
                    found.append((-float(slack[column]), column, limit))
        return [(column, limit) for _, column, limit in sorted(found)]

    def _limited(self, state: State, column: int, limit: float) -> State:
        """The state with no lump of a column above a limit, improved."""
        items = self.space.items
        state = State.of(self.space, state.placement())
        board = _Board(self, state, 16)
        large = [i for i, item in enumerate(items) if item.choices[state.choice[i]].lump[column] > limit]
        allowed = {i: [n for n, choice in enumerate(items[i].choices) if choice.lump[column] <= limit] for i in large}
        large = [i for i in large if allowed[i]]
        for item in large:
            board.take(item)
        for item in large:
            options = []
            for choice in allowed[item]:
                ranks = board.best_ranks(item, choice)
                board.put(item, choice, ranks)
                options.append((board.value(), choice, ranks))
                board.take(item)
            _, choice, ranks = min(options, key=lambda option: option[:2])
            board.put(item, choice, ranks)
        return self.improve(state, sweeps=2)

    def _without_exchange(self) -> list[list[int]]:
        """Every item replicated, if all of them can be."""
        found = []
        for item in self.space.items:
            local = [position for position, choice in enumerate(item.choices) if not choice.flags and not choice.copies]
            if not local:
                return []
            found.append(local[0])
        return [found]


class _Board:
    """A state, and per column a power mean of its loads (power 0: the maximum)."""

    def __init__(self, packer: Packer, state: State, power: int) -> None:
        self._packer, self.state, self._power = packer, state, power
        self._ranks = packer.space.model.num_ranks
        self._powered = self._raise(state.load / packer.scale)

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
            self._powered[ranks] = self._raise(np.maximum(self.state.load[ranks], 0.0) / self._packer.scale)

    def _sums(self) -> np.ndarray:
        return self._powered.sum(axis=0) if self._power else self._powered.max(axis=0)

    def _means(self, sums: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return scale * (sums / self._ranks) ** (1 / self._power) if self._power else scale * sums

    def value(self) -> float:
        """Seconds, with power means for maxima and memory at its price."""
        packer = self._packer
        return self._total(self.state.even() + self._means(self._sums(), packer.scale), self.state.flags > 0)

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
        scale, price = packer.scale[columns], packer.price[columns]
        loads = self.state.load[:, columns] / scale
        after = self._raise(loads + chosen.lump[columns] / scale)
        sums = self._sums()[columns]
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
        old = self.take(item)
        found = old
        for choice in self._promising(item, best):
            ranks = self.best_ranks(item, choice)
            self.put(item, choice, ranks)
            value = self.value()
            self.take(item)
            if value < best * (1 - _ENOUGH):
                best, found = value, (choice, ranks)
        self.put(item, *found)
        return best

    def _promising(self, item: int, best: float) -> list[int]:
        """Choices that could beat `best` if their lump met no other load, most promising first."""
        packer, space, state = self._packer, self._packer.space, self.state
        many = packer.options[item]
        lumps = self._raise(many.lump / packer.scale)
        sums = self._sums()
        alone = sums + many.copies[:, None] * lumps if self._power else np.maximum(sums, lumps)
        padding = np.array([space.padding(state.pair_ids + pair) for pair in many.pair_ids])
        even = state.uniform + many.uniform + padding[:, None] * (state.padded + many.padded)
        columns = even + self._means(alone, packer.scale)
        flags = (state.flags + many.flags) > 0
        seconds = space.constant_seconds + columns[:, :NUM_PARTS].sum(axis=1) + flags @ space.latency
        workspace = space.model.assume.workspace_bytes * (columns[:, NUM_PARTS:-1] > 0.5).sum(axis=1)
        size = space.constant_bytes + columns[:, NUM_PARTS:].sum(axis=1) + workspace
        values = seconds + packer.byte_price * size
        order = np.argsort(values, kind="stable")
        return [int(position) for position in order if values[position] < best * (1 - _ENOUGH)]


class _Options:
    """An item's choices as arrays, one row a choice."""

    def __init__(self, item: Item) -> None:
        choices = item.choices
        self.uniform = np.array([choice.uniform for choice in choices])
        self.padded = np.array([choice.padded for choice in choices])
        self.lump = np.array([choice.lump for choice in choices])
        self.copies = np.array([choice.copies for choice in choices])
        self.pair_ids = [choice.pair_ids for choice in choices]
        bits = np.arange(len(LATENCY_FLAGS))
        self.flags = np.array([choice.flags >> bits & 1 for choice in choices])
        self.columns = [np.flatnonzero(choice.lump) for choice in choices]
