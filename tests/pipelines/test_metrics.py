"""Metrics: exact, and undefined where the labels do not define them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from pipelines.metrics import PredictionLog, area_under_curve, click_metrics, probabilities


def brute_force_auc(scores, labels) -> float:
    wins = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, yes in zip(scores, labels, strict=True)
        if yes
        for n, no in zip(scores, labels, strict=True)
        if not no
    ]
    return float(np.mean(wins))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_the_right_order_ties_counting_half(rows):
    scores = np.array([score for score, _ in rows], dtype=np.float32)
    labels = np.array([label for _, label in rows], dtype=np.float32)
    if labels.min() == labels.max():
        assert area_under_curve(scores, labels) is None
    else:
        assert area_under_curve(scores, labels) == pytest.approx(brute_force_auc(scores, labels), abs=1e-12)


def test_auc_agrees_with_scipy_and_log_loss_with_torch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=5000).astype(np.float32)
    labels = (rng.random(5000) < probabilities(logits)).astype(np.float32)
    found = click_metrics(logits, labels)
    wins = mannwhitneyu(logits[labels == 1], logits[labels == 0]).statistic
    assert found["auc"] == pytest.approx(wins / ((labels == 1).sum() * (labels == 0).sum()), abs=1e-12)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits).double(), torch.from_numpy(labels).double()
    )
    assert found["log_loss"] == pytest.approx(float(loss), abs=1e-12)
    mean = labels.mean(dtype=np.float64)
    entropy = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    assert found["normalized_entropy"] == pytest.approx(float(loss) / entropy, abs=1e-12)
    assert found["calibration"] == pytest.approx(probabilities(logits.astype(np.float64)).sum() / labels.sum())


def test_predicting_the_mean_has_normalized_entropy_and_calibration_1():
    labels = np.array([1, 0, 0, 0] * 50, dtype=np.float32)
    found = click_metrics(np.full(200, np.log(0.25 / 0.75)), labels)
    assert (found["auc"], found["normalized_entropy"], found["calibration"]) == pytest.approx((0.5, 1.0, 1.0))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_equal_labels_leave_auc_undefined_never_0_or_a_half(label):
    """case 31"""
    found = click_metrics(np.array([0.1, 0.9]), np.full(2, label))
    assert found["auc"] is None and found["normalized_entropy"] is None
    assert found["log_loss"] > 0
    assert (found["calibration"] is None) == (label == 0.0)


def test_no_labels_leave_everything_undefined_but_the_rows_are_counted():
    """cases 31, 32"""
    log = PredictionLog()
    log.add(np.empty(0), np.empty(0), num_rows=3)
    found = log.metrics()
    assert found["eval_rows"] == found["missing_labels"] == 3
    assert found["auc"] is None and found["log_loss"] is None


def test_huge_logits_neither_overflow_nor_become_nan():
    found = click_metrics(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert found["log_loss"] == pytest.approx(1e4 / 3)
    assert probabilities(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_batches_make_no_difference():
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=100).astype(np.float32), rng.integers(0, 2, 100).astype(np.float32)
    whole, parts = PredictionLog(), PredictionLog()
    whole.add(logits, labels, 100)
    for start in range(0, 100, 7):
        piece = slice(start, start + 7)
        parts.add(logits[piece], labels[piece], len(logits[piece]))
    assert whole.metrics() == parts.metrics()
