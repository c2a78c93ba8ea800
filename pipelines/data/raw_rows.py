"""Rows as they stand in a file, with the numbers by which people find them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Unreadable:
    """A row that could not even be cut into columns.

    Args:
        number: as in `RawRows.numbers`.
        reason: `too_few_fields`, `too_many_fields`, `empty_line`, `bad_quotes`, `stray_carriage_return` or `not_utf8`.
        message: what is wrong, in a few words.
    """

    number: int
    reason: str
    message: str


@dataclass(frozen=True)
class RawRows:
    """A piece of a file.

    Args:
        table: N rows; columns are text for a text file, and typed for a Parquet file.
        numbers: int64 `[N]`, ascending: line from 1 in the part of a text file that is read, or row from 0 of a
            Parquet file.
        is_text: tells which of the two.
        unreadable: rows that are not in the table; their numbers lie between those of the rows that are.
        padded: how many of the N rows were given blanks for missing last fields.
    """

    table: pa.Table
    numbers: np.ndarray
    is_text: bool
    unreadable: tuple[Unreadable, ...] = field(default=())
    padded: int = 0
