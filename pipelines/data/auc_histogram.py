"""The AUC of a stream of scores, in memory that does not grow with it."""

from __future__ import annotations

import numpy as np

_BINS = 1 << 18
_LIMIT = 16.0  # logits beyond share the outermost bins


class AucHistogram:
    """Counts clicks and no clicks in 2^18 equal bins of the logit between -16 and 16; a tie in a bin counts half.

    A bin is 0.00012 wide, so the AUC is off by at most half the share of pairs that fall into one bin (below 1e-4).
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2, _BINS), np.int64)

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Count rows.

        Args:
            logits: float64 `[N]`.
            labels: bool `[N]`.
        """
        bins = np.clip((logits + _LIMIT) * (_BINS / (2 * _LIMIT)), 0, _BINS - 1).astype(np.int64)
        self.counts[1] += np.bincount(bins[labels], minlength=_BINS)
        self.counts[0] += np.bincount(bins[~labels], minlength=_BINS)

    def __iadd__(self, other: AucHistogram) -> AucHistogram:
        self.counts += other.counts
        return self

    def auc(self) -> float:
        """AUC of all rows so far.

        Returns:
            Share of (click, no click) pairs in the right order; NaN if there is no such pair.
        """
        no_clicks, clicks = self.counts.astype(np.float64)
        pairs = clicks.sum() * no_clicks.sum()
        below = np.cumsum(no_clicks) - no_clicks / 2
        return float((clicks * below).sum() / pairs) if pairs else float("nan")

    def click_rate(self) -> float:
        """Share of clicks; NaN without rows."""
        total = self.counts.sum()
        return float(self.counts[1].sum() / total) if total else float("nan")
