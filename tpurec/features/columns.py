"""Transformed rows, columnar: what the transform gives and what batches are packed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tpurec.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Counts:
    """What the transform met; adds up over batches.

    Args:
        rows: examples transformed.
        missing_labels: examples whose label is NaN.
        tables: per table: `ids` (ids met, blanks not counted), and of these `malformed`, `out_of_range` and `unseen`
            (each handled by the id policy).
    """

    rows: int = 0
    missing_labels: int = 0
    tables: dict[str, dict[str, int]] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        """Add two counts.

        Args:
            other: counts of other rows.

        Returns:
            New counts.
        """
        total = Counts(self.rows + other.rows, self.missing_labels + other.missing_labels)
        for counts in (self.tables, other.tables):
            for table, reasons in counts.items():
                into = total.tables.setdefault(table, {})
                for reason, number in reasons.items():
                    into[reason] = into.get(reason, 0) + number
        return total


@dataclass(frozen=True)
class SparseColumn:
    """The rows that one sparse feature looks up.

    Args:
        rows: int32 [num_ids], table rows, all of them in range: blanks and skipped ids are gone.
        offsets: int32 [N + 1]; example i has rows[offsets[i] : offsets[i + 1]].
        weights: float32 [num_ids], or None.
    """

    rows: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], ids per example."""
        return np.diff(self.offsets)

    def take(self, indices: np.ndarray) -> SparseColumn:
        """Choose examples.

        Args:
            indices: int [M], example numbers in any order.

        Returns:
            The column of those examples.
        """
        if self._is_single:
            positions = indices
            offsets = np.arange(len(indices) + 1, dtype=np.int32)
        else:
            starts = self.offsets[indices]
            lengths = self.offsets[1:][indices] - starts
            offsets = _offsets_of(lengths)
            if lengths.size == 0 or lengths.max() <= 1:
                positions = starts[lengths > 0]
            else:
                positions = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int32)
        weights = None if self.weights is None else self.weights[positions]
        return SparseColumn(self.rows[positions], offsets, weights)

    @cached_property
    def _is_single(self) -> bool:
        """Exactly one id per example: the common case, found once, not at every take."""
        return len(self.rows) == len(self.offsets) - 1 and bool((np.diff(self.offsets) == 1).all())

    def slice(self, start: int, stop: int) -> SparseColumn:
        """Choose a range of examples without copying ids.

        Args:
            start: first example.
            stop: behind the last example.

        Returns:
            The column of those examples; `rows` and `weights` are views.
        """
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        weights = None if self.weights is None else self.weights[first:last]
        return SparseColumn(self.rows[first:last], self.offsets[start : stop + 1] - np.int32(first), weights)


@dataclass(frozen=True)
class Columns:
    """N examples, transformed.

    Args:
        dense: float32 [N, num_dense].
        labels: float32 [N], NaN where missing; None if not asked for.
        sparse: feature name to its rows, in schema order.
        keys: key columns, carried unchanged; empty unless asked for.
        counts: what the transform met; empty for a `take` or `slice`.
    """

    dense: np.ndarray
    labels: np.ndarray | None
    sparse: Mapping[str, SparseColumn]
    keys: Mapping[str, pa.Array] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def num_rows(self) -> int:
        """Number of examples, N."""
        return len(self.dense)

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        total = self.dense.nbytes + (0 if self.labels is None else self.labels.nbytes)
        for column in self.sparse.values():
            total += column.rows.nbytes + column.offsets.nbytes
            total += 0 if column.weights is None else column.weights.nbytes
        return total + sum(key.nbytes for key in self.keys.values())

    def take(self, indices: Sequence[int] | np.ndarray) -> Columns:
        """Choose examples.

        Args:
            indices: int [M], 0 <= index < N, in any order, repeats allowed.

        Returns:
            M examples.

        Raises:
            IndexError: an index out of range.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < self.num_rows):
            raise IndexError(f"indices from {indices.min()} to {indices.max()}, there are {self.num_rows} rows")
        return Columns(
            self.dense[indices],
            None if self.labels is None else self.labels[indices],
            {name: column.take(indices) for name, column in self.sparse.items()},
            {name: key.take(_arrow(indices)) for name, key in self.keys.items()},
        )

    def slice(self, start: int, stop: int) -> Columns:
        """Choose a range of examples; arrays are views, not copies.

        Args:
            start: first example.
            stop: behind the last example; both are cut to 0 ... N.

        Returns:
            The examples of that range.
        """
        stop = min(max(stop, 0), self.num_rows)
        start = min(max(start, 0), stop)
        return Columns(
            self.dense[start:stop],
            None if self.labels is None else self.labels[start:stop],
            {name: column.slice(start, stop) for name, column in self.sparse.items()},
            {name: key.slice(start, stop - start) for name, key in self.keys.items()},
        )

    @staticmethod
    def concat(parts: Iterable[Columns]) -> Columns:
        """Put examples one behind the other.

        Args:
            parts: at least one; all from the same schema, with or without labels alike.

        Returns:
            All examples in order; counts are added.

        Raises:
            ValueError: no parts.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("concat needs at least one part")
        if len(parts) == 1:
            return parts[0]
        labels = [part.labels for part in parts]
        keys: dict[str, pa.Array] = {}
        if parts[0].keys:
            import pyarrow as pa

            keys = {name: pa.concat_arrays([part.keys[name] for part in parts]) for name in parts[0].keys}
        return Columns(
            np.concatenate([part.dense for part in parts]),
            None if labels[0] is None else np.concatenate(labels),
            {name: _concat_sparse([part.sparse[name] for part in parts]) for name in parts[0].sparse},
            keys,
            sum((part.counts for part in parts), Counts()),
        )


def _concat_sparse(parts: list[SparseColumn]) -> SparseColumn:
    ends = np.cumsum([len(part.rows) for part in parts])
    if ends[-1] > np.iinfo(np.int32).max:
        raise DataError(f"{ends[-1]} ids of one feature in one piece; offsets are int32.", "Use smaller pieces.")
    starts = [0, *ends[:-1]]
    offsets = [part.offsets[1:] + np.int32(start) for part, start in zip(parts, starts, strict=True)]
    weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
    return SparseColumn(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([parts[0].offsets[:1], *offsets]),
        weights,
    )


def _offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _arrow(indices: np.ndarray) -> pa.Array:
    import pyarrow as pa

    return pa.array(indices)
