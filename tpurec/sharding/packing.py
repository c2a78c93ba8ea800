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
from tpurec.sharding.board import Board, Options
from tpurec.sharding.boxes import Boxes
from tpurec.sharding.costs import GROUP_PARTS, PARTS
from tpurec.sharding.effort import ENORMOUS, SMALL, Effort, effort_of, has_many
from tpurec.sharding.space import NUM_PARTS, Space, State
from tpurec.sharding.trade import trade

_POWERS = (16,)  # powers of two: computed by squaring
_MOST_SWEEPS = 6
_IMPROVE_ALL = 300  # items x ranks up to which every start is improved
_RELIEVE = 60_000  # items x ranks up to which uneven columns are relieved
_RELIEF_ROUNDS = 12
_BALANCE_POWERS = (16, 64)
_MOST_MOVES = 500  # of single shards, per power, while a start is built
_GROUPS_DEARER = 10.0  # how much dearer sums inside groups are while a start is built
_SETTLED = 5e-4  # relative gain of a cycle below which refining ends


class Packer:
    """Places items of one space.

    Args:
        space: the problem.
        byte_price: seconds per byte with which memory counts.
        out_of_time: asked between moves; True ends the search.
        tell: told now and then, in words, how far a long search is.
    """

    def __init__(
        self,
        space: Space,
        byte_price: float,
        out_of_time: Callable[[], bool],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.space = space
        self.out_of_time, self.tell = out_of_time, tell
        self.byte_price, self._effort = byte_price, effort_of(space)
        self.price = np.concatenate([np.ones(NUM_PARTS), np.full(space.num_columns - NUM_PARTS, byte_price)])
        lumps = [choice.lump for item in space.items for choice in item.choices]
        # Sums inside groups are packed to the last unit while starts are built: later moves, which see one item or two,
        # cannot empty a unit on all groups, and accept one more for the sake of other parts.
        self.building_price = self.price.copy()
        self.building_price[[PARTS.index(part) for part in GROUP_PARTS.values()]] *= _GROUPS_DEARER
        self.scale = np.maximum(np.max(lumps, axis=0), 1e-30)  # keeps powers of loads inside float64
        self.options = [Options(item) for item in space.items]

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
        price = self.building_price if has_many(self.space) else self.price
        board, grouped = Board(self, State(self.space), power, price), True
        for item in order:
            if grouped and chosen[item].group is None:  # shards fill what the groups leave, so those are evened first
                grouped, board = False, Board(self, self._balance(board.state), power, price)
            board.put(item, picks[item], board.best_ranks(item, picks[item]))
        return self._balance(board.state)

    def _balance(self, state: State) -> State:
        """Even the loads with the choices as they are; only where there are many of them.

        Args:
            state: some or all items placed.

        Returns:
            A state with the same choices.
        """
        if not has_many(self.space) or self._effort is ENORMOUS:
            return state
        for power in _BALANCE_POWERS:
            state = balance(state, self.building_price, power, _MOST_MOVES, self.out_of_time)
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

    def improve(self, state: State, powers: tuple[int, ...] = _POWERS, sweeps: int = _MOST_SWEEPS) -> State:
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
            board = Board(self, state, power)
            now = board.value()
            for _ in range(min(sweeps, self._sweeps)):
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

    def search(self, limits: int = 4) -> State:
        """Start from several placements, improve the most promising ones (of small problems all), and keep the best.

        The starts: smallest lumps; what boxes favour; least mean load under several limits on lumps; and, because
        latencies fall only when the last table that causes them changes, no exchange at all.

        Args:
            limits: how many limits on lumps to try.

        Returns:
            A complete state.
        """
        smallest = self.construct(self.picks(0.0))
        high = max(float(self.price @ choice.lump) for item in self.space.items for choice in item.choices) + 1e-12
        boxes = self._from_boxes(self.value(smallest), 1.0, SMALL)
        wanted = boxes + [self.picks(float(limit)) for limit in np.geomspace(high / 1e3, high, limits)]
        starts = self._starts(smallest, wanted + self._without_exchange())
        size = len(self.space.items) * self.space.model.num_ranks
        if size > _IMPROVE_ALL:
            best_made = min(starts.values(), key=self.value)
            by_boxes = [starts[tuple(picks)] for picks in boxes if tuple(picks) in starts]
            chosen = {id(state): state for state in (smallest, *by_boxes, best_made)}
        else:
            chosen = {id(state): state for state in starts.values()}
        best = min((self.improve(state) for state in chosen.values()), key=self.value)
        return self._relieve(best) if size <= _RELIEVE else best

    def _starts(self, smallest: State, wanted: list[list[int]]) -> dict[tuple[int, ...], State]:
        """States by their choices."""
        starts = {tuple(smallest.choice): smallest}
        for picks in wanted:
            if tuple(picks) not in starts and not self.out_of_time():
                self.tell(f"building start {len(starts)} of {len(wanted)}")
                starts[tuple(picks)] = self.construct(picks)
        return starts

    @property
    def _sweeps(self) -> int:
        return 1 if self._effort is ENORMOUS else _MOST_SWEEPS

    def favoured(self) -> list[list[int]]:
        """Choices that boxes favour, memory not counted, for `search_many`.

        Returns:
            Several times per item the position of its choice.
        """
        known = self.value(self.construct(self.picks(0.0)))
        return [picks for share in self._effort.unevenness for picks in self._from_boxes(known, share, self._effort)]

    def search_many(self, wanted: list[list[int]]) -> State:
        """Refine the best of some starts; for many items.

        Args:
            wanted: of `favoured`, by this packer or one of the same space at another price.

        Returns:
            A complete state.
        """
        effort, smallest = self._effort, self.construct(self.picks(0.0))
        built = sorted(self._starts(smallest, wanted + self._without_exchange()).values(), key=self.value)
        traded = self._anneal(built[: effort.traded], effort.refined)
        return min((self.refine(state, effort.cycles) for state in traded[: effort.refined]), key=self.value)

    def _anneal(self, states: list[State], kept: int) -> list[State]:
        """Trade and move under means that sharpen, and go on with the better half.

        Under a blunt mean trades are made, too, that pay off only after others.
        """
        for power in self._effort.powers:
            self.tell(f"trading places in {len(states)} starts")
            # One that no blunt trade helped is as good a start for sharper ones.
            made = [min(state, self._trade(state, power), key=self.value) for state in states]
            states = sorted(made, key=self.value)[: max(kept, (len(states) + 1) // 2)]
        return states

    def _trade(self, state: State, power: int) -> State:
        moves = 2 * len(self.space.items)
        state = trade(state, self.price, power, moves, self.out_of_time)
        return balance(state, self.price, power, moves, self.out_of_time)

    def refine(self, state: State, cycles: int) -> State:
        """Trade, move and change in turn, until nothing helps; for many items.

        Args:
            state: a complete state.
            cycles: at most.

        Returns:
            The best state found.
        """
        best = state
        for _ in range(cycles):
            before = self.value(best)
            for power in self._effort.refine_powers:
                self.tell(f"refining a step of {1e3 * best.cost().seconds:.3f} ms")
                state = self._trade(state, power)
                best = min(best, state, key=self.value)
                state = self.improve(State.of(self.space, state.placement()), (power,), 1)
                best = min(best, state, key=self.value)
            if self.value(best) > before * (1 - _SETTLED) or self.out_of_time():
                break
        return best

    def _from_boxes(self, known_seconds: float, unevenness: float, effort: Effort) -> list[list[int]]:
        """Choices of the boxes that promise most, and of some others, memory not counted."""
        boxes = Boxes(self.space, known_seconds, float("inf"), unevenness)
        found: dict[tuple[int, ...], float] = {}
        for node in boxes.explore(effort.boxes):
            self.tell("choosing shardings")
            if self.out_of_time():
                break
            if node.seconds < known_seconds:
                found[tuple(boxes.picks(node))] = boxes.promise(node)
        last = list(found)[len(found) // 2 :][::-1]  # narrow boxes; what promises less may trade well
        sampled = last[:: max(1, 3 * len(last) // effort.starts)][: effort.starts // 3]
        promising = sorted(found, key=lambda picks: (found[picks], picks))
        return [list(picks) for picks in list(dict.fromkeys(sampled + promising))[: effort.starts]]

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
        board = Board(self, state, 16)
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
