"""Loads of all ranks under a power mean, and the loop that takes load off the fullest rank until nothing helps.

What counts per column is its maximum over ranks. A power mean over ranks, (mean of load^p)^(1/p), is at most that and
sees more than one rank; the higher p, the nearer to the maximum. Powers of two are computed by squaring and their roots
by square roots, which NumPy does several times faster than powers. Columns come first in every array: there are few of
them, and NumPy is slow where the last axis is short.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tpurec.sharding.space import State

_NEGLIGIBLE = 1e-6  # columns that add less than this share are not looked at
_HIGHEST = 4.0  # loads this many times the fullest rank's need not be told apart; keeps powers inside float64


class Loads:
    """Loads per rank in the columns that count, as shares of the fullest rank's.

    Args:
        state: some or all items placed; not changed.
        price: per column, seconds that a unit of its maximum costs.
        power: of the mean over ranks; a power of two, at most 256.
    """

    def __init__(self, state: State, price: np.ndarray, power: int) -> None:
        most = np.maximum(state.load.max(axis=0), 0.0) * price
        self.columns = np.flatnonzero(most > _NEGLIGIBLE * most.sum())
        self.unit = state.load[:, self.columns].max(axis=0)
        self.price = price[self.columns] * self.unit
        self._squarings = power.bit_length() - 1
        self.load = self.share(np.maximum(state.load, 0.0))
        self.powered = self.raised(self.load)
        self.sums = self.powered.sum(axis=1)

    def share(self, lumps: np.ndarray) -> np.ndarray:
        """Lumps in the units of the loads.

        Args:
            lumps: float64 `[..., all columns]`.

        Returns:
            float64 `[columns that count, ...]`.
        """
        return np.ascontiguousarray(np.moveaxis(lumps[..., self.columns] / self.unit, -1, 0))

    def raised(self, loads: np.ndarray) -> np.ndarray:
        """Powers of loads.

        Args:
            loads: float64, any shape, 0 or more.

        Returns:
            float64 of the same shape.
        """
        loads = np.minimum(loads, _HIGHEST)
        for _ in range(self._squarings):
            np.square(loads, out=loads)
        return loads

    def value(self, sums: np.ndarray) -> np.ndarray:
        """Seconds of the power means.

        Args:
            sums: float64 `[columns, ...]`, sums of powers over all ranks.

        Returns:
            float64 `[...]`.
        """
        means = np.maximum(sums, 0.0) / self.load.shape[1]
        for _ in range(self._squarings):
            np.sqrt(means, out=means)
        return self.price @ means

    def weight(self) -> np.ndarray:
        """What each rank adds to the value."""
        power = 1 << self._squarings
        return (self.price * np.maximum(self.sums, 1e-300) ** (1 / power - 1)) @ self.powered

    def add(self, ranks: np.ndarray, lump: np.ndarray) -> None:
        """Add a lump to some ranks.

        Args:
            ranks: int64, all different.
            lump: float64 `[columns that count]`; negative to take it away.
        """
        loads = np.maximum(self.load[:, ranks] + lump[:, None], 0.0)
        self.load[:, ranks], self.powered[:, ranks] = loads, self.raised(loads)
        self.sums = self.powered.sum(axis=1)


def relieve_fullest(
    loads: Loads,
    relieve: Callable[[int], np.ndarray | None],
    most_changes: int,
    patience: int,
    out_of_time: Callable[[], bool],
) -> None:
    """Take load off the rank that adds most to the value, again and again.

    Args:
        loads: of all ranks.
        relieve: makes the best change of what is on a rank, and returns the ranks whose loads changed; None if no
            change helps.
        most_changes: at most.
        patience: fullest ranks that no change helps, before it ends.
        out_of_time: asked between changes; True ends it.
    """
    tried = np.zeros(loads.load.shape[1], dtype=bool)  # until their loads change
    changes = idle = 0
    while changes < most_changes and idle < patience and not out_of_time():
        weight = np.where(tried, -1.0, loads.weight())
        rank = int(np.argmax(weight))
        if weight[rank] < 0:
            break
        touched = relieve(rank)
        if touched is None:
            tried[rank] = True
            idle += 1
        else:
            tried[touched] = False
            idle = int(tried.sum())
            changes += 1
