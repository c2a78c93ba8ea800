"""The embedding tables of a recipe: row counts from the schema, everything else from [tables]. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tpurec.errors import ConfigError
from tpurec.features.schema import Schema
from tpurec.models.config import Pooling, TableDtype, TableOverride, TablesConfig


@dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    Args:
        name: table name.
        num_embeddings: rows.
        embedding_dim: columns.
        pooling: `sum`, `mean`, or `none` for sequences.
        dtype: `float32`, `bfloat16` or `float16`.
        optimizer: as `TablesConfig.optimizer` has it.
        features: names of the features that look it up, in schema order.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: Pooling
    dtype: TableDtype
    optimizer: str
    features: tuple[str, ...]


def table_specs(tables: TablesConfig, schema: Schema) -> list[TableSpec]:
    """Put schema and [tables] together.

    Args:
        tables: the recipe's section.
        schema: names the tables, their rows, and the features that share them.

    Returns:
        The tables, in order of first use by a feature.

    Raises:
        ConfigError: an override names a table that the schema does not have.
    """
    unknown = sorted(tables.overrides.keys() - schema.tables.keys())
    if unknown:
        raise ConfigError(
            f"tables.overrides.{unknown[0]}: the schema {schema.name!r} has no table {unknown[0]!r}.",
            f"Its tables: {', '.join(schema.tables) or 'none'}.",
        )
    specs = []
    for name, num_embeddings in schema.tables.items():
        own = tables.overrides.get(name, TableOverride())
        specs.append(
            TableSpec(
                name=name,
                num_embeddings=num_embeddings,
                embedding_dim=own.embedding_dim or tables.embedding_dim,
                pooling=own.pooling or tables.pooling,
                dtype=own.dtype or tables.dtype,
                optimizer=tables.optimizer,
                features=tuple(feature.name for feature in schema.sparse if feature.table == name),
            )
        )
    return specs
