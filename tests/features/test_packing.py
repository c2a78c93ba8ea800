"""Packed batches: static shapes, nothing dropped, padding told apart from missing labels, one buffer without pickle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.errors import DataError
from tpurec.features import Columns, Ladder, PackedBatch, SparseColumn, pack

LADDER = Ladder((4, 8, 16))


def _columns(bags, labels=None, weighted=True) -> Columns:
    flat = np.array([i for bag in bags for i in bag], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])]).astype(np.int32)
    weights = flat.astype(np.float32) + 0.5 if weighted else None
    dense = np.arange(len(bags), dtype=np.float32)[:, None] + 1
    labels = None if labels is None else np.array(labels, dtype=np.float32)
    return Columns(dense, labels, {"f": SparseColumn(flat, offsets, weights), "g": SparseColumn(flat, offsets)})


def _unpacked(batch: PackedBatch, name="f") -> list[list[int]]:
    feature = batch.sparse[name]
    ends = np.cumsum(feature.lengths)
    return [feature.rows[end - length : end].tolist() for end, length in zip(ends, feature.lengths, strict=True)]


def test_the_last_batch_is_padded_and_the_padding_is_invalid():
    """Cases 2, 11, 26: short batches have the shape of full ones; padding has no ids."""
    batch = pack(_columns([[5, 6], [], [7]], [1, 0, 1]), 6, LADDER)
    assert batch.dense.shape == (6, 1) and batch.dense[:, 0].tolist() == [1, 2, 3, 0, 0, 0]
    assert batch.valid.tolist() == [True] * 3 + [False] * 3 and batch.num_rows == 3
    feature = batch.sparse["f"]
    assert feature.rows.tolist() == [5, 6, 7, -1] and feature.lengths.tolist() == [2, 0, 1, 0, 0, 0]
    assert feature.weights.tolist() == [5.5, 6.5, 7.5, 0]
    assert batch.sparse["g"].weights is None


def test_missing_labels_leave_the_loss_but_are_no_padding():
    """Case 32: labels [1, NaN, 0]."""
    batch = pack(_columns([[1], [2], [3]], [1, np.nan, 0]), 4, LADDER)
    assert batch.valid.tolist() == [True, False, True, False]
    assert batch.labels.tolist() == [1, 0, 0, 0], "no NaN may reach a loss that is masked afterwards"
    assert (batch.num_rows, batch.num_missing_labels) == (3, 1)
    assert _unpacked(batch) == [[1], [2], [3], []]


def test_without_labels_every_row_is_there_and_none_is_valid():
    batch = pack(_columns([[1], [2]]), 4, LADDER)
    assert batch.num_rows == 2 and not batch.valid.any()


def test_an_empty_batch_keeps_its_shape():
    """Cases 2 and 28: a rank without examples packs a whole batch of padding."""
    batch = pack(_columns([]), 4, LADDER)
    assert batch.num_rows == 0 and batch.sparse["f"].capacity == 4 and not batch.sparse["f"].lengths.any()


def test_more_rows_than_the_batch_holds_are_refused():
    with pytest.raises(ValueError, match="3 rows do not go into a batch of 2"):
        pack(_columns([[1], [2], [3]]), 2, LADDER)


@given(st.integers(0, 10**6))
def test_a_rung_holds_the_ids_and_no_lower_rung_would(num_ids):
    rung = LADDER.rung(num_ids)
    assert rung >= num_ids
    if num_ids <= 16:
        assert rung == min(r for r in LADDER.rungs if r >= num_ids)
    else:
        assert rung % 16 == 0 and rung - num_ids < 16


@given(st.integers(1, 100_000), st.floats(1.05, 3.0), st.integers(1, 40))
def test_a_ladder_for_a_batch_starts_at_it_and_wastes_little(batch_size, growth, num_rungs):
    ladder = Ladder.for_batch(batch_size, growth, num_rungs)
    assert batch_size <= ladder.rungs[0] < batch_size + 8
    assert all(rung % 8 == 0 for rung in ladder.rungs)
    for low, high in zip(ladder.rungs, ladder.rungs[1:], strict=False):
        assert high <= low * growth + 16


def test_bad_ladders_are_refused():
    for rungs in ((), (0, 4), (4, 4), (8, 4)):
        with pytest.raises(ValueError, match="positive and increasing"):
            Ladder(rungs)


def test_a_capacity_seen_before_is_kept():
    batch = pack(_columns([[1, 2]]), 4, LADDER, capacities={"f": 16, "g": 2})
    assert batch.sparse["f"].capacity == 16 and batch.sparse["g"].capacity == 4
    assert batch.sparse["f"].rows.tolist() == [1, 2] + [-1] * 14


BATCHES = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)


@given(BATCHES)
def test_nothing_is_dropped(bags):
    batch = pack(_columns(bags), 8, LADDER)
    assert _unpacked(batch)[: len(bags)] == bags and _unpacked(batch, "g") == _unpacked(batch)
    used = int(batch.sparse["f"].lengths.sum())
    assert (batch.sparse["f"].rows[used:] == -1).all()


@given(BATCHES, st.sampled_from([1, 2, 4, 8]))
def test_the_ranks_share_the_batch_out_with_equal_shapes(bags, world_size):
    """Cases 2, 13, 28: every example belongs to one rank, and all ranks run one program."""
    labels = [np.nan if len(bag) == 3 else 1.0 for bag in bags]
    batch = pack(_columns(bags, labels), 8, LADDER)
    ranks = [batch.slice_rank(rank, world_size, Ladder((2, 4))) for rank in range(world_size)]
    assert [bag for rank in ranks for bag in _unpacked(rank)] == _unpacked(batch)
    assert np.concatenate([rank.valid for rank in ranks]).tolist() == batch.valid.tolist()
    assert np.concatenate([rank.dense for rank in ranks]).tolist() == batch.dense.tolist()
    assert len({rank.sparse["f"].capacity for rank in ranks}) == 1
    assert sum(rank.num_rows for rank in ranks) == batch.num_rows
    assert sum(rank.num_missing_labels for rank in ranks) == batch.num_missing_labels
    for rank in ranks:
        feature = rank.sparse["f"]
        used = int(feature.lengths.sum())
        assert np.array_equal(feature.weights[:used], feature.rows[:used].astype(np.float32) + 0.5)


def test_a_share_that_does_not_exist_is_refused():
    batch = pack(_columns([[1]]), 6, LADDER)
    for rank, world_size in ((0, 4), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
            batch.slice_rank(rank, world_size, LADDER)


@given(BATCHES, st.booleans())
def test_bytes_bring_back_the_batch(bags, weighted):
    batch = pack(_columns(bags, [1.0] * len(bags), weighted), 8, LADDER)
    found = PackedBatch.from_bytes(batch.to_bytes())
    assert found.num_rows == batch.num_rows and list(found.sparse) == list(batch.sparse)
    for (name, a), (other, b) in zip(batch._arrays(), found._arrays(), strict=True):
        assert name == other and a.dtype == b.dtype and np.array_equal(a, b)
        assert b.ctypes.data % b.itemsize == 0


def test_reading_copies_nothing_unless_asked():
    buffer = np.frombuffer(pack(_columns([[1]]), 8, LADDER).to_bytes(), dtype=np.uint8)
    view = PackedBatch.from_bytes(buffer)
    assert np.shares_memory(view.dense, buffer) and not view.dense.flags.writeable
    copy = PackedBatch.from_bytes(buffer, copy=True)
    assert not np.shares_memory(copy.dense, buffer) and copy.dense.flags.writeable


def test_a_damaged_buffer_is_refused():
    raw = pack(_columns([[1]]), 8, LADDER).to_bytes()
    for bad, message in (
        (b"", "no packed batch"),
        (b"x" * 100, "no packed batch"),
        (raw[:-64], "cut short"),
        (raw[:20], "cut short"),
    ):
        with pytest.raises(DataError, match=message):
            PackedBatch.from_bytes(bad)
