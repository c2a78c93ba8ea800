"""`--workers 2` on a model of sequences: the numbers of one process, and its checkpoint is the unsharded model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines.recipe import read_recipe
from pipelines.run import Run, load_run
from tests.pipelines.conftest import write_rows
from tests.pipelines.test_train_workers import train
from tpurec.embeddings import FusedEmbeddingCollection
from tpurec.features import Schema
from tpurec.sharding.plan import Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sequence"


def sequences(count: int, seed: int) -> pa.Table:
    """Histories of 0 to 8 movies of 60, the next one, and 4 others; popular ones come often."""
    rng = np.random.default_rng(seed)

    def movies(length: int) -> list[int]:
        return (rng.random(length) ** 2 * 60).astype(np.int64).tolist()

    schema = Schema.load(EXAMPLE / "schema.toml")
    columns = {
        "label": np.ones(count),
        "history": [movies(length) for length in rng.integers(0, 9, count)],
        "item": movies(count),
        "others": [movies(4) for _ in range(count)],
    }
    return pa.table(columns).cast(schema.with_metadata(schema.arrow_schema()))


def test_two_workers_train_the_sequence_example_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    places = [
        f"data.{part}={write_rows(tmp_path / part / 'a.parquet', sequences(900, len(part))).parent}"
        for part in ("train", "test")
    ]
    # Dropout draws other masks on other numbers of ranks.
    small = ["model.options.dropout=0.0", "model.options.num_others=4", "model.options.history_length=6"]
    small += ["tables.embedding_dim=16", "train.batch_size=128", "train.epochs=2"]
    runs, results = [], []
    for workers in (0, 2):
        sharding = [f"sharding.num_workers={workers}", "sharding.constraints.item.pin=row_wise"]
        recipe = read_recipe(EXAMPLE / "recipe.toml", [*places, *small, *sharding[: workers or 0]])
        runs.append(Run(tmp_path / f"run-{workers}"))
        results.append(train(runs[-1], recipe))
    alone, shared = results
    assert shared["world_size"] == 2 and shared["steps"] == alone["steps"] > 10
    assert shared["log_loss"] == pytest.approx(alone["log_loss"], abs=1e-5)
    placed = Plan.load(runs[1].plan_file).table("item")
    assert (placed.sharding, placed.exchange, placed.table.pooling) == ("row_wise", "unique_rows", "none")
    models = [load_run(run.path).model for run in runs]
    assert all(isinstance(model.items, FusedEmbeddingCollection) for model in models)
    ours = models[1].state_dict()
    assert "items.embeddings.item.weight" in ours
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-4)
