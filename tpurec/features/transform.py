"""The transform: raw Arrow columns in, model inputs out. Training, offline scoring and serving all call this one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tpurec.errors import ConfigError, DataError
from tpurec.features.arrow_columns import Bags, check_types, id_bags, numbers, one_array, weight_bags
from tpurec.features.columns import Columns, Counts, SparseColumn
from tpurec.features.feature_specs import DenseFeature, LabelColumn
from tpurec.features.id_policy import BLANK, REASONS, REMEDY, IdMap
from tpurec.features.problems import Problem, integer_problem, raise_first, refuse_infinite
from tpurec.features.schema import Schema
from tpurec.features.weights import match_weights, refuse_bad_weights


class Transformer:
    """Applies a schema to Arrow tables.

    Args:
        schema: what to do; see the classes in schema.py for each rule.

    Raises:
        ConfigError: a vocabulary entry that its kind does not allow.

    >>> transformer = Transformer(Schema.load("criteo"))           # doctest: +SKIP
    >>> columns = transformer(table, source="day_0.parquet")       # doctest: +SKIP
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        try:
            self._id_maps = [IdMap(feature) for feature in schema.sparse]
        except ValueError as error:
            raise ConfigError(f"schema {schema.name!r}: {error}.") from None

    def check(self, found: pa.Schema, source: str, *, labels: bool = True, keys: bool = False) -> None:
        """Check names and types of columns before work begins; see `check_types`.

        Args:
            found: Arrow schema of a file or table.
            source: file name for the error text.
            labels: the label column is needed.
            keys: the key columns are needed.

        Raises:
            DataError: naming source, column, the type found and the types expected.
        """
        check_types(found, self.schema, source, labels=labels, keys=keys)

    def __call__(
        self,
        table: pa.Table | pa.RecordBatch,
        labels: bool = True,
        *,
        keys: bool = False,
        source: str = "input",
        first_row: int = 0,
    ) -> Columns:
        """Transform rows.

        Args:
            table: N rows with the schema's columns; others are ignored.
            labels: read the label column.
            keys: carry the key columns.
            source: file name for error texts.
            first_row: number of the first row in `source`, for error texts.

        Returns:
            N transformed examples with counts.

        Raises:
            DataError: a column absent or of a wrong type; a label outside [0, 1] without threshold; an infinite number;
                weights that do not match the ids; an id without a row under policy `error`.
        """
        columns, problems = self.collect(table, labels, keys=keys, source=source)
        raise_first(problems, source, first_row)
        return columns

    def collect(
        self, table: pa.Table | pa.RecordBatch, labels: bool = True, *, keys: bool = False, source: str = "input"
    ) -> tuple[Columns, list[Problem]]:
        """Transform rows and return faults of values instead of raising the first.

        Args:
            table: as for a call.
            labels: as for a call.
            keys: as for a call.
            source: as for a call.

        Returns:
            N examples, and the problems; the numbers of an example that a problem names mean nothing.

        Raises:
            DataError: a column absent or of a wrong type.
        """
        self.check(table.schema, source, labels=labels, keys=keys)
        num_rows = table.num_rows
        counts = Counts(rows=num_rows)
        problems: list[Problem] = []
        label_column = None
        if labels:
            label_column = label_values(table.column(self.schema.label.column), self.schema.label, problems)
            counts.missing_labels = int(np.isnan(label_column).sum())
        dense = np.empty((num_rows, len(self.schema.dense)), dtype=np.float32)
        for position, feature in enumerate(self.schema.dense):
            dense[:, position] = _dense(table.column(feature.column), feature, problems)
        sparse = {id_map.feature.name: self._sparse(table, id_map, counts, problems) for id_map in self._id_maps}
        carried = {key: one_array(table.column(key)) for key in self.schema.keys} if keys else {}
        return Columns(dense, label_column, sparse, carried, counts), problems

    def _sparse(
        self, table: pa.Table | pa.RecordBatch, id_map: IdMap, counts: Counts, problems: list[Problem]
    ) -> SparseColumn:
        feature = id_map.feature
        bags = id_bags(table.column(feature.column), feature)
        if len(bags.faults):
            problems.append(integer_problem(bags, feature))
        weights = None
        if feature.weights:
            weight = weight_bags(table.column(feature.weights), feature)
            bags, weights = match_weights(bags, weight, feature, problems)
        rows = id_map.rows(bags.values)
        blank = rows == BLANK
        if weights is not None:
            refuse_bad_weights(bags, ~blank, weights, feature, problems)
        into = counts.tables.setdefault(feature.table, {"ids": 0})
        into["ids"] += len(rows) - int(np.count_nonzero(blank))
        keep = None
        if len(rows) and rows.min() < 0:
            self._apply_policy(rows, bags, id_map, into, problems)
            keep = rows >= 0
            keep = None if keep.all() else keep
        offsets = _offsets(bags.lengths, keep, table.num_rows)
        if keep is not None:
            rows = rows[keep]
            weights = None if weights is None else weights[keep]
        return SparseColumn(rows, offsets, weights)

    def _apply_policy(
        self, rows: np.ndarray, bags: Bags, id_map: IdMap, into: dict[str, int], problems: list[Problem]
    ) -> None:
        """Count ids without a row; under `hash` give them one in place, under `error` report them."""
        feature = id_map.feature
        policy = self.schema.policy_of(feature)
        for code, reason in REASONS.items():
            positions = np.flatnonzero(rows == code)
            if not len(positions):
                continue
            into[reason] = into.get(reason, 0) + len(positions)
            if policy == "skip":
                continue
            ids = bags.values.take(pa.array(positions))
            ids = ids.dictionary_decode() if isinstance(ids, pa.DictionaryArray) else ids
            if policy == "hash":
                rows[positions] = id_map.hashed(ids)
            else:
                message = _complaint(id_map, code, ids)
                problems.append(Problem(feature.column, reason, bags.row_of(positions), message, REMEDY))


def _complaint(id_map: IdMap, reason: int, ids: pa.Array) -> Callable[[int], str]:
    return lambda k: id_map.complaint(reason, ids[k].as_py())


def label_values(column: pa.Array | pa.ChunkedArray, label: LabelColumn, problems: list[Problem]) -> np.ndarray:
    """Labels of a column.

    Args:
        column: numbers [N].
        label: threshold and the number that stands for a missing label.
        problems: where labels outside [0, 1] are reported.

    Returns:
        float32 [N], NaN where missing.
    """
    values = numbers(column)
    if label.missing is not None:
        values = np.where(values == np.float32(label.missing), np.nan, values)
    if label.threshold is not None:
        refuse_infinite(label.column, values, problems)
        # Values were rounded to float32, so that 0.7 counts as 0.7 only beside a threshold that was rounded too.
        labels = (values >= np.float32(label.threshold)).astype(np.float32)
        labels[np.isnan(values)] = np.nan
        return labels
    bad = np.flatnonzero((values < 0) | (values > 1))
    if len(bad):
        found = values[bad]
        problems.append(
            Problem(
                label.column,
                "label_out_of_range",
                bad,
                lambda k: f"label {found[k]:g} is outside [0, 1]",
                "If it stands for a missing label, set label.missing to it; if it is a rating, set label.threshold.",
            )
        )
    return values.astype(np.float32)


def _dense(column: pa.ChunkedArray, feature: DenseFeature, problems: list[Problem]) -> np.ndarray:
    values = numbers(column)
    refuse_infinite(feature.column, values, problems)
    if feature.negative == "blank":
        values = np.where(values < 0, np.nan, values)
    elif feature.negative == "clip":
        values = np.where(values < 0, 0.0, values)
    blank = np.isnan(values)
    if blank.any():
        values = np.where(blank, np.float64(np.float32(feature.blank)), values)
    if feature.transform == "log1p":
        return np.copysign(np.log1p(np.abs(values)), values)
    if feature.transform == "standardize":
        return (values - feature.mean) / feature.std
    return values


def _offsets(lengths: np.ndarray | None, keep: np.ndarray | None, num_rows: int) -> np.ndarray:
    """int32 [N + 1] of the ids that are kept."""
    if lengths is None and keep is None:
        return np.arange(num_rows + 1, dtype=np.int32)
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(keep if lengths is None else lengths, out=offsets[1:])
    if lengths is not None and keep is not None:
        kept_before = np.zeros(len(keep) + 1, dtype=np.int64)
        np.cumsum(keep, out=kept_before[1:])
        offsets = kept_before[offsets]
    if offsets[-1] > np.iinfo(np.int32).max:
        raise DataError(f"{offsets[-1]} ids of one feature in one piece; offsets are int32.", "Use smaller pieces.")
    return offsets.astype(np.int32)
