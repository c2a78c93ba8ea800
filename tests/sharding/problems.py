"""Problems that several tests plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tpurec.sharding.tables import FeatureSpec, TableSpec

MLPERF = Path(__file__).resolve().parents[2] / "examples" / "mlperf_dlrm_v2" / "tables.toml"
# A list as people write it, of two tables and three features.
TABLE_LIST = """
batch_size = 4096
[[tables]]
name = "user"
num_embeddings = 1_000_000
embedding_dim = 64
features = [{name = "user_id", ids_per_example = 1}, {name = "friend", ids_per_example = 8}]
[[tables]]
name = "item"
num_embeddings = 5_000
embedding_dim = 64
features = [{name = "item_id"}]
"""


def table(name: str, rows: int, dim: int = 64, ids: float = 1.0, **more: object) -> TableSpec:
    """A table with one feature."""
    return TableSpec(name, rows, dim, (FeatureSpec(f"{name}_id", ids),), **more)


def random_tables(rng: np.random.Generator, count: int, largest: float = 3e7) -> list[TableSpec]:
    """Tables of mixed sizes, dims, bag lengths, optimizers and dtypes."""
    tables = []
    for number in range(count):
        made = table(
            f"t{number}",
            int(np.exp(rng.uniform(np.log(50), np.log(largest)))),
            int(rng.choice([8, 16, 32, 64, 128])),
            float(rng.choice([0.5, 1.0, 1.0, 3.0, 20.0])),
            optimizer=str(rng.choice(["row_wise_adagrad", "adagrad", "sgd", "adam"])),
            dtype=str(rng.choice(["float32", "float32", "bfloat16"])),
        )
        # TPUs take no bfloat16 rows of 8 columns.
        tables.append(made if made.embedding_dim > 8 else dataclasses.replace(made, dtype="float32"))
    return tables
