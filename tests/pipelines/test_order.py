"""The order of the rows: pure, complete, and the same for every world size."""

from itertools import chain

import numpy as np
import pytest

from pipelines.order import Manifest, ManifestFile, Order, natural_pass, permutation


def manifest(*files: tuple[int, ...]) -> Manifest:
    return Manifest(tuple(ManifestFile(f"d/{i}", f"{i}", groups, "0" * 64) for i, groups in enumerate(files)))


def rows_of(window) -> np.ndarray:
    """Global identity of each row of a window: (file, row group, row)."""
    return np.concatenate(
        [
            np.stack([np.full_like(s.rows, s.file), np.full_like(s.rows, s.row_group), s.rows], axis=1)
            for s in window.segments
        ]
    )


def batches_of(one_pass) -> list[list[tuple[int, int, int]]]:
    batches = []
    for index in range(one_pass.num_windows):
        window = one_pass.window(index)
        rows = rows_of(window)
        assert window.first_batch == len(batches)
        batches += [[tuple(row) for row in rows[slots[slots >= 0]].tolist()] for slots in window.slots]
    return batches


def all_rows(data: Manifest) -> set[tuple[int, int, int]]:
    return {(f, g, r) for f, file in enumerate(data.files) for g, n in enumerate(file.row_groups) for r in range(n)}


def test_blocks_of_30_and_10_make_five_full_batches_of_8():
    """case 26"""
    order = Order(manifest((30,), (10,)), batch_size=8, seed=1, shuffle_window=16, validation_share=0)
    batches = batches_of(order.epoch(0))
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8]
    assert sorted(list(chain(*batches))) == sorted(all_rows(order.manifest))


@pytest.mark.parametrize("window", [1, 8, 20, 10_000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_an_epoch_has_every_training_row_once_and_only_its_last_batch_is_short(window, share):
    """case 26"""
    data = manifest((7, 0, 100), (33,), (1, 1, 1, 60))
    order = Order(data, batch_size=8, seed=3, shuffle_window=window, validation_share=share)
    batches = batches_of(order.epoch(2))
    assert all(len(batch) == 8 for batch in batches[:-1])
    seen = list(chain(*batches))
    held_out = list(chain(*batches_of(order.validation(16))))
    assert len(set(seen)) == len(seen) == order.epoch(0).num_rows
    assert set(seen).isdisjoint(held_out)
    assert set(seen) | set(held_out) == all_rows(data)
    assert abs(len(held_out) - share * data.num_rows) <= 1


def test_epochs_and_seeds_differ_and_the_cut_does_not_depend_on_the_epoch():
    data = manifest((50, 50), (50,))
    order = Order(data, 10, seed=0, shuffle_window=50, validation_share=0.2)
    again = Order(data, 10, seed=0, shuffle_window=50, validation_share=0.2)
    other = Order(data, 10, seed=1, shuffle_window=50, validation_share=0.2)
    assert batches_of(order.epoch(1)) == batches_of(again.epoch(1))
    assert batches_of(order.epoch(0)) != batches_of(order.epoch(1))
    assert batches_of(order.epoch(0)) != batches_of(other.epoch(0))
    assert set(list(chain(*batches_of(order.epoch(0))))) == set(list(chain(*batches_of(order.epoch(5)))))


def test_any_batch_is_found_without_reading_those_before_it():
    """case 25"""
    order = Order(manifest((40, 40), (23,)), batch_size=8, seed=5, shuffle_window=24, validation_share=0.1)
    epoch = order.epoch(3)
    batches = batches_of(epoch)
    for t in range(epoch.num_batches):
        window = epoch.window(t // epoch.batches_per_window)
        slots = window.slots[t - window.first_batch]
        assert [tuple(row) for row in rows_of(window)[slots[slots >= 0]].tolist()] == batches[t]


def test_a_natural_pass_keeps_the_order_of_the_files():
    data = manifest((3, 2), (4,))
    assert list(chain(*batches_of(natural_pass(data, 4)))) == sorted(all_rows(data))


def test_rows_are_really_shuffled_across_row_groups():
    order = Order(manifest((100,) * 10), batch_size=100, seed=0, shuffle_window=1000, validation_share=0)
    first = batches_of(order.epoch(0))[0]
    assert len({group for _, group, _ in first}) >= 8


def test_the_permutation_is_the_same_on_every_machine():
    """The stream of Philox is guaranteed by NumPy; these numbers must never change, or old runs could not resume."""
    assert permutation(8, 0, "rows", 1).tolist() == [6, 2, 0, 1, 3, 7, 5, 4]
    assert sorted(permutation(1000, "x").tolist()) == list(range(1000))


def test_too_few_rows_for_a_cut_are_refused():
    with pytest.raises(ValueError, match="1 rows cannot be cut"):
        Order(manifest((1,)), 8, seed=0, shuffle_window=8, validation_share=0.5)


def test_the_fingerprint_follows_the_data_not_its_folder():
    one = Manifest((ManifestFile("a/x.parquet", "x.parquet", (3,), "f" * 64),))
    moved = Manifest((ManifestFile("b/x.parquet", "x.parquet", (3,), "f" * 64),))
    changed = Manifest((ManifestFile("a/x.parquet", "x.parquet", (3,), "e" * 64),))
    assert one.fingerprint() == moved.fingerprint() != changed.fingerprint()
