"""Distinct rows, hot rows and padding against sampling, and against figures measured elsewhere."""

import dataclasses

import numpy as np
import pytest

from tests.sharding.problems import table
from tpurec.sharding.skew import draw_rows, exponent_of, fullest_pair, hottest_share, unique_rows


def zipf_ids(rng, rows, exponent, count):
    weight = np.arange(1, rows + 1) ** -exponent
    return np.searchsorted(np.cumsum(weight / weight.sum()), rng.random(count))


@pytest.mark.parametrize("rows", [10, 3000, 200_000])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.05, 1.6])
def test_distinct_rows_agree_with_sampling(rows, exponent):
    rng = np.random.default_rng(1)
    sampled = np.mean([len(np.unique(zipf_ids(rng, rows, exponent, 5000))) for _ in range(40)])
    assert unique_rows(rows, exponent, 5000) == pytest.approx(sampled, rel=0.015)


def test_distinct_rows_never_exceed_rows_or_ids():
    assert unique_rows(7, 1.05, 10**9) == pytest.approx(7)
    assert unique_rows(10**9, 0.0, 3) == pytest.approx(3)
    assert unique_rows(10**9, 1.05, 0) == 0
    assert unique_rows(1, 1.05, 5) == pytest.approx(1)


def test_wire_traffic_of_partial_pools_and_unique_rows_as_simulated():
    # 100k rows, Zipf 1.05, 2 ranks x 2,048 examples: partial pools / unique rows = 4.1, 1.6, 0.64, 0.38
    ratios = [2048 / (unique_rows(100_000, 1.05, 2048 * ids) / 2) for ids in (1, 3, 10, 20)]
    assert ratios == pytest.approx([4.1, 1.6, 0.64, 0.38], rel=0.04)


def test_hottest_share():
    assert hottest_share(4, 0.0) == pytest.approx(0.25)
    assert hottest_share(2, 1.0) == pytest.approx(2 / 3)


def test_an_exponent_is_found_from_a_measured_unique_share():
    measured = table("a", 50_000)
    share = unique_rows(50_000, 1.3, 20_000) / 20_000
    measured = dataclasses.replace(measured, unique_share=share, unique_share_ids=20_000)
    assert exponent_of(measured, 1.05) == pytest.approx(1.3, abs=1e-3)
    assert exponent_of(table("b", 50_000), 1.05) == 1.05
    assert exponent_of(dataclasses.replace(measured, zipf_exponent=0.7), 1.05) == 0.7


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_padding_covers_the_fullest_pair_and_little_more(ranks):
    """26 tables of 1M rows, 5 ids, batch 65,536, a shift per table: the set-up of the measured figures."""
    rng = np.random.default_rng(ranks)
    weight = np.arange(1, 10**6 + 1) ** -1.05
    cumulative = np.cumsum(weight / weight.sum())
    shifts = rng.integers(0, ranks, 26)
    fullest, means = 0, []
    for _ in range(6):  # requesters
        asked = np.zeros(ranks)
        for shift in shifts:
            rows = np.unique(np.searchsorted(cumulative, rng.random(65_536 // ranks * 5)))
            asked += np.bincount((rows + shift) % ranks, minlength=ranks)
        fullest, means = max(fullest, asked.max()), [*means, asked.mean()]
    mean = 26 * unique_rows(10**6, 1.05, 65_536 // ranks * 5) / ranks
    assert mean == pytest.approx(np.mean(means), rel=0.01)
    assert 0.97 <= fullest_pair(mean, ranks) / fullest <= 1.25


def test_padding_grows_as_measured_with_the_ranks():
    # measured under plain modulo: 1.03, 1.10, 1.57, 6.0 at 16, 64, 256, 1,024 ranks; a shift per table lowers the last,
    # where the hottest rows of all tables would meet on one rank
    means = {p: 26 * unique_rows(10**6, 1.05, 65_536 / p * 5) / p for p in (16, 64, 256, 1024)}
    padding = [fullest_pair(mean, p) / mean for p, mean in means.items()]
    assert padding[:3] == pytest.approx([1.03, 1.10, 1.57], rel=0.03)
    assert 2.5 < padding[3] < 6.0


def test_no_padding_without_ids_or_with_one_rank():
    assert fullest_pair(0.0, 64) == 0.0
    assert fullest_pair(7.0, 1) == 7.0


@pytest.mark.parametrize("rows", [1, 10, 5000, 40_000_000])
@pytest.mark.parametrize("exponent", [0.0, 1.05])
def test_drawn_rows_follow_the_law(rows, exponent):
    rng = np.random.default_rng(2)
    drawn = [draw_rows(rows, exponent, 20_000, rng) for _ in range(10)]
    assert all(ids.min() >= 0 and ids.max() < rows for ids in drawn)
    distinct = np.mean([len(np.unique(ids)) for ids in drawn])
    assert distinct == pytest.approx(unique_rows(rows, exponent, 20_000), rel=0.015)
    hottest = np.mean([np.mean(ids == 0) for ids in drawn])
    assert hottest == pytest.approx(hottest_share(rows, exponent), rel=0.1, abs=0.01)
