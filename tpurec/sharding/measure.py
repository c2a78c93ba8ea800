"""Measure what the planner otherwise assumes, from a sample of training data: ids per example, unique share, skew."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpurec.errors import ConfigError, DataError
from tpurec.sharding.skew import exponent_of
from tpurec.sharding.tables import TableSpec

if TYPE_CHECKING:
    from tpurec.features.columns import Columns
    from tpurec.features.schema import Schema

SAMPLE_ROWS = 65_536
_NAMED = 5  # features in an error's text


@dataclass(frozen=True)
class MeasuredTable:
    """What a sample says of one table.

    Args:
        name: the table.
        ids_per_example: mean over examples, all its features together.
        num_ids: ids in the sample that have a row.
        unique_share: distinct rows / ids; None if the sample has no id.
        zipf_exponent: skew that gives this share in a table of its size; None likewise.
        ids_without_row: ids that training would refuse or skip; they are not in the other figures.
    """

    name: str
    ids_per_example: float
    num_ids: int
    unique_share: float | None
    zipf_exponent: float | None
    ids_without_row: int


@dataclass(frozen=True)
class Measurement:
    """What was measured, and from how much.

    Args:
        data: where the sample is from.
        num_examples: examples in the sample.
        num_examples_in_data: examples that are there.
        tables: what it says of each table.
    """

    data: str
    num_examples: int
    num_examples_in_data: int
    tables: tuple[MeasuredTable, ...]

    def summary(self) -> dict[str, Any]:
        """What `tpurec plan --json` has under `measured`.

        Returns:
            Plain values under the names of the fields.
        """
        return dataclasses.asdict(self)


def measure(
    tables: Sequence[TableSpec], data: str | Path, sample_rows: int = SAMPLE_ROWS
) -> tuple[tuple[TableSpec, ...], Measurement]:
    """Put measured statistics in place of given and assumed ones.

    Args:
        tables: their features are found by name in the data's schema; ids are mapped to rows as training does it.
            Hashed ids are hashed into the rows of these tables, however many the data's schema has.
        data: training Parquet: a file, or a folder.
        sample_rows: examples to read; they come from row groups spread evenly over the files.

    Returns:
        The tables with `ids_per_example` of each feature, and `unique_share` of a sample of `unique_share_ids` ids; and
        what was measured.

    Raises:
        ConfigError: a table's feature is not in the data.
        DataError: no Parquet with a tpurec schema there, a file lacks a column, or there are no rows.
    """
    from tpurec.features.schema import Schema

    schema = Schema.from_parquet(data)
    known = {feature.name: feature for feature in schema.sparse}
    lacking = [feature.name for table in tables for feature in table.features if feature.name not in known]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise ConfigError(
            f"{data}: the tables' features {', '.join(map(repr, lacking[:_NAMED]))}{more} are not in this data.",
            f"Its sparse features: {', '.join(known) or 'none'}. Give the data that these tables are trained on.",
        )
    wanted = []
    for table in tables:
        for feature in (known[one.name] for one in table.features):
            rows = table.num_embeddings if feature.transform == "hash" else feature.num_embeddings
            # A table of its own for every feature: counts are then per feature, and rows do not depend on its name.
            wanted.append(
                dataclasses.replace(feature, num_embeddings=min(rows, 2**31 - 1), table=feature.name, weights="")
            )
    columns = sample(dataclasses.replace(schema, dense=(), sparse=tuple(wanted)), Path(data), sample_rows)
    there = sum(rows for _, _, rows in _row_groups(Path(data)))
    found = [_measured(table, columns) for table in tables]
    measurement = Measurement(str(data), columns.num_rows, there, tuple(seen for _, seen in found))
    return tuple(table for table, _ in found), measurement


def _measured(table: TableSpec, columns: Columns) -> tuple[TableSpec, MeasuredTable]:
    rows = [columns.sparse[feature.name].rows for feature in table.features]
    features = tuple(
        dataclasses.replace(feature, ids_per_example=len(found) / columns.num_rows)
        for feature, found in zip(table.features, rows, strict=True)
    )
    counts = [columns.counts.tables.get(feature.name, {}) for feature in table.features]
    met = sum(count.get("ids", 0) for count in counts)
    ids = np.concatenate(rows)
    changed = dataclasses.replace(table, features=features)
    share = exponent = None
    if len(ids):  # if every bag of the sample is empty, there is nothing to say about their skew
        share = len(np.unique(ids)) / len(ids)
        changed = dataclasses.replace(changed, zipf_exponent=None, unique_share=share, unique_share_ids=len(ids))
        exponent = exponent_of(changed, 0.0)
    seen = MeasuredTable(table.name, changed.ids_per_example, len(ids), share, exponent, max(0, met - len(ids)))
    return changed, seen


def sample(schema: Schema, path: Path, sample_rows: int) -> Columns:
    """Read and transform rows of a data set, without labels.

    Args:
        schema: of the columns to read; ids that its policy would refuse are skipped.
        path: training Parquet: a file, or a folder.
        sample_rows: examples to read; they come from row groups spread evenly over the files.

    Returns:
        At most about `sample_rows` examples.

    Raises:
        DataError: there are no rows, or a file lacks a column or is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tpurec.features.columns import Columns
    from tpurec.features.transform import Transformer

    groups = _row_groups(path)
    total = sum(rows for _, _, rows in groups)
    if total == 0:
        raise DataError(f"{path}: has no rows to measure.", "Give the folder of the training data.")
    wanted = max(1, round(len(groups) * min(1.0, sample_rows / total)))
    chosen = [groups[int(position)] for position in np.linspace(0, len(groups) - 1, wanted)]
    per_group = -(-sample_rows // wanted)
    # A planner's question must not stop at an id that the recipe's policy refuses in training.
    lenient = [
        dataclasses.replace(feature, id_policy="skip") if schema.policy_of(feature) == "error" else feature
        for feature in schema.sparse
    ]
    transformer = Transformer(dataclasses.replace(schema, sparse=tuple(lenient)))
    parts = []
    for file, group, _ in chosen:
        try:
            with pq.ParquetFile(file) as parquet:
                table = parquet.read_row_group(group, columns=schema.columns(labels=False))
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file}: row group {group} cannot be read: {' '.join(str(error).split()).rstrip('.')}.",
                "Is the file damaged?",
            ) from None
        parts.append(transformer(table.slice(0, per_group), labels=False, source=str(file)))
    return Columns.concat(parts)


def _row_groups(path: Path) -> list[tuple[Path, int, int]]:
    """File, number and rows of every row group that has rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = []
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        try:
            metadata = pq.read_metadata(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}: not a Parquet file: {str(error).rstrip('.')}.", "Is it complete?") from None
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        groups += [(file, group, rows) for group, rows in enumerate(sizes) if rows]
    return groups
