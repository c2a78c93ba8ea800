"""A small click log that a model can learn, with every kind of column, and a recipe for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature

SCHEMA = Schema(
    name="little",
    label=LabelColumn("click"),
    dense=(DenseFeature("price"), DenseFeature("age", transform="identity")),
    sparse=(
        SparseFeature("user", 50, kind="integer"),
        SparseFeature("item", 40, kind="hex"),
        SparseFeature("tags", 30, kind="text", multi_valued=True, weights="tag_weights"),
    ),
    id_policy="hash",
    keys=("request",),
)


def click_rows(count: int, seed: int = 0) -> pa.Table:
    """Rows whose label depends on user, item and price; the best AUC is about 0.9."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 30, count), rng.integers(0, 30, count)
    price = rng.gamma(2.0, 3.0, count)
    logit = 1.2 * (user % 5 - 2) + np.where(item % 2 == 0, 1.5, -1.5) + 0.5 * (np.log1p(price) - 1.8)
    lengths = rng.integers(0, 4, count)
    tags = [[f"t{tag}" for tag in rng.integers(0, 20, n)] for n in lengths]
    return pa.table(
        {
            "click": pa.array((rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)),
            "price": pa.array(price.astype(np.float32), mask=rng.random(count) < 0.1),
            "age": pa.array(rng.normal(0, 1, count).astype(np.float32)),
            "user": pa.array(user, mask=rng.random(count) < 0.05),
            "item": pa.array([f"{value:08x}" for value in item * 7919]),
            "tags": pa.array(tags),
            "tag_weights": pa.array(
                [list(rng.random(n).astype(np.float32)) for n in lengths], type=pa.list_(pa.float32())
            ),
            "request": pa.array([f"r{seed}-{number}" for number in range(count)]),
        }
    ).cast(SCHEMA.with_metadata(pa.schema([*SCHEMA.arrow_schema(), pa.field("request", pa.string())])))


def write_rows(path: Path, table: pa.Table, row_group_size: int = 700) -> Path:
    """Write one Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> Path:
    """Folder with train/ (2 files, 5,000 rows) and test/ (1,003 rows)."""
    folder = tmp_path_factory.mktemp("clicks")
    write_rows(folder / "train" / "a.parquet", click_rows(3000, 1))
    write_rows(folder / "train" / "b.parquet", click_rows(2000, 2))
    write_rows(folder / "test" / "a.parquet", click_rows(1003, 3))
    return folder


RECIPE = """
[data]
train = "{data}/train"
test = "{data}/test"
validation_share = 0.1
shuffle_window = 1000

[model]
dense_hidden_sizes = [16]
over_hidden_sizes = [16]

[tables]
embedding_dim = 8
learning_rate = 0.1

[train]
batch_size = 128
epochs = 2
eval_batch_size = 256
learning_rate = 0.01
warmup_steps = 5
decay = "linear"
evaluate_every_steps = 15
log_every_steps = 7

[device]
threads = 1

[checkpoint]
every_steps = 10
"""


@pytest.fixture
def recipe_file(clicks, tmp_path) -> Path:
    """A recipe that trains on `clicks` in about a second."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(data=clicks))
    return path
