"""Jagged inputs of every kind that breaks such stacks; values behind the last bag are capacity and hold garbage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Name to lengths of `rows * bags` bags whose sum is at most `most`.
KINDS = {
    "mixed": lambda rng, bags, most: _within(rng.integers(0, 5, bags), most),
    "all empty": lambda rng, bags, most: np.zeros(bags, np.int64),
    "one each": lambda rng, bags, most: _within(np.ones(bags, np.int64), most),
    "all in one bag": lambda rng, bags, most: np.where(np.arange(bags) == bags // 3, most, 0),
    "last only": lambda rng, bags, most: np.where(np.arange(bags) == bags - 1, most, 0),
    "some features empty": lambda rng, bags, most: _within(rng.integers(0, 4, bags) * (np.arange(bags) % 8 < 3), most),
    "full": lambda rng, bags, most: np.bincount(rng.integers(0, bags, most), minlength=bags),
}


def _within(lengths: np.ndarray, most: int) -> np.ndarray:
    return np.diff(np.minimum(np.cumsum(np.concatenate([[0], lengths])), most))


@dataclass(frozen=True)
class Jagged:
    """A feature-major jagged array.

    Args:
        lengths: `[rows, bags]`.
        values: `[capacity]`; garbage behind the sum of the lengths.
        weights: float32 `[capacity]`; NaN there.
    """

    lengths: np.ndarray
    values: np.ndarray
    weights: np.ndarray

    @property
    def used(self) -> int:
        """The sum of the lengths."""
        return int(self.lengths.sum())

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of all bags, one behind the other, of the lengths' dtype."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(self.lengths.dtype)


def make(
    kind: str, rows: int, bags: int, capacity: int, *, lengths_dtype=np.int64, values_dtype=np.int64, seed: int = 0
) -> Jagged:
    """Make an array of one kind.

    Args:
        kind: a key of `KINDS`.
        rows: features.
        bags: of each feature.
        capacity: length of the values.
        lengths_dtype: of the lengths.
        values_dtype: of the values.
        seed: of all randomness.

    Returns:
        The array.
    """
    rng = np.random.default_rng([seed, *kind.encode()])
    total = rows * bags
    lengths = KINDS[kind](rng, total, capacity) if total else np.zeros(0, np.int64)
    behind = np.arange(capacity) >= lengths.sum()
    values = np.where(behind, 1_999_999_999, rng.integers(0, 1000, capacity)).astype(values_dtype)
    weights = np.where(behind, np.nan, rng.standard_normal(capacity)).astype(np.float32)
    return Jagged(lengths.reshape(rows, bags).astype(lengths_dtype), values, weights)
