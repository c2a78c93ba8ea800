"""Id statistics: exact where they claim to be, within their stated error elsewhere, the same for any pieces."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from tpurec.features import SparseFeature
from tpurec.features.statistics import COUNTERS, SMALLEST_HASHES, IdStatistics

ITEM = SparseFeature("item", 100, kind="integer")
LISTS = SparseFeature("items", 100, kind="integer", multi_valued=True)


def _zipf(count: int, ids: int, exponent: float, seed: int = 0) -> np.ndarray:
    weights = np.arange(1, ids + 1) ** -exponent
    return np.random.default_rng(seed).choice(ids, count, p=weights / weights.sum())


def _add(statistics: IdStatistics, values: pa.Array, piece: int) -> IdStatistics:
    for start in range(0, len(values), piece):
        statistics.add(values.slice(start, piece))
    return statistics


@pytest.mark.parametrize("piece", [1, 7, 64, 1_000])
def test_lists_in_any_pieces_give_what_a_plain_count_gives(piece):
    rng = np.random.default_rng(1)
    rows = [[int(value) for value in rng.integers(0, 30, rng.integers(0, 5))] or None for _ in range(300)]
    rows[5] = [1, None, 2]
    found = _add(IdStatistics(LISTS, batch_size=64), pa.array(rows), piece).summary()
    flat = [value for row in rows for value in row or [] if value is not None]
    batches = [[v for row in rows[s : s + 64] for v in row or [] if v is not None] for s in range(0, 256, 64)]
    assert (found.examples, found.ids, found.distinct) == (300, len(flat), len(set(flat)))
    assert found.blanks == sum(not row for row in rows)
    assert found.max_ids_per_example == 4
    assert found.unique_share == pytest.approx(np.mean([len(set(batch)) / len(batch) for batch in batches]))
    most = sorted(Counter(flat).values(), reverse=True)[:10]
    assert [top.count for top in found.top] == most and found.count_error == 0
    assert all(Counter(flat)[int(top.id)] == top.count for top in found.top)


def test_distinct_is_exact_up_to_its_limit_and_an_estimate_beyond():
    ids = np.random.default_rng(2).permutation(SMALLEST_HASHES)
    exact = _add(IdStatistics(ITEM, 100), pa.array(ids), 500).summary()
    assert (exact.distinct, exact.distinct_is_exact) == (SMALLEST_HASHES, True)
    ids = np.random.default_rng(3).permutation(200_000)
    estimate = _add(IdStatistics(ITEM, 100_000), pa.array(ids), 50_000).summary()
    assert not estimate.distinct_is_exact
    assert estimate.distinct == pytest.approx(200_000, rel=5 / math.sqrt(SMALLEST_HASHES))


def test_frequent_ids_are_found_among_many_rare_ones_within_the_stated_error():
    rng = np.random.default_rng(4)
    ids = np.concatenate([rng.permutation(5 * COUNTERS), np.full(900, 1_000_001), np.full(600, 1_000_002)])
    ids = rng.permutation(ids)
    found = _add(IdStatistics(ITEM, 10_000), pa.array(ids), 4_000).summary(num_top=2)
    assert [top.id for top in found.top] == ["1000001", "1000002"]
    assert 0 < found.count_error <= len(ids) / COUNTERS + 1
    for top, true in zip(found.top, (900, 600), strict=True):
        assert true - found.count_error <= top.count <= true


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.4])
def test_exponent_of_a_power_law_is_found(exponent):
    ids = _zipf(100_000, 3_000, exponent)
    found = _add(IdStatistics(ITEM, 1_000), pa.array(ids), 30_000).summary()
    assert found.zipf_exponent == pytest.approx(exponent, abs=0.05)


def test_exponent_of_few_or_rare_ids_is_not_claimed():
    assert math.isnan(_add(IdStatistics(ITEM, 10), pa.array(np.arange(9).repeat(20)), 50).summary().zipf_exponent)
    assert math.isnan(_add(IdStatistics(ITEM, 10), pa.array(np.arange(1_000)), 50).summary().zipf_exponent)


def test_hex_ids_written_differently_are_one_and_malformed_ones_are_told_apart():
    values = pa.array(["00ff", "FF", "ff", "xyz", "xyzz", "", None]).dictionary_encode()
    found = _add(IdStatistics(SparseFeature("C1", 10, kind="hex"), 3), values, 7).summary()
    assert (found.ids, found.blanks, found.distinct) == (5, 2, 3)
    assert found.top[0].count == 3


def test_nothing_seen_and_only_blanks():
    empty = IdStatistics(ITEM, 4).summary()
    assert (empty.examples, empty.ids, empty.distinct, empty.top) == (0, 0, 0, ())
    assert math.isnan(empty.unique_share) and math.isnan(empty.ids_per_example)
    blank = _add(IdStatistics(ITEM, 2), pa.nulls(5, pa.int64()), 2).summary()
    assert (blank.examples, blank.blanks, blank.ids_per_example) == (5, 5, 0.0)
    assert math.isnan(blank.unique_share)


def test_a_stream_shorter_than_a_batch_still_has_a_unique_share():
    assert _add(IdStatistics(ITEM, 100), pa.array([1, 1, 2, 2]), 3).summary().unique_share == 0.5
