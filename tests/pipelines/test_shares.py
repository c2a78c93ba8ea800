"""A rank's share of every global batch: together the shares are the batch, whatever the number of ranks."""

import itertools

import numpy as np
import pytest

from pipelines.order import Order, natural_pass
from pipelines.reading import Reader, find_files, read_batches, scan
from pipelines.shares import Share, in_batch_order
from tests.pipelines.conftest import click_rows, write_rows
from tpurec.features import Counts, Ladder, Schema
from tpurec.features.transform import Transformer


def reader_of(folder) -> Reader:
    files = find_files(str(folder), "data.train")
    schema = Schema.from_parquet(files[0][0])
    return Reader(scan(files, Transformer(schema)), schema)


def rows_of(packed, number: int) -> tuple:
    """Everything one example of a batch holds."""
    ids = []
    for feature in packed.sparse.values():
        first, length = int(feature.lengths[:number].sum()), int(feature.lengths[number])
        ids.append(feature.rows[first : first + length].tolist())
        ids.append(None if feature.weights is None else feature.weights[first : first + length].tolist())
    return (packed.dense[number].tolist(), float(packed.labels[number]), bool(packed.valid[number]), ids)


def examples(batch) -> list[tuple]:
    return [rows_of(batch.packed, number) for number in range(batch.packed.num_rows)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_the_shares_of_all_ranks_are_the_global_batches_row_by_row(clicks, num_ranks):
    reader = reader_of(clicks / "train")
    one_pass = Order(reader.manifest, 128, 5, 1000, 0.1).epoch(1)
    whole = list(read_batches(reader, [one_pass], Ladder.for_batch(128), 1, 3))
    size = Share(0, num_ranks).size(128)
    parts = [
        list(read_batches(reader, [one_pass], Ladder.for_batch(size), 1, 3, Share(rank, num_ranks)))
        for rank in range(num_ranks)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    for number, batch in enumerate(whole):
        of_ranks = [part[number] for part in parts]
        assert [row for part in of_ranks for row in examples(part)] == examples(batch)
        assert all(part.packed.batch_size == size and part.num_rows == batch.packed.num_rows for part in of_ranks)
    counts = [[batch.counts for batch in part if batch.counts is not None] for part in [whole, *parts]]
    assert sum(itertools.chain(*counts[1:]), Counts()) == sum(counts[0], Counts()) and counts[0]


@pytest.mark.parametrize(("rows", "num_ranks", "batch_size"), [(10, 4, 10), (3, 4, 8), (3, 4, 3), (1, 8, 1), (9, 4, 8)])
def test_fewer_rows_than_ranks_leave_some_ranks_empty_batches_but_as_many_of_them(
    tmp_path, rows, num_ranks, batch_size
):
    """cases 27 and 28: 10 rows over 4 ranks, 3 rows over 4 ranks."""
    write_rows(tmp_path / "data" / "a.parquet", click_rows(rows))
    reader = reader_of(tmp_path / "data")
    one_pass = natural_pass(reader.manifest, batch_size)
    parts = [
        list(read_batches(reader, [one_pass], Ladder((4,)), 1, 0, Share(rank, num_ranks))) for rank in range(num_ranks)
    ]
    assert [len(part) for part in parts] == [one_pass.num_batches] * num_ranks
    sizes = [np.array([batch.packed.num_rows for batch in part]) for part in parts]
    assert sum(size.sum() for size in sizes) == rows
    assert len({int(size[-1]) for size in sizes}) > 1  # the last batch is uneven, or leaves ranks empty
    labels = [np.concatenate([b.packed.labels[: b.packed.num_rows] for b in part]) for part in parts]
    whole = next(iter(read_batches(reader, [natural_pass(reader.manifest, rows)], Ladder((4,)), 1)))
    assert in_batch_order(labels, sizes).tolist() == whole.packed.labels[:rows].tolist()


def test_a_share_reads_no_row_group_that_it_needs_no_row_of(clicks):
    reader = reader_of(clicks / "train")
    window = natural_pass(reader.manifest, 5000).window(0)  # one batch over all row groups: rank 0 has the first half
    assert len(Share(0, 2).of(window).segments) < len(window.segments)
    assert sum(Share(rank, 2).of(window).num_rows for rank in range(2)) == window.num_rows
