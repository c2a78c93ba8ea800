"""The arithmetic of pieces against sets of rows written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpurec.sharding.pieces import TensorPiece, pieces_of_shard
from tpurec.sharding.plan import Shard
from tpurec.sharding.regions import Region, find_gap_or_clash, intersect


def rows(region: Region) -> list[int]:
    return [region.row_start + number * region.row_step for number in range(region.num_rows)]


@st.composite
def regions(draw):
    start = draw(st.integers(0, 5))
    return Region(
        draw(st.integers(0, 40)),
        draw(st.integers(1, 12)),
        draw(st.integers(0, 12)),
        start,
        start + draw(st.integers(1, 5)),
    )


@given(regions(), regions())
def test_an_intersection_is_that_of_the_sets_and_its_slices_point_at_the_same_rows(first, second):
    expected = sorted(set(rows(first)) & set(rows(second)))
    columns = sorted(
        set(range(first.column_start, first.column_stop)) & set(range(second.column_start, second.column_stop))
    )
    found = intersect(first, second)
    if not expected or not columns:
        assert found is None
        return
    for region, (start, step), (left, right) in (
        (first, found.first, found.first_columns),
        (second, found.second, found.second_columns),
    ):
        assert [rows(region)[start + step * k] for k in range(found.num_rows)] == expected
        assert list(range(region.column_start + left, region.column_start + right)) == columns


@given(st.lists(regions(), max_size=6), st.integers(1, 60), st.integers(1, 10))
def test_coverage_agrees_with_counting_every_cell(pieces, num_rows, num_columns):
    counts: dict[tuple[int, int], int] = {}
    for piece in pieces:
        for row in rows(piece):
            for column in range(piece.column_start, piece.column_stop):
                counts[row, column] = counts.get((row, column), 0) + 1
    exact = counts == {(row, column): 1 for row in range(num_rows) for column in range(num_columns)}
    empty_but_outside = any(not p.num_rows and p.column_stop > num_columns for p in pieces)
    problem = find_gap_or_clash(pieces, num_rows, num_columns)
    assert (problem is None) == (exact and not empty_but_outside)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 8), st.data())
def test_the_shards_of_a_modulo_rule_cover_a_table_whatever_the_shift(num_rows, num_ranks, shift, data):
    shard = Shard(tuple(data.draw(st.permutations(range(num_ranks)))), "modulo", (0, 3), shift % num_ranks)
    most = data.draw(st.integers(1, 20))  # rows of a tensor
    all_regions = []
    for rank in range(num_ranks):
        tensors = torch.zeros(shard.num_rows(rank, num_rows), 3).split(most)
        pieces = pieces_of_shard("t", shard, rank, (num_rows, 3), tensors)
        held = [row for piece in pieces for row in rows(piece.region)]
        assert all(shard.owner(row) == rank and row // num_ranks == i for i, row in enumerate(held))
        all_regions += [piece.region for piece in pieces]
    assert find_gap_or_clash(all_regions, num_rows, 3) is None


def test_missing_rows_of_a_table_of_two_thousand_million_rows_are_found_without_a_list_of_them():
    num_rows = 2_000_000_000
    pieces = [Region(rank, 1024, -(-(num_rows - rank) // 1024), 0, 64) for rank in range(1024)]
    assert find_gap_or_clash(pieces, num_rows, 64) is None
    without = [piece for piece in pieces if piece.row_start != 1000]
    assert find_gap_or_clash(without, num_rows, 64) == (
        "rows 1000, 2024, 3048, 4072, 5096 and 1953120 more of columns 0 to 64 are in no piece"
    )
    assert "row 7 of columns 0 to 64 is in more than one piece" in find_gap_or_clash([*pieces, pieces[7]], num_rows, 64)
    blocks = [Region(0, 1, num_rows - 3, 0, 64)]
    assert find_gap_or_clash(blocks, num_rows, 64).startswith("rows 1999999997, 1999999998, 1999999999 of columns")


def test_a_piece_that_does_not_fit_its_tensor_is_refused():
    TensorPiece("t", (10, 4), 1, 3, (0, 2), torch.zeros(3, 2))
    TensorPiece("t", (), 0, 1, None, torch.zeros(()))
    TensorPiece("t", (10, 4), 0, 1, None, torch.zeros(0, 4))
    for start, step, columns, shape in [(1, 3, (0, 2), (4, 2)), (1, 3, (0, 2), (3, 4)), (0, 1, (3, 5), (10, 2)),
                                        (-1, 1, None, (3, 4)), (0, 0, None, (3, 4))]:  # fmt: skip
        with pytest.raises(ValueError, match="cannot hold"):
            TensorPiece("t", (10, 4), start, step, columns, torch.zeros(shape))
