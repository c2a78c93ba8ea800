"""The planted model: the click probability of a synthetic row, known exactly, so that the best reachable AUC is known.

The logit is a sum of four parts, scaled to fixed shares of its variance whatever the seed:

- `id_effects`: frequent ids of some columns have a trait, one number each; the sum of a row's traits. A linear model on
  one-hot ids learns it.
- `dense_slopes`: linear in log1p of some integer columns. A linear model learns it.
- `dense_bumps`: quadratic in log1p of two columns, with no linear part. A linear model cannot learn it.
- `id_pairs`: for some pairs of columns, the product of the two traits: a low-rank interaction without main effect, as
  traits have mean 0 and columns are independent. A linear model cannot learn it; a model that takes dot products of
  embeddings (DLRM, DCN, DeepFM) can, and quickly, because the main effects have already turned the embeddings its way.

Only frequent ids carry signal, so that the number of effective parameters stays in the hundreds and a few hundred
thousand rows are enough to learn nearly all there is. Blank ids count as trait 0, blank integers as 0; log1p of a
negative is -log1p(-x), as in the features' transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.data.click_columns import (
    DENSE_COLUMNS,
    DenseValues,
    IdColumn,
    IdValues,
    draw_dense,
    draw_ids,
    id_columns,
)
from pipelines.data.criteo import SPARSE

# Shares of the logit's variance; they sum to 1. The first two lines give a linear model about 0.71 of the gain in AUC
# (0.8 is the most it may reach), the rest is left to interactions.
VARIANCE_SHARES = {
    "id_effects": 0.28,
    "dense_slopes": 0.21,
    "dense_bumps": 0.10,
    "id_pairs": 0.41,
}
TARGET_AUC = 0.82  # of the planted probabilities, on the calibration rows
CLICK_RATE = 0.26  # about that of Criteo's logs
CALIBRATION_ROWS = 1 << 16
HEAD = 64  # only ids of rank 0 to HEAD - 1 have a trait

_TRAIT_COLUMNS = ("C1", "C5", "C6", "C8", "C9", "C10", "C14", "C17", "C20", "C23")
_SLOPE_COLUMNS = ("I3", "I5", "I9", "I13")
_BUMP_COLUMNS = ("I7", "I8")
_ID_PAIRS = (("C6", "C14"), ("C9", "C20"), ("C17", "C23"))
_CALIBRATION_STREAM = 1
_PARAMETER_STREAM = 2


@dataclass(frozen=True)
class DrawnRows:
    """Columns of N synthetic rows and their click probabilities.

    Args:
        dense: integer columns by name.
        ids: id columns by name.
        logits: float64 `[N]`.
    """

    dense: Mapping[str, DenseValues]
    ids: Mapping[str, IdValues]
    logits: np.ndarray

    @property
    def probabilities(self) -> np.ndarray:
        """Click probabilities, float64 `[N]`."""
        return 1.0 / (1.0 + np.exp(-self.logits))


class PlantedModel:
    """Draws rows and knows their click probabilities; everything is a function of the seed and the two switches.

    Args:
        seed: 0 or greater.
        multi_hot: some id columns hold lists; their traits are summed over the ids.
        weighted: the ids of list columns carry weights, by which their traits are multiplied.
    """

    def __init__(self, seed: int, multi_hot: bool = False, weighted: bool = False) -> None:
        self.seed = seed
        self.weighted = weighted
        self.columns = id_columns(multi_hot)
        by_name = dict(zip(SPARSE, self.columns, strict=True))
        rng = np.random.default_rng([seed, _PARAMETER_STREAM])
        self._traits = {name: _centred_traits(by_name[name], rng) for name in _TRAIT_COLUMNS}
        self._slopes = dict(zip(_SLOPE_COLUMNS, rng.choice([-1.0, 1.0], len(_SLOPE_COLUMNS)), strict=True))
        self._bumps = dict(zip(_BUMP_COLUMNS, rng.choice([-1.0, 1.0], len(_BUMP_COLUMNS)), strict=True))
        self._calibrate()

    def draw(self, rng: np.random.Generator, num_rows: int) -> DrawnRows:
        """Draw rows.

        Args:
            rng: the source of randomness.
            num_rows: N.

        Returns:
            The rows with their logits.
        """
        dense, ids = self._draw_columns(rng, num_rows)
        parts = self.parts(dense, ids, num_rows)
        logits = np.full(num_rows, self.bias)
        for name, values in parts.items():
            logits += self.scales[name] * values
        return DrawnRows(dense, ids, logits)

    def _draw_columns(self, rng: np.random.Generator, num_rows: int) -> tuple[dict, dict]:
        dense = {column.name: draw_dense(column, rng, num_rows) for column in DENSE_COLUMNS}
        ids = {column.name: draw_ids(column, rng, num_rows, self.weighted) for column in self.columns}
        return dense, ids

    def _calibrate(self) -> None:
        rng = np.random.default_rng([self.seed, _CALIBRATION_STREAM])
        dense, ids = self._draw_columns(rng, CALIBRATION_ROWS)
        self._moments = {name: _Moments.of(_log1p(dense[name])) for name in (*_SLOPE_COLUMNS, *_BUMP_COLUMNS)}
        parts = self.parts(dense, ids, CALIBRATION_ROWS)
        total = np.zeros(CALIBRATION_ROWS)
        weights = {}
        for name, values in parts.items():
            weights[name] = np.sqrt(VARIANCE_SHARES[name]) / values.std()
            total += weights[name] * (values - values.mean())
        scale, self.bias = _scale_and_bias(total)
        self.scales = {name: scale * weight for name, weight in weights.items()}
        self.bias -= sum(self.scales[name] * values.mean() for name, values in parts.items())

    def parts(
        self, dense: Mapping[str, DenseValues], ids: Mapping[str, IdValues], num_rows: int
    ) -> dict[str, np.ndarray]:
        """The parts of the logit before they are scaled by `scales`.

        Args:
            dense: integer columns by name.
            ids: id columns by name.
            num_rows: N.

        Returns:
            float64 `[N]` a part, in the order of `VARIANCE_SHARES`.
        """
        parts = {name: np.zeros(num_rows) for name in VARIANCE_SHARES}
        traits = {name: _pooled(ids[name], values) for name, values in self._traits.items()}
        for trait in traits.values():
            parts["id_effects"] += trait
        for left, right in _ID_PAIRS:
            parts["id_pairs"] += traits[left] * traits[right]
        standard = {name: moments.standard(_log1p(dense[name])) for name, moments in self._moments.items()}
        for name, sign in self._slopes.items():
            parts["dense_slopes"] += sign * standard[name]
        for name, sign in self._bumps.items():
            parts["dense_bumps"] += sign * self._moments[name].bump(standard[name])
        return parts


@dataclass(frozen=True)
class _Moments:
    """Mean and spread of one log1p column, and the line to take off its squares so that they are no linear effect."""

    mean: float
    std: float
    line: tuple[float, float]

    @classmethod
    def of(cls, log: np.ndarray) -> _Moments:
        mean, std = float(log.mean()), float(log.std())
        standard = np.clip((log - mean) / std, -3.0, 3.0)
        slope, intercept = np.polyfit(standard, standard**2, 1)
        return cls(mean, std, (float(slope), float(intercept)))

    def standard(self, log: np.ndarray) -> np.ndarray:
        return np.clip((log - self.mean) / self.std, -3.0, 3.0)

    def bump(self, standard: np.ndarray) -> np.ndarray:
        slope, intercept = self.line
        return standard**2 - slope * standard - intercept


def _log1p(column: DenseValues) -> np.ndarray:
    values = column.values.astype(np.float64)
    return np.sign(values) * np.log1p(np.abs(values))


def _centred_traits(column: IdColumn, rng: np.random.Generator) -> np.ndarray:
    """Traits of a column's frequent ids, mean 0 and variance 1 under its probabilities."""
    count = min(HEAD, column.cardinality)
    probabilities = column.probabilities(count)
    traits = rng.choice([-1.0, 1.0], count) * rng.uniform(0.5, 1.5, count)
    traits -= (probabilities @ traits) / probabilities.sum()
    return traits / np.sqrt(probabilities @ traits**2)


def _pooled(column: IdValues, traits: np.ndarray) -> np.ndarray:
    """Sum over each row's ids of weight times trait; the trait is 0 from rank len(traits) on."""
    values = np.append(traits, 0.0)[np.minimum(column.ranks, traits.size)]
    if column.weights is not None:
        values = values * column.weights
    sums = np.zeros(values.size + 1)
    np.cumsum(values, out=sums[1:])
    return sums[column.offsets[1:]] - sums[column.offsets[:-1]]


def _scale_and_bias(total: np.ndarray) -> tuple[float, float]:
    """Find by bisection the scale and bias at which AUC and click rate of `scale * total + bias` meet the targets."""
    low, high = 0.1, 10.0
    for _ in range(30):
        scale = (low + high) / 2
        bias = _bias(scale * total)
        if expected_auc(1.0 / (1.0 + np.exp(-scale * total - bias))) < TARGET_AUC:
            low = scale
        else:
            high = scale
    return scale, bias


def _bias(logits: np.ndarray) -> float:
    low, high = -30.0, 30.0
    for _ in range(40):
        bias = (low + high) / 2
        if (1.0 / (1.0 + np.exp(-logits - bias))).mean() < CLICK_RATE:
            low = bias
        else:
            high = bias
    return bias


def expected_auc(probabilities: np.ndarray) -> float:
    """AUC that these probabilities reach, on average, on labels drawn from themselves.

    Args:
        probabilities: float64 `[N]`, ties are taken as they are sorted.

    Returns:
        Expected share of (click, no click) pairs in the right order.
    """
    ordered = np.sort(probabilities)
    no_clicks = 1.0 - ordered
    below = np.cumsum(no_clicks) - no_clicks
    pairs = ordered.sum() * no_clicks.sum() - (ordered * no_clicks).sum()  # a row makes no pair with itself
    return float((ordered * below).sum() / pairs)
