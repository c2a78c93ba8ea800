"""One optimizer step on a block of rows in a vector subcore's memory: words in, words out.

A float32 row is read a register of columns at a time. A bfloat16 row is a register of words, each an even column in
the low half and the odd one in the high half, so its gradient is read with a stride of two.

Legend: W words per row, D dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu_sc as plsc

from tpurec.kernels.bfloat16_words import halves, word_of
from tpurec.kernels.moments import MOMENT_NAMES, first_moment, moment_rate, second_moment
from tpurec.kernels.optimizers import ACCUMULATORS, RowOptimizer, decayed, rate, shrunk, sqrt_without_root
from tpurec.kernels.storage import Storage


class RowMath:
    """The step of one block.

    Args:
        storage: the table's.
        optimizer: the rule.
        lanes: of a register.
        block: rows per block.
        scratch: refs `table [slots, block, W]`, `sums [block, D]` (gradients, combined), `rate [k * lanes]` (each of
            `optimizers.step_scalars` in all lanes), and for each accumulator of the rule `state0`, `state1`: `[slots,
            block, D]` or `[slots, block]`, the latter with `squares [block, lanes]` and `scale [block]`.
    """

    def __init__(self, storage: Storage, optimizer: RowOptimizer, lanes: int, block: int, scratch: Any) -> None:
        self.optimizer, self.lanes, self.block, self.scratch = optimizer, lanes, block, scratch
        self.dim, self.per_word = storage.dim, storage.columns_per_word
        self.words = storage.dim // self.per_word
        self.lane = lax.iota(jnp.int32, lanes)
        kinds = ACCUMULATORS[optimizer.name]
        self.moments, self.rowwise = optimizer.name in MOMENT_NAMES, "row" in kinds
        self.states = [getattr(scratch, f"state{number}") for number in range(len(kinds))]

    def step(self, slot: jax.Array) -> None:
        """Step every row of the block in `slot`.

        Args:
            slot: int32 scalar, which half of the ring.
        """
        if self.rowwise:
            self._sum_squares(slot)
            self._grow_rowwise(slot)
        scalars = self._scalars()

        @plsc.parallel_loop(0, self.block, unroll=2)
        def _(j):
            scale = plsc.load_gather(self.scratch.scale, [jnp.full(self.lanes, j)]) if self.rowwise else scalars[0]
            for q in self._registers():
                word = self._load_words(slot, j, q)
                new = []
                for half, value in enumerate(self._decode(word)):
                    grad = decayed(self.optimizer, self._load(self.scratch.sums, j, q, half), value)
                    moved, factor = self._grow_elements(slot, (j, q, half), grad, scalars, scale)
                    new.append(shrunk(self.optimizer, value, scalars[0]) - factor * moved)
                self._store_words(slot, j, q, new)

    def _grow_elements(self, slot, place, grad, scalars, scale):
        """Grow the accumulators of a register of columns; returns what the row moves along, and its factor."""
        if self.moments:
            means = self.states[0].at[slot]
            first = first_moment(self.optimizer, self._load(means, *place), grad)
            self._store(means, *place, first)
            if self.rowwise:
                return first, scale
            squares = self.states[1].at[slot]
            second = second_moment(self.optimizer, self._load(squares, *place), grad * grad)
            self._store(squares, *place, second)
            return first, moment_rate(self.optimizer, second, *scalars[1:], _sqrt)
        if self.rowwise or not self.states:
            return grad, scale
        accumulators = self.states[0].at[slot]
        grown = self._load(accumulators, *place) + grad * grad
        self._store(accumulators, *place, grown)
        return grad, rate(self.optimizer, grown, scalars[0], _sqrt)

    def _scalars(self):
        count = 3 if self.moments else 1
        return [self.scratch.rate[pl.ds(number * self.lanes, self.lanes)] for number in range(count)]

    def _sum_squares(self, slot):
        """Leave each row's sum of squared gradients in `squares`, spread over the lanes."""

        @plsc.parallel_loop(0, self.block, unroll=2)
        def _(j):
            total = jnp.zeros(self.lanes, jnp.float32)
            for q in self._registers():
                if self.optimizer.weight_decay:
                    values = self._decode(self._load_words(slot, j, q))
                for half in range(self.per_word):
                    grad = self._load(self.scratch.sums, j, q, half)
                    if self.optimizer.weight_decay:
                        grad = jnp.where(self._valid(q), decayed(self.optimizer, grad, values[half]), 0.0)
                    total = total + grad * grad
            self.scratch.squares[j, pl.ds(0, self.lanes)] = total

    def _grow_rowwise(self, slot):
        """Accumulators of a register of rows at a time."""
        scalars, state = self._scalars(), self.states[-1]
        for group in range(self.block // self.lanes):
            rows = group * self.lanes + self.lane
            total = jnp.zeros(self.lanes, jnp.float32)
            for lane in range(self.lanes):
                total = total + plsc.load_gather(self.scratch.squares, [rows, jnp.full(self.lanes, lane, jnp.int32)])
            here = pl.ds(group * self.lanes, self.lanes)
            mean = total * (1.0 / self.dim)
            old = state[slot, here]
            grown = second_moment(self.optimizer, old, mean) if self.moments else old + mean
            state[slot, here] = grown
            self.scratch.scale[here] = (
                moment_rate(self.optimizer, grown, *scalars[1:], _sqrt)
                if self.moments
                else rate(self.optimizer, grown, scalars[0], _sqrt)
            )

    def _registers(self):
        return range(-(-self.words // self.lanes))

    def _is_full(self, q):
        return (q + 1) * self.lanes <= self.words

    def _valid(self, q):
        return q * self.lanes + self.lane < self.words

    def _word_of_lane(self, q):
        return jnp.minimum(q * self.lanes + self.lane, self.words - 1)

    def _load_words(self, slot, j, q):
        if self._is_full(q):
            return self.scratch.table[slot, j, pl.ds(q * self.lanes, self.lanes)]
        where = [jnp.full(self.lanes, j), self._word_of_lane(q)]
        return plsc.load_gather(self.scratch.table.at[slot], where, mask=self._valid(q))

    def _store_words(self, slot, j, q, values):
        word = values[0] if self.per_word == 1 else word_of(*values, plsc.bitcast)
        if self._is_full(q):
            self.scratch.table[slot, j, pl.ds(q * self.lanes, self.lanes)] = word
        else:
            where = [jnp.full(self.lanes, j), self._word_of_lane(q)]
            plsc.store_scatter(self.scratch.table.at[slot], where, word, mask=self._valid(q))

    def _decode(self, word):
        return [word] if self.per_word == 1 else list(halves(word, plsc.bitcast))

    def _columns(self, q, half):
        return [self.per_word * self._word_of_lane(q) + half]

    def _load(self, rows, j, q, half):
        """Columns of register q of a float32 row; 0 where there is none."""
        if self.per_word == 1 and self._is_full(q):
            return rows[j, pl.ds(q * self.lanes, self.lanes)]
        where = [jnp.full(self.lanes, j), *self._columns(q, half)]
        found = plsc.load_gather(rows, where, mask=None if self._is_full(q) else self._valid(q))
        return found if self._is_full(q) else jnp.where(self._valid(q), found, 0.0)

    def _store(self, rows, j, q, half, value):
        if self.per_word == 1 and self._is_full(q):
            rows[j, pl.ds(q * self.lanes, self.lanes)] = value
        else:
            where = [jnp.full(self.lanes, j), *self._columns(q, half)]
            plsc.store_scatter(rows, where, value, mask=None if self._is_full(q) else self._valid(q))


def _sqrt(x):
    return sqrt_without_root(x, plsc.bitcast)
