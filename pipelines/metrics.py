"""Metrics of click predictions over a whole evaluation: AUC, log loss, normalized entropy and calibration, exactly.

All are computed in float64 from every (logit, label) pair; nothing is binned or averaged over batches. A metric that
the labels do not define is None, never a number that looks like one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipelines.shares import in_batch_order

if TYPE_CHECKING:
    from pipelines.world import World


class PredictionLog:
    """Collects logits and labels of one evaluation; 8 bytes a row."""

    def __init__(self) -> None:
        self._logits: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self.rows = 0

    def add(self, logits: np.ndarray, labels: np.ndarray, num_rows: int) -> None:
        """Add one batch.

        Args:
            logits: float32 [n], of the rows that have a label.
            labels: float32 [n], in [0, 1].
            num_rows: rows evaluated, those without a label included.
        """
        self._logits.append(logits.astype(np.float32, copy=True))
        self._labels.append(labels.astype(np.float32, copy=True))
        self.rows += num_rows

    def gathered(self, world: World) -> PredictionLog | None:
        """Bring the rows of all ranks together, in the order of the batches; all ranks call this.

        So the metrics' sums are taken in one order, whatever the number of ranks.

        Args:
            world: the ranks; each has added its share of the same batches.

        Returns:
            On rank 0 the log of all rows; None on the others.
        """
        empty = np.empty(0, dtype=np.float32)
        sizes = world.collect_arrays(np.array([len(labels) for labels in self._labels], dtype=np.int64))
        rows = world.collect_arrays(np.array([self.rows], dtype=np.int64))
        columns = [world.collect_arrays(np.concatenate([empty, *parts])) for parts in (self._logits, self._labels)]
        if sizes is None or rows is None:
            return None
        whole = PredictionLog()
        logits, labels = (in_batch_order(column or [], sizes) for column in columns)
        whole.add(logits, labels, int(sum(count.item() for count in rows)))
        return whole

    def metrics(self) -> dict[str, float | int | None]:
        """Return the metrics of all rows added.

        Returns:
            `click_metrics`, with `eval_rows` (rows evaluated) and `missing_labels` (those among them without a label).
        """
        empty = np.empty(0, dtype=np.float32)
        logits, labels = (np.concatenate([empty, *parts]) for parts in (self._logits, self._labels))
        return {**click_metrics(logits, labels), "eval_rows": self.rows, "missing_labels": self.rows - len(labels)}


def click_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    """Compute the metrics of predictions.

    Normalized entropy is the log loss divided by that of always predicting the mean label (He et al. 2014, "Practical
    Lessons from Predicting Clicks on Ads at Facebook"); calibration is the sum of predictions over the sum of labels.

    Args:
        logits: float [n], log odds.
        labels: float [n], in [0, 1].

    Returns:
        `auc`, `log_loss`, `normalized_entropy`, `calibration` and `mean_label`; None where undefined: all without rows,
        AUC and normalized entropy if all labels are equal, calibration if all are 0.
    """
    if len(labels) == 0:
        return dict.fromkeys(("auc", "log_loss", "normalized_entropy", "calibration", "mean_label"))
    z, y = logits.astype(np.float64), labels.astype(np.float64)
    # log(1 + e^z) - y z, without overflow
    log_loss = float(np.mean(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))) - y * z))
    mean_label = float(y.mean())
    all_equal = bool((y == y[0]).all())
    return {
        "auc": None if all_equal else area_under_curve(logits, labels),
        "log_loss": log_loss,
        "normalized_entropy": None if all_equal else log_loss / _entropy(mean_label),
        "calibration": float(np.mean(probabilities(z)) / mean_label) if mean_label > 0 else None,
        "mean_label": mean_label,
    }


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    Args:
        scores: float [n].
        labels: float [n], in [0, 1]; a label between them is so much of a positive, the rest of a negative.

    Returns:
        The area; None if there is no positive or no negative.
    """
    order = np.argsort(scores, kind="stable")
    ordered, positive = scores[order], labels[order].astype(np.float64)
    first_of_tie = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    positives = np.add.reduceat(positive, first_of_tie)
    negatives = np.add.reduceat(1.0 - positive, first_of_tie)
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (below + 0.5 * negatives)).sum() / pairs) if pairs > 0 else None


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Turn log odds into probabilities.

    Args:
        logits: float [n].

    Returns:
        [n] of the same dtype, in [0, 1].
    """
    e = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def _entropy(mean: float) -> float:
    return float(-(mean * np.log(mean) + (1.0 - mean) * np.log1p(-mean)))
