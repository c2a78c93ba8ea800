"""Inputs for embedding kernels: each kind that breaks recommendation stacks, and a small set that covers all pairs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DIMS = (8, 16, 24, 32, 64, 128, 256, 288, 1024, 1280)
GARBAGE = 1_999_999_999  # an id that must never be used as an address


@dataclass(frozen=True)
class Bags:
    """One batch of jagged ids.

    Args:
        ids: int32 `[N]`; -1 and garbage where nothing counts.
        offsets: int32 `[num_bags + 1]`.
        weights: float32 `[N]`; NaN behind the last offset.
        num_rows: rows of the table they are for.
    """

    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    num_rows: int

    def counts(self) -> np.ndarray:
        """Which ids count, bool `[N]`."""
        position = np.arange(len(self.ids))
        return (position < self.offsets[-1]) & (self.ids >= 0) & (self.ids < self.num_rows)

    def bag_of(self) -> np.ndarray:
        """The bag of each id that counts."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))[self.counts()[: self.offsets[-1]]]


LENGTHS = {
    "all empty": lambda rng, bags, most: np.zeros(bags, int),
    "one id each": lambda rng, bags, most: np.ones(bags, int),
    "a few": lambda rng, bags, most: rng.integers(0, 2 * most // bags, bags),
    "one long": lambda rng, bags, most: np.where(
        np.arange(bags) == bags // 3, most - most // 5, rng.integers(0, 2, bags)
    ),
    "last only": lambda rng, bags, most: np.where(np.arange(bags) == bags - 1, most // 2 + 1, 0),
}
IDS = {
    "uniform": lambda rng, rows, count: rng.integers(0, rows, count),
    "one hot row": lambda rng, rows, count: np.where(rng.random(count) < 0.7, rows - 1, rng.integers(0, rows, count)),
    "all distinct": lambda rng, rows, count: np.resize(rng.permutation(rows), count),
    "three equal": lambda rng, rows, count: np.repeat(rng.integers(0, rows, count // 3 + 1), 3)[:count],
    "many skipped": lambda rng, rows, count: np.where(
        rng.random(count) < 0.4, rng.choice([-1, rows, GARBAGE, -GARBAGE], count), rng.integers(0, rows, count)
    ),
    "none counts": lambda rng, rows, count: np.full(count, -1),
}


def make_bags(lengths: str, ids: str, *, num_bags: int, capacity: int, num_rows: int, seed: int = 0) -> Bags:
    """Make a batch of one kind.

    Args:
        lengths: a key of `LENGTHS`.
        ids: a key of `IDS`.
        num_bags: bags.
        capacity: length of the id array; what the bags leave of it is garbage.
        num_rows: rows of the table.
        seed: of all randomness.

    Returns:
        The batch.
    """
    rng = np.random.default_rng(seed)
    sizes = np.asarray(LENGTHS[lengths](rng, num_bags, capacity - 3))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    offsets = np.minimum(offsets, capacity - 1)
    found = np.asarray(IDS[ids](rng, num_rows, capacity)).astype(np.int32)
    weights = rng.standard_normal(capacity).astype(np.float32)
    behind = np.arange(capacity) >= offsets[-1]
    found = np.where(behind, rng.choice([GARBAGE, 0, -1], capacity), found).astype(np.int32)
    return Bags(found, offsets, np.where(behind, np.nan, weights).astype(np.float32), num_rows)


def make_table(num_rows: int, dim: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """A table of normal numbers.

    Args:
        num_rows: rows.
        dim: columns.
        dtype: NumPy or ml_dtypes type.
        seed: of the randomness.

    Returns:
        `[num_rows, dim]`.
    """
    return np.random.default_rng(seed).standard_normal((num_rows, dim), dtype=np.float32).astype(dtype)


def brute_force(table: np.ndarray, bags: Bags, *, weighted: bool, pooling: str) -> tuple[np.ndarray, np.ndarray]:
    """Pooled bags by one loop over the ids in float64.

    Args:
        table: `[num_rows, dim]`.
        bags: the ids.
        weighted: use the weights.
        pooling: `sum` or `mean`.

    Returns:
        float64 `[num_bags, dim]`, and how far float32 arithmetic in any order may be from it: adding n terms one after
        the other errs by at most (n - 1) units in the last place of the sum of their magnitudes (Higham, Accuracy and
        Stability of Numerical Algorithms, 4.2); products and the division of a mean add four, and a mean also carries
        the error of its weights' sum.
    """
    num_bags, eps = len(bags.offsets) - 1, np.finfo(np.float32).eps
    pooled, magnitude = np.zeros((num_bags, table.shape[1])), np.zeros((num_bags, table.shape[1]))
    total, total_magnitude, count = np.zeros(num_bags), np.zeros(num_bags), np.zeros(num_bags)
    values = table.astype(np.float64)
    for bag in range(num_bags):
        for position in range(bags.offsets[bag], bags.offsets[bag + 1]):
            row = int(bags.ids[position])
            if 0 <= row < bags.num_rows:
                weight = float(bags.weights[position]) if weighted else 1.0
                pooled[bag] += weight * values[row]
                magnitude[bag] += abs(weight) * np.abs(values[row])
                total[bag] += weight
                total_magnitude[bag] += abs(weight)
                count[bag] += 1
    bound = (count + 4)[:, None] * eps * magnitude
    if pooling == "mean":
        inverse = np.divide(1.0, total, out=np.zeros(num_bags), where=total != 0)[:, None]
        relative = ((count + 4) * eps * total_magnitude)[:, None] * np.abs(inverse)
        pooled = pooled * inverse
        bound = bound * np.abs(inverse) + np.abs(pooled) * relative
    return pooled, bound


def all_pairs(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """A small list of combinations in which every pair of values of two factors occurs.

    Args:
        factors: name to values.
        seed: of the greedy choice.

    Returns:
        Combinations, one value per factor.
    """
    rng = random.Random(seed)
    names = list(factors)
    open_pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    chosen = []
    while open_pairs:
        best: dict[str, Any] = {}
        best_covered: set = set()
        for _ in range(60):
            a, x, b, y = rng.choice(sorted(open_pairs, key=repr))
            candidate = {name: rng.choice(list(factors[name])) for name in names} | {a: x, b: y}
            covered = {(p, candidate[p], q, candidate[q]) for p, q in itertools.combinations(names, 2)} & open_pairs
            if len(covered) > len(best_covered):
                best, best_covered = candidate, covered
        chosen.append(best)
        open_pairs -= best_covered
    return chosen
