"""Measure what the planner otherwise assumes, from a sample of training data: ids per example and unique share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpurec.errors import ConfigError, DataError
from tpurec.sharding.tables import TableSpec

if TYPE_CHECKING:
    from tpurec.features.columns import Columns
    from tpurec.features.schema import Schema

SAMPLE_ROWS = 65_536


def measure(tables: Sequence[TableSpec], data: str | Path, sample_rows: int = SAMPLE_ROWS) -> tuple[TableSpec, ...]:
    """Put measured statistics in place of assumed ones.

    Args:
        tables: their features are found by name in the data's schema; ids are mapped to rows as training does it.
        data: training Parquet: a file, or a folder.
        sample_rows: examples to read; they come from row groups spread evenly over the files.

    Returns:
        The tables with `ids_per_example` of each feature, and `unique_share` of a sample of `unique_share_ids` ids.

    Raises:
        ConfigError: a table's feature is not in the data.
        DataError: no Parquet with a tpurec schema there, or it has no rows.
    """
    from tpurec.features.schema import Schema

    schema = Schema.from_parquet(data)
    known = [feature.name for feature in schema.sparse]
    for table in tables:
        for feature in table.features:
            if feature.name not in known:
                raise ConfigError(
                    f"table {table.name!r}: feature {feature.name!r} is not in {data}.",
                    f"Its sparse features: {', '.join(known)}.",
                )
    columns = sample(schema, Path(data), sample_rows)
    return tuple(_measured(table, columns) for table in tables)


def _measured(table: TableSpec, columns: Columns) -> TableSpec:
    rows = [columns.sparse[feature.name].rows for feature in table.features]
    num_examples = columns.num_rows
    features = tuple(
        dataclasses.replace(feature, ids_per_example=len(found) / num_examples)
        for feature, found in zip(table.features, rows, strict=True)
    )
    ids = np.concatenate(rows)
    if not len(ids):  # every bag of the sample is empty: nothing to say about their skew
        return dataclasses.replace(table, features=features)
    share = len(np.unique(ids)) / len(ids)
    return dataclasses.replace(table, features=features, unique_share=share, unique_share_ids=len(ids))


def sample(schema: Schema, path: Path, sample_rows: int) -> Columns:
    """Read and transform rows of a data set, without labels.

    Args:
        schema: of the data; ids that its policy would refuse are skipped.
        path: training Parquet: a file, or a folder.
        sample_rows: examples to read; they come from row groups spread evenly over the files.

    Returns:
        At most about `sample_rows` examples.

    Raises:
        DataError: there are no rows.
    """
    import pyarrow.parquet as pq

    from tpurec.features.columns import Columns
    from tpurec.features.transform import Transformer

    groups = []
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        metadata = pq.read_metadata(file)
        groups += [(file, group, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
    total = sum(rows for _, _, rows in groups)
    if total == 0:
        raise DataError(f"{path}: has no rows to measure.", "Give the folder of the training data.")
    wanted = max(1, round(len(groups) * min(1.0, sample_rows / total)))
    chosen = [groups[int(position)] for position in np.linspace(0, len(groups) - 1, wanted)]
    per_group = -(-sample_rows // wanted)
    # A planner's question must not stop at an id that the recipe's policy refuses in training.
    transformer = Transformer(schema.with_id_policy("skip"))
    parts = [
        transformer(
            pq.ParquetFile(file).read_row_group(group, columns=schema.columns(labels=False)).slice(0, per_group),
            labels=False,
            source=str(file),
        )
        for file, group, _ in chosen
    ]
    return Columns.concat(parts)
