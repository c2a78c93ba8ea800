"""Faults of single values: found for whole columns at once, reported by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tpurec.errors import DataError
from tpurec.features.arrow_columns import Bags
from tpurec.features.feature_specs import SparseFeature


@dataclass(frozen=True)
class Problem:
    """A fault of values (not of types) in one column.

    Args:
        column: column name.
        reason: one of a few words, to count by: `not_a_number`, `not_an_integer`, `infinite`, `label_out_of_range`,
            `weights_mismatch`, `bad_weight`, `malformed`, `out_of_range`, `unseen`.
        rows: int64 [n], ascending example numbers.
        message: says what is wrong with the k-th of them, 0 <= k < n.
        remedy: what to do.
    """

    column: str
    reason: str
    rows: np.ndarray
    message: Callable[[int], str]
    remedy: str


def raise_first(problems: Sequence[Problem], source: str, first_row: int = 0) -> None:
    """Raise the problem of the first row at fault.

    Args:
        problems: none or more.
        source: file name for the error text.
        first_row: number in `source` of row 0 of the problems.

    Raises:
        DataError: if there is a problem; naming source, row, column, value and remedy.
    """
    if problems:
        first = min(problems, key=lambda problem: int(problem.rows[0]))
        row = first_row + int(first.rows[0])
        raise DataError(f"{source}: row {row} (from 0), column {first.column!r}: {first.message(0)}.", first.remedy)


def integer_problem(bags: Bags, feature: SparseFeature) -> Problem:
    """Values of an integer feature that are no int64.

    Args:
        bags: with faults.
        feature: the feature.

    Returns:
        The problem.
    """
    found = bags.faulty.take(pa.array(bags.faults))
    return Problem(
        feature.column,
        "not_an_integer",
        bags.row_of(bags.faults),
        lambda k: f"sparse feature {feature.name!r}: id {found[k].as_py()!r} is no whole number within int64",
        "Correct the id, or set the feature's kind to text.",
    )


def refuse_infinite(column: str, values: np.ndarray, problems: list[Problem]) -> None:
    """Report infinite numbers.

    Args:
        column: column name.
        values: float64 [N], infinite also where the raw value was beyond float32.
        problems: where to report.
    """
    bad = np.flatnonzero(np.isinf(values))
    if len(bad):
        remedy = "Correct the value, or leave it blank."
        problems.append(Problem(column, "infinite", bad, lambda k: "the value is infinite, or beyond float32", remedy))
