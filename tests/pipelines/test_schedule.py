"""The learning-rate schedule."""

from itertools import pairwise

import pytest

from pipelines.schedule import learning_rate_factor


def factors(total, warmup, decay, final=0.0):
    return [learning_rate_factor(step, total, warmup, decay, final) for step in range(total)]


def test_warm_up_climbs_to_1_and_none_stays_there():
    assert factors(6, 3, "none") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert factors(3, 0, "none") == [1, 1, 1]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_falls_from_1_to_the_final_factor(decay):
    values = factors(100, 10, decay, 0.1)
    assert values[10] == 1.0
    assert all(a > b for a, b in pairwise(values[10:]))
    assert 0.1 < values[-1] < 0.12
    assert learning_rate_factor(100, 100, 10, decay, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(55, 100, 10, decay, 0.1) == pytest.approx(0.55)


def test_a_warm_up_longer_than_the_run_is_no_error():
    assert factors(3, 10, "linear") == pytest.approx([0.1, 0.2, 0.3])
