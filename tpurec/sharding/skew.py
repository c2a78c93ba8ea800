"""How many distinct rows a batch touches, and how much of it the hottest row takes, if ids follow a Zipf law.

Row i (from 1) of R is drawn with probability proportional to i to the power of -s. Of n independent draws,
sum over i of 1 - (1 - p_i)^n rows are distinct on average. The first 1,024 rows are summed one by one, the rest in
bins of equal width in log(i), which is exact to about 0.1%.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from tpurec.sharding.tables import TableSpec

_HEAD = 1024
_BINS = 256


@lru_cache(maxsize=4096)
def _law(rows: int, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """Probability of a typical row of each bin, and rows of each bin."""
    head = np.arange(1, min(rows, _HEAD) + 1, dtype=np.float64)
    weight, count = head**-exponent, np.ones_like(head)
    if rows > _HEAD:
        edges = np.unique(np.rint(np.geomspace(_HEAD, rows, _BINS + 1)))
        low, high = edges[:-1] + 0.5, edges[1:] + 0.5
        count_tail = high - low
        if abs(exponent - 1) < 1e-9:
            mass = np.log(high / low)
        else:
            mass = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        weight = np.concatenate([weight, mass / count_tail])
        count = np.concatenate([count, count_tail])
    return weight / float(weight @ count), count


def unique_rows(rows: int, exponent: float, num_ids: float) -> float:
    """Mean number of distinct rows among ids.

    Args:
        rows: rows of the table.
        exponent: Zipf exponent; 0 is uniform.
        num_ids: how many ids are drawn.

    Returns:
        Distinct rows, at most `min(rows, num_ids)`.

    >>> round(unique_rows(100, 0.0, 100))  # 100 (1 - (1 - 1/100)^100)
    63
    """
    if num_ids <= 0:
        return 0.0
    probability, count = _law(rows, exponent)
    with np.errstate(divide="ignore"):
        missed = np.exp(num_ids * np.log1p(-np.minimum(probability, 1.0)))
    return float(min(num_ids, count @ (1.0 - missed), rows))


def hottest_share(rows: int, exponent: float) -> float:
    """Share of ids that hit the most frequent row.

    Args:
        rows: rows of the table.
        exponent: Zipf exponent.

    Returns:
        A probability.
    """
    return float(_law(rows, exponent)[0][0])


def exponent_of(table: TableSpec, default: float) -> float:
    """The Zipf exponent to use for a table.

    Args:
        table: its statistics; a measured exponent wins, then a measured unique share.
        default: for tables with no statistics.

    Returns:
        The exponent; from a unique share, the one that gives this share for a sample of its size.
    """
    if table.zipf_exponent is not None:
        return table.zipf_exponent
    if table.unique_share is None or table.unique_share_ids is None:
        return default
    low, high = 0.0, 4.0
    wanted = table.unique_share * table.unique_share_ids
    for _ in range(40):
        middle = (low + high) / 2
        if unique_rows(table.num_embeddings, middle, table.unique_share_ids) < wanted:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def fullest_pair(mean: float, num_ranks: int) -> float:
    """Ids of the fullest (requester, owner) pair when rows are dealt to owners by modulo.

    Rows land on owners like independent draws (every table has a shift of its own, so that the hottest rows of all
    tables do not meet on one rank): a pair holds about Poisson many. The fullest of n^2 pairs exceeds the mean by
    Bernstein's bound, sqrt(2 mean L) + L / 3 with L = ln(n^2); simulated batches stay 0 to 25% below it.

    Args:
        mean: ids of a mean pair.
        num_ranks: ranks, n.

    Returns:
        Ids of the fullest pair; the even exchange pads every pair to this.
    """
    if num_ranks == 1 or mean <= 0:
        return max(mean, 0.0)
    log = 2 * math.log(num_ranks)
    return mean + math.sqrt(2 * mean * log) + log / 3


def fullest_pairs(means: np.ndarray, num_ranks: int) -> np.ndarray:
    """Many of `fullest_pair` at once.

    Args:
        means: float64, any shape, more than 0.
        num_ranks: ranks, n.

    Returns:
        float64 of the same shape.
    """
    log = 2 * math.log(num_ranks)
    return means + np.sqrt(2 * means * log) + log / 3


def draw_rows(rows: int, exponent: float, num_ids: int, random: np.random.Generator) -> np.ndarray:
    """Draw ids of a table by the law, with the frequent rows spread over the table.

    Args:
        rows: rows of the table.
        exponent: Zipf exponent.
        num_ids: how many.
        random: source of randomness.

    Returns:
        int64 `[num_ids]` in [0, rows). The i-th most frequent row is `i * m mod rows` for an m without a common factor
        with `rows`; equal calls put the frequent rows of equal tables in equal places.

    >>> ids = draw_rows(1000, 1.05, 5000, np.random.default_rng(0))
    >>> bool((ids >= 0).all() and (ids < 1000).all()), round(float(np.mean(ids == 0)), 2)
    (True, 0.16)
    """
    weight, count = _law(rows, exponent)
    ends = np.cumsum(weight * count)
    at = np.minimum(np.searchsorted(ends, random.random(num_ids) * ends[-1], side="right"), len(ends) - 1)
    first = np.cumsum(count) - count
    rank = np.minimum((first[at] + random.random(num_ids) * count[at]).astype(np.int64), rows - 1)
    multiplier = max(1, min(int(rows * 0.6180339887), 2**62 // rows))  # the product stays within 63 bits
    while math.gcd(multiplier, rows) != 1:
        multiplier += 1
    return rank * multiplier % rows
