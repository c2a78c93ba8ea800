"""Draws of Criteo-like columns: integers with blanks and negatives, ids whose frequencies follow a power law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelines.data.criteo import DENSE, SPARSE

MAX_IDS_PER_EXAMPLE = 16


@dataclass(frozen=True)
class DenseColumn:
    """How the integers of one column are spread: `floor(exp(normal))`, some replaced by -1 or -2, some blank.

    Args:
        name: the column.
        log_mean: mean of the normal.
        log_std: standard deviation of the normal.
        blank_share: share of rows without a value.
        negative_share: share of rows with -1 or -2.
    """

    name: str
    log_mean: float
    log_std: float
    blank_share: float
    negative_share: float = 0.0


@dataclass(frozen=True)
class IdColumn:
    """How the ids of one column are spread: the id of rank r (from 0) has probability close to `(r + 1) ** -exponent`.

    Args:
        name: the column.
        cardinality: number of different ids.
        exponent: of the power law; positive, not 1.
        blank_share: share of rows without an id.
        mean_ids: mean number of ids of a row that is not blank; above 1 the column holds lists.
    """

    name: str
    cardinality: int
    exponent: float
    blank_share: float
    mean_ids: float = 1.0

    @property
    def is_list(self) -> bool:
        """Whether a row may hold several ids."""
        return self.mean_ids > 1.0

    def probabilities(self, count: int) -> np.ndarray:
        """Probabilities of the most frequent ids.

        Args:
            count: how many ids, from rank 0; at most `cardinality`.

        Returns:
            float64 `[count]`, exact for `draw_ranks`.
        """
        power = 1.0 - self.exponent
        edges = np.arange(1, count + 2, dtype=np.float64) ** power
        return np.diff(edges) / ((self.cardinality + 1.0) ** power - 1.0)

    def draw_ranks(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw ranks by inverting the continuous power law and rounding down.

        Args:
            rng: the source of randomness.
            count: how many.

        Returns:
            int64 `[count]`, 0 (most frequent) to `cardinality` - 1.
        """
        power = 1.0 - self.exponent
        uniform = rng.random(count)
        span = (self.cardinality + 1.0) ** power - 1.0
        ranks = ((1.0 + uniform * span) ** (1.0 / power)).astype(np.int64) - 1
        return np.clip(ranks, 0, self.cardinality - 1, out=ranks)


@dataclass(frozen=True)
class DenseValues:
    """Values of one integer column.

    Args:
        values: int64 `[N]`; 0 where blank.
        blank: bool `[N]`.
    """

    values: np.ndarray
    blank: np.ndarray


@dataclass(frozen=True)
class IdValues:
    """Ids of one column, as ranks (0 is the most frequent id).

    Args:
        ranks: int64 `[M]`, row after row.
        offsets: int64 `[N + 1]`; row i holds `ranks[offsets[i]:offsets[i + 1]]`, nothing where blank.
        is_list: whether a row may hold several ids.
        weights: float32 `[M]`, or None.
    """

    ranks: np.ndarray
    offsets: np.ndarray
    is_list: bool = False
    weights: np.ndarray | None = None


# Medians, spreads, blanks and cardinalities are of the order of those in Criteo's logs. Two things are not:
# cardinalities stop at a million, and the power laws are steeper, so that few ids are too rare to learn about.
_DENSE_SHAPES = (
    # log_mean, log_std, blank_share, negative_share
    (0.5, 1.3, 0.44, 0.0),
    (1.4, 2.4, 0.0, 0.11),
    (1.8, 1.6, 0.22, 0.0),
    (1.5, 1.2, 0.21, 0.0),
    (7.5, 2.0, 0.04, 0.0),
    (3.8, 1.6, 0.22, 0.0),
    (1.4, 1.6, 0.04, 0.0),
    (2.1, 1.2, 0.0, 0.01),
    (3.8, 1.5, 0.04, 0.0),
    (-0.4, 0.7, 0.44, 0.0),
    (0.6, 1.0, 0.04, 0.0),
    (-0.4, 1.2, 0.77, 0.0),
    (1.7, 1.2, 0.21, 0.0),
)
_ID_SHAPES = (
    # cardinality, exponent, blank_share, mean_ids when lists are asked for
    (1_460, 1.40, 0.0, 1.0),
    (583, 1.40, 0.0, 1.0),
    (1_000_000, 1.40, 0.03, 1.0),
    (400_000, 1.40, 0.03, 1.0),
    (305, 1.40, 0.0, 1.0),
    (24, 0.80, 0.12, 1.0),
    (12_517, 1.40, 0.0, 1.0),
    (633, 1.40, 0.0, 1.0),
    (3, 0.60, 0.0, 1.0),
    (93_145, 1.40, 0.0, 3.0),
    (5_683, 1.40, 0.0, 1.0),
    (800_000, 1.40, 0.03, 1.0),
    (3_194, 1.40, 0.0, 1.0),
    (27, 0.80, 0.0, 1.0),
    (14_992, 1.40, 0.0, 4.0),
    (600_000, 1.40, 0.03, 1.0),
    (10, 0.60, 0.0, 1.0),
    (5_652, 1.40, 0.0, 2.0),
    (2_173, 1.40, 0.45, 1.0),
    (4, 0.50, 0.20, 1.0),
    (700_000, 1.40, 0.03, 1.0),
    (18, 0.80, 0.76, 1.0),
    (15, 0.70, 0.0, 1.0),
    (286_181, 1.40, 0.03, 1.0),
    (105, 0.90, 0.0, 2.0),
    (142_572, 1.40, 0.45, 1.0),
)
DENSE_COLUMNS = tuple(DenseColumn(name, *shape) for name, shape in zip(DENSE, _DENSE_SHAPES, strict=True))


def id_columns(multi_hot: bool) -> tuple[IdColumn, ...]:
    """The 26 id columns.

    Args:
        multi_hot: whether C10, C15, C18 and C25 hold lists.

    Returns:
        One description a column, in the order of Criteo's fields.
    """
    return tuple(
        IdColumn(name, *shape[:3], mean_ids=shape[3] if multi_hot else 1.0)
        for name, shape in zip(SPARSE, _ID_SHAPES, strict=True)
    )


def draw_dense(column: DenseColumn, rng: np.random.Generator, num_rows: int) -> DenseValues:
    """Draw one integer column.

    Args:
        column: what to draw.
        rng: the source of randomness.
        num_rows: N.

    Returns:
        The values of N rows.
    """
    normal = rng.standard_normal(num_rows, dtype=np.float32) * np.float32(column.log_std) + np.float32(column.log_mean)
    values = np.exp(normal, dtype=np.float32).astype(np.int64)
    share = rng.random(num_rows, dtype=np.float32)
    blank = share < column.blank_share
    values[blank] = 0
    if column.negative_share:
        negative = share >= 1.0 - column.negative_share
        values[negative] = -1 - (share[negative] >= 1.0 - column.negative_share / 8)
    return DenseValues(values, blank)


def draw_ids(column: IdColumn, rng: np.random.Generator, num_rows: int, weighted: bool) -> IdValues:
    """Draw one id column.

    Args:
        column: what to draw.
        rng: the source of randomness.
        num_rows: N.
        weighted: whether the ids of a list column carry weights (0.25 to 2, in steps of 1/64).

    Returns:
        The ids of N rows.
    """
    lengths = np.ones(num_rows, np.int64)
    if column.is_list:
        lengths = np.minimum(rng.geometric(1.0 / column.mean_ids, num_rows), MAX_IDS_PER_EXAMPLE)
    if column.blank_share:
        lengths[rng.random(num_rows, dtype=np.float32) < column.blank_share] = 0
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ranks = column.draw_ranks(rng, int(offsets[-1]))
    weights = None
    if weighted and column.is_list:
        weights = rng.integers(16, 129, ranks.size).astype(np.float32) / np.float32(64)
    return IdValues(ranks, offsets, column.is_list, weights)


def id_numbers(column: int, ranks: np.ndarray) -> np.ndarray:
    """Turn ranks into 32-bit ids, a different one for each rank of a column.

    Args:
        column: position of the column, 0 to 25.
        ranks: int64 `[M]`.

    Returns:
        uint32 `[M]`. The mixing is MurmurHash3's 32-bit finalizer, which is a bijection.
    """
    with np.errstate(over="ignore"):
        number = ranks.astype(np.uint32) + np.uint32(0x9E3779B9 * (column + 1) & 0xFFFFFFFF)
        number ^= number >> np.uint32(16)
        number *= np.uint32(0x85EBCA6B)
        number ^= number >> np.uint32(13)
        number *= np.uint32(0xC2B2AE35)
        number ^= number >> np.uint32(16)
    return number
