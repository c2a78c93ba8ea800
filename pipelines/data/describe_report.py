"""A description of a data set as tables for the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from pipelines.data.describe import Description

_SHOWN_IDS = 3


def print_description(found: Description, console: Console) -> None:
    """Draw a description.

    Args:
        found: what to draw.
        console: where.
    """
    counts = found.counts
    console.print(f"{counts.kept:,} rows in {found.files} files, schema {found.schema.name!r}", markup=False)
    if counts.rejected:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.rejected.items()))
        console.print(f"{counts.num_rejected:,} bad rows left out: {reasons}", markup=False)
    if found.label is not None:
        known = found.label.rows - found.label.blanks
        console.print(
            f"label {found.schema.label.column!r}: rate {_number(found.label.mean)} of {known:,}, "
            f"{found.label.blanks:,} missing",
            markup=False,
        )
    if found.dense:
        table = _table("dense", "count", "blank", "lowest", "mean", "highest", "negative", "zero")
        for name, numbers in found.dense.items():
            plain = numbers.to_plain()
            shares = [_share(plain[key], numbers.rows) for key in ("blanks", "negatives", "zeros")]
            values = [_number(plain[key]) for key in ("lowest", "mean", "highest")]
            table.add_row(name, f"{plain['count']:,}", shares[0], *values, *shares[1:])
        console.print(table)
    if found.sparse:
        table = _table("sparse", "ids", "blank", "per row", "distinct", "skew", "unique", "most frequent")
        for name, ids in found.sparse.items():
            table.add_row(
                name,
                f"{ids.ids:,}",
                _share(ids.blanks, ids.examples),
                _number(ids.ids_per_example),
                f"{'' if ids.distinct_is_exact else '~'}{ids.distinct:,}",
                _number(ids.zipf_exponent),
                _number(ids.unique_share),
                ", ".join(f"{top.id} {top.share:.1%}" for top in ids.top[:_SHOWN_IDS]),
            )
        console.print(table)
        size = next(iter(found.sparse.values())).batch_size
        console.print(
            f"skew: s where the id of rank r occurs about r^-s often; unique: distinct ids / ids of {size:,} rows",
            markup=False,
        )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for position, heading in enumerate(headings):
        is_text = position == 0 or heading == "most frequent"
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=position == 0)
    return table


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
