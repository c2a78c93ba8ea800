"""Which rows and columns of a tensor one piece of it holds: intersections and coverage, without a list of the rows.

Rows are an arithmetic progression, because the modulo rule of a plan gives a rank every n-th row; two of them meet in
an arithmetic progression again (Chinese remainder theorem).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm


@dataclass(frozen=True)
class Region:
    """Rows `row_start, row_start + row_step, ...` of a tensor, and a range of its columns.

    Args:
        row_start: the first row.
        row_step: 1 or more.
        num_rows: how many; 0 for none.
        column_start: the first column.
        column_stop: the one behind the last; a tensor without columns has one.
    """

    row_start: int
    row_step: int
    num_rows: int
    column_start: int = 0
    column_stop: int = 1

    @property
    def row_last(self) -> int:
        """The last row; below `row_start` if there is none."""
        return self.row_start + (self.num_rows - 1) * self.row_step

    @property
    def num_columns(self) -> int:
        """How many columns."""
        return self.column_stop - self.column_start

    @property
    def size(self) -> int:
        """Rows times columns."""
        return self.num_rows * self.num_columns

    def __str__(self) -> str:
        rows = f"{self.row_start}:{self.row_last + 1}" + (f":{self.row_step}" if self.row_step > 1 else "")
        return f"[{rows if self.num_rows else '0:0'}, {self.column_start}:{self.column_stop}]"


@dataclass(frozen=True)
class Overlap:
    """Where two regions meet, in the local rows and columns of each.

    Args:
        num_rows: how many rows they share.
        first: their first row in the first region, and the step to the next.
        second: the same in the second region.
        first_columns: range of the shared columns in the first region.
        second_columns: the same in the second region.
    """

    num_rows: int
    first: tuple[int, int]
    second: tuple[int, int]
    first_columns: tuple[int, int]
    second_columns: tuple[int, int]


def intersect(first: Region, second: Region) -> Overlap | None:
    """Find what two regions of one tensor share.

    Args:
        first: a region.
        second: another one.

    Returns:
        Their overlap; None if they share nothing.

    Example:
        >>> intersect(Region(1, 4, 5), Region(0, 3, 6))  # rows 1 5 9 13 17 and rows 0 3 6 9 12 15 share row 9
        Overlap(num_rows=1, first=(2, 3), second=(3, 4), first_columns=(0, 1), second_columns=(0, 1))
    """
    column_start = max(first.column_start, second.column_start)
    column_stop = min(first.column_stop, second.column_stop)
    rows = shared_rows(first, second)
    if rows is None or column_start >= column_stop:
        return None
    row, step, number = rows
    return Overlap(
        number,
        ((row - first.row_start) // first.row_step, step // first.row_step),
        ((row - second.row_start) // second.row_step, step // second.row_step),
        (column_start - first.column_start, column_stop - first.column_start),
        (column_start - second.column_start, column_stop - second.column_start),
    )


def shared_rows(first: Region, second: Region) -> tuple[int, int, int] | None:
    """Find the rows that two regions share, whatever their columns.

    Args:
        first: a region.
        second: another one.

    Returns:
        First row, step, number of rows; None if there is none.
    """
    if not first.num_rows or not second.num_rows:
        return None
    common = gcd(first.row_step, second.row_step)
    distance = second.row_start - first.row_start
    if distance % common:
        return None
    step = lcm(first.row_step, second.row_step)
    modulus = second.row_step // common
    turns = distance // common * pow(first.row_step // common, -1, modulus) % modulus if modulus > 1 else 0
    row = first.row_start + turns * first.row_step  # the least in both progressions, if they had no beginning
    lowest = max(first.row_start, second.row_start)
    row += -((row - lowest) // step) * step
    last = min(first.row_last, second.row_last)
    return (row, step, (last - row) // step + 1) if row <= last else None


def find_gap_or_clash(regions: Sequence[Region], num_rows: int, num_columns: int) -> str | None:
    """Check that regions hold every row and column of a tensor exactly once.

    Args:
        regions: in any order; the message numbers them as given.
        num_rows: of the tensor.
        num_columns: of the tensor; 1 if it has no columns.

    Returns:
        None if all is well; else what is missing or held twice, such as `rows 3, 7, 11 and 22 more of columns 0 to 8
        are in no piece`.
    """
    edges = sorted({0, num_columns} | {edge for r in regions for edge in (r.column_start, r.column_stop)})
    for region in regions:
        if region.num_rows and (region.row_start < 0 or region.row_last >= num_rows or region.num_columns < 1):
            return f"a piece holds {region}, the tensor has {num_rows} rows and {num_columns} columns"
    if edges[0] < 0 or edges[-1] > num_columns:
        return f"a piece holds columns {edges[0]} to {edges[-1]}, the tensor has {num_columns}"
    for start, stop in itertools.pairwise(edges):
        band = [r for r in regions if r.num_rows and r.column_start <= start and stop <= r.column_stop]
        clash = _find_clash(band)
        if clash is not None:
            return f"row {clash} of columns {start} to {stop} is in more than one piece"
        lacking = num_rows - sum(region.num_rows for region in band)
        if lacking:
            shown = _first_missing(band, num_rows, min(lacking, 5))
            more = f" and {lacking - len(shown)} more" if lacking > len(shown) else ""
            return f"rows {', '.join(map(str, shown))}{more} of columns {start} to {stop} are in no piece"
    return None


def _find_clash(band: Sequence[Region]) -> int | None:
    """A row that two of the regions hold. Regions of one step can only meet in the same remainder."""
    by_step: dict[int, list[Region]] = {}
    for region in band:
        by_step.setdefault(region.row_step, []).append(region)
    for step, group in by_step.items():
        group.sort(key=lambda region: (region.row_start % step, region.row_start))
        for before, after in itertools.pairwise(group):
            if before.row_start % step == after.row_start % step and after.row_start <= before.row_last:
                return after.row_start
    steps = list(by_step)
    for number, step in enumerate(steps):
        for other in steps[number + 1 :]:
            for first in by_step[step]:
                for second in by_step[other]:
                    if (rows := shared_rows(first, second)) is not None:
                        return rows[0]
    return None


def _first_missing(band: Sequence[Region], num_rows: int, number: int) -> list[int]:
    """The lowest rows in none of some disjoint regions. Between two edges it repeats itself, so few rows are tried."""
    edges = {0, num_rows} | {r.row_start for r in band} | {r.row_last + 1 for r in band}
    ordered = sorted(edges)
    found: list[int] = []
    for start, stop in itertools.pairwise(ordered):
        here = [shared for r in band if (shared := shared_rows(r, Region(start, 1, stop - start))) is not None]
        if sum(count for _, _, count in here) == stop - start:
            continue
        for row in range(start, stop):
            if not any((row - first) % step == 0 and first <= row for first, step, _ in here):
                found.append(row)
                if len(found) == number:
                    return found
    return found
