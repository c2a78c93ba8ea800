"""Recall and NDCG against counts by hand, and the baseline beside them."""

import numpy as np
import pytest

from examples.ranking import comparison, popularity_scores, ranking_metrics


def test_recall_and_ndcg_by_hand():
    """User 0 gets 1 of 2 held-out items, at rank 2; user 1 gets his only one at rank 1; user 2 has none."""
    scores = np.array([[9, 5, 4, 3, 1], [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]], dtype=np.float32)
    seen, held_out = [[0], [4], []], [[2, 4], [3], []]
    found = ranking_metrics(scores, seen, held_out, k=2)
    assert found["users"] == 2 and found["recall"] == pytest.approx((1 / 2 + 1) / 2)
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg"] == pytest.approx((1 / np.log2(3) / ideal + 1) / 2)


def test_seen_items_are_not_ranked_and_ties_go_to_the_lower_number():
    scores = np.zeros((1, 4), np.float32)
    assert ranking_metrics(scores, [[0]], [[1]], k=1)["recall"] == 1
    assert ranking_metrics(scores, [[0]], [[2]], k=1)["recall"] == 0
    with pytest.raises(ValueError, match="no user"):
        ranking_metrics(scores, [[]], [[]], k=1)


def test_popularity_counts_the_training_data_alone():
    seen = [[0, 1], [1], [1, 2]]
    assert popularity_scores(seen, 4)[0].tolist() == [1, 3, 1, 0]
    perfect = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]], np.float32)
    found = comparison(perfect, seen, [[3], [2], [0]], k=1)
    assert found["recall_at_1"] == 1 and found["popularity_recall_at_1"] == pytest.approx(1 / 3, abs=1e-5)
    assert found["recall_margin"] == pytest.approx(3)
