"""Reading: every row once, in the order's batches, and bad files refused before anything is read."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.order import Order, natural_pass
from pipelines.reading import Reader, find_files, in_order, read_batches, scan
from tests.pipelines.conftest import SCHEMA, click_rows, write_rows
from tpurec.errors import DataError
from tpurec.features import Ladder
from tpurec.features.transform import Transformer

LADDER = Ladder.for_batch(8)


def manifest_of(*places):
    return scan(find_files([str(place) for place in places], "data.train"), Transformer(SCHEMA))


def numbered(path, count: int, start: int = 0, row_group_size: int = 700):
    """Rows whose `age` is their number."""
    table = click_rows(count)
    numbers = pa.array(np.arange(start, start + count, dtype=np.float32))
    return write_rows(path, table.set_column(table.schema.get_field_index("age"), "age", numbers), row_group_size)


def ages(batches) -> list[float]:
    return [age for item in batches for age in item.packed.dense[: item.packed.num_rows, 1].tolist()]


def test_blocks_of_30_and_10_rows_make_five_full_batches_with_every_row_once(tmp_path):
    """case 26"""
    numbered(tmp_path / "a.parquet", 30)
    numbered(tmp_path / "b.parquet", 10, start=30)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=0, shuffle_window=16, validation_share=0)
    batches = list(read_batches(Reader(manifest, SCHEMA), [order.epoch(0)], LADDER, 1))
    assert [item.packed.num_rows for item in batches] == [8] * 5
    assert sorted(ages(batches)) == list(range(40)) and ages(batches) != list(range(40))


def test_only_the_last_batch_is_short_and_it_is_padded(tmp_path):
    """case 26"""
    numbered(tmp_path / "a.parquet", 43, row_group_size=10)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=0, shuffle_window=16, validation_share=0)
    batches = list(read_batches(Reader(manifest, SCHEMA), [order.epoch(0)], LADDER, 2))
    assert [item.packed.num_rows for item in batches] == [8] * 5 + [3]
    last = batches[-1].packed
    assert last.batch_size == 8 and not last.valid[3:].any()
    assert all(feature.lengths[3:].sum() == 0 for feature in last.sparse.values())


@pytest.mark.parametrize("rows", [10, 3])
@pytest.mark.parametrize("workers", [2, 4])
def test_evaluation_over_several_workers_has_each_row_once_and_equal_shapes(tmp_path, rows, workers):
    """cases 27, 28: a worker without rows gets an empty masked batch"""
    numbered(tmp_path / "a.parquet", rows)
    manifest = manifest_of(tmp_path)
    seen = []
    for item in read_batches(Reader(manifest, SCHEMA), [natural_pass(manifest, 4)], LADDER, 1):
        slices = [item.packed.slice_rank(rank, workers, LADDER) for rank in range(workers)]
        assert len({(part.batch_size, part.sparse["tags"].capacity) for part in slices}) == 1
        seen += [age for part in slices for age in part.dense[: part.num_rows, 1].tolist()]
    assert seen == list(range(rows))


@pytest.mark.parametrize("first", [0, 1, 7, 14])
def test_reading_from_any_batch_gives_the_rest_of_the_epoch_and_the_next_one(tmp_path, first):
    """case 25"""
    numbered(tmp_path / "a.parquet", 120, row_group_size=25)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=3, shuffle_window=24, validation_share=0.1)
    reader = Reader(manifest, SCHEMA)
    whole = list(read_batches(reader, [order.epoch(0), order.epoch(1)], LADDER, 1))
    rest = list(read_batches(reader, [order.epoch(0), order.epoch(1)], LADDER, 2, first))
    assert [item.packed.to_bytes() for item in rest] == [item.packed.to_bytes() for item in whole[first:]]


def test_the_validation_rows_are_never_trained_on(tmp_path):
    numbered(tmp_path / "a.parquet", 500, row_group_size=90)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=3, shuffle_window=64, validation_share=0.2)
    reader = Reader(manifest, SCHEMA)
    trained = ages(read_batches(reader, [order.epoch(0)], LADDER, 1))
    validated = ages(read_batches(reader, [order.validation(64)], LADDER, 1))
    assert len(validated) == 100
    assert sorted(trained + validated) == list(range(500))


def test_counts_of_the_transform_arrive_once_a_window(tmp_path):
    numbered(tmp_path / "a.parquet", 100)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=0, shuffle_window=32, validation_share=0)
    batches = list(read_batches(Reader(manifest, SCHEMA), [order.epoch(0)], LADDER, 1))
    assert sum(item.counts.rows for item in batches if item.counts is not None) == 100
    assert sum(item.counts is not None for item in batches) == order.epoch(0).num_windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["user"]), r"b\.parquet: no column 'user'"),
        (
            lambda table: table.set_column(0, "click", pa.array(["yes"] * len(table))),
            r"b\.parquet: column 'click' \(the label\) is string, expected a number",
        ),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("tags"), "tags", pa.array([1.5] * len(table), pa.float64())
            ),
            r"b\.parquet: column 'tags' \(sparse feature 'tags'\) is double, expected a list of strings",
        ),
    ],
)
def test_a_file_that_lacks_a_column_or_has_another_type_is_refused_before_reading(tmp_path, change, message):
    """case 29"""
    write_rows(tmp_path / "a.parquet", click_rows(20))
    pq.write_table(change(click_rows(20)), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=message):
        manifest_of(tmp_path)


def test_what_is_no_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        manifest_of(tmp_path)


def test_missing_places_name_the_recipes_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.train: .*nowhere: no such file or folder.*--set data\.train=PATH"):
        find_files(str(tmp_path / "nowhere"), "data.train")
    with pytest.raises(DataError, match=r"no \*\.parquet file in this folder"):
        find_files(str(tmp_path), "data.train")


def test_folders_patterns_and_lists_are_found_in_order_and_once(tmp_path):
    for name in ("x/b.parquet", "x/a.parquet", "x/deep/c.parquet", "y.parquet"):
        write_rows(tmp_path / name, click_rows(1))
    (tmp_path / "x" / "_metadata.parquet").write_text("")
    found = find_files([str(tmp_path / "y.parquet"), str(tmp_path / "x"), str(tmp_path / "*.parquet")], "data.train")
    assert [name for _, name in found] == ["y.parquet", "a.parquet", "b.parquet", "deep/c.parquet"]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_bad_value_names_file_row_and_column_wherever_the_row_was_shuffled_to(tmp_path, share):
    table = click_rows(200)
    prices = table["price"].fill_null(1.0).to_numpy().copy()
    prices[137] = np.inf
    write_rows(tmp_path / "a.parquet", table.set_column(1, "price", pa.array(prices)), row_group_size=50)
    manifest = manifest_of(tmp_path)
    order = Order(manifest, 8, seed=1, shuffle_window=16, validation_share=share)
    passes = [order.epoch(0), order.validation(8)]
    with pytest.raises(DataError, match=r"a\.parquet: row 137 \(from 0\), column 'price'"):
        list(read_batches(Reader(manifest, SCHEMA), passes, LADDER, 1))


def test_in_order_reads_ahead_but_not_without_bound_and_raises_in_turn():
    started = []

    def work(item: int) -> int:
        started.append(item)
        if item == 3:
            raise ValueError("three")
        return item

    results = in_order(work, iter(range(100)), workers=2)
    assert next(results) == 0
    time.sleep(0.1)
    assert max(started) <= 3
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)


def test_a_consumer_that_stops_early_leaves_no_thread_behind():
    results = in_order(lambda item: item, iter(range(1000)), workers=2)
    next(results)
    results.close()
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("reader") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
