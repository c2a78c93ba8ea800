"""Training speed here, all in one run: the bare step, the whole of `tpurec train`, and a plain TorchRec loop.

python -m benchmarks.training [--rows 200000] [--rounds 5] [--batch-size 2048] [--json]

- bare: the train step on batches that are ready in memory.
- train: `tpurec train` with the demo recipe, reading included; validation, checkpoints and start-up are not counted
  (`command` counts everything, start-up of the process too).
- torchrec: the same DLRM, dense optimizer and batches with TorchRec's own FusedEmbeddingBagCollection in a plain loop.

`bare` and `torchrec` take turns, and every number is the median of its rounds. Synthetic logs; made once a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "pipelines" / "recipes" / "demo.toml"
STEPS = 40
WARM_UP_STEPS = 5


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="synthetic rows, a tenth of them for the test")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds of {STEPS} steps each")
    parser.add_argument("--batch-size", type=int, default=2048, help="of all three")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of all three; 0: as the recipe has it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.rows, options.rounds, options.batch_size, options.threads)
    if options.json:
        print(json.dumps(result))
        return
    for name in ("bare", "torchrec", "train", "command"):
        print(f"{name:<34}{result[name]:>12,.0f} rows/s")
    print(f"{'train / bare (aim: 0.8 or more)':<34}{result['train_over_bare']:>12.2f}")
    print(f"{'bare / torchrec (aim: 1 or more)':<34}{result['bare_over_torchrec']:>12.2f}")
    print(f"batch {result['batch_size']}, {result['threads']} torch threads, {result['reader_workers']} reader threads")


def measure(folder: Path, rows: int, rounds: int, batch_size: int, threads: int) -> dict[str, Any]:
    """Measure all three.

    Args:
        folder: for data and RUN.
        rows: synthetic rows.
        rounds: of the bare step and the TorchRec loop.
        batch_size: rows of a batch.
        threads: torch threads; 0 as the recipe has it.

    Returns:
        Rows per second and ratios.
    """
    _tpurec("data", "synth", folder / "data", "--rows", rows)
    overrides = [
        f"data.train={folder}/data/train",
        f"data.test={folder}/data/test",
        f"train.batch_size={batch_size}",
        f"device.threads={threads}",
    ]
    words = [word for override in overrides for word in ("--set", override)]
    started = time.perf_counter()
    trained = _tpurec("train", RECIPE, "--out", folder / "run", *words)
    command = trained["rows_seen"] / (time.perf_counter() - started)
    bare, torchrec, about = _measure_steps(overrides, rounds)
    return {
        "bare": bare,
        "torchrec": torchrec,
        "train": trained["rows_per_second"],
        "command": command,
        "train_over_bare": trained["rows_per_second"] / bare,
        "bare_over_torchrec": bare / torchrec,
        **about,
    }


def _tpurec(*words: object) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "tpurec.cli", *map(str, words), "--json"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _measure_steps(overrides: list[str], rounds: int) -> tuple[float, float, dict[str, Any]]:
    import torch

    from pipelines.engine_local import LocalSource
    from pipelines.feed import DeviceFeed
    from pipelines.position import Position
    from pipelines.recipe import read_recipe
    from pipelines.source import find_data
    from pipelines.step import EagerStep, torch_optimizer
    from pipelines.train_loop import TrainLoop
    from tpurec.embeddings import to_torch
    from tpurec.models import build_model, table_optimizer

    recipe = read_recipe(RECIPE, overrides)
    source = LocalSource(recipe, find_data(recipe))
    threads = recipe.device.num_threads(recipe.data.reader_workers)
    torch.set_num_threads(threads)
    batches = list(DeviceFeed()(islice(source.train(0, 0), STEPS)))
    packed = [ready.item.packed for ready in batches]
    optimizer = table_optimizer(recipe.tables)
    model = build_model(recipe.model, recipe.tables, source.data.schema, optimizer=optimizer)
    config = recipe.train
    loop = TrainLoop(
        EagerStep(model, torch_optimizer(model, config.optimizer, config.learning_rate, config.weight_decay)),
        config,
        recipe.tables.learning_rate,
        source.batches_per_epoch,
        recipe.checkpoint.every_steps,
    )
    position = Position()
    torchrec_step = _torchrec_step(recipe, source.data.schema)
    ready = [to_torch(batch) for batch in packed]
    times: dict[str, list[float]] = {"bare": [], "torchrec": []}
    steps: dict[str, Callable[[int], None]] = {
        # As in `TrainLoop.run`: the move from arrays to tensors is part of the step.
        "bare": lambda number: loop.step(batches[number], position),
        "torchrec": lambda number: torchrec_step(ready[number]),
    }
    for step in steps.values():
        for number in range(min(WARM_UP_STEPS, len(packed))):
            step(number)
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for number in range(len(packed)):
                step(number)
            times[name].append(time.perf_counter() - started)
    rows = sum(batch.num_rows for batch in packed)
    bare, torchrec = (rows / statistics.median(times[name]) for name in ("bare", "torchrec"))
    about = {
        "batch_size": recipe.train.batch_size,
        "threads": threads,
        "reader_workers": recipe.data.reader_workers,
        "rounds": rounds,
    }
    return bare, torchrec, about


def _torchrec_step(recipe: Any, schema: Any) -> Callable[[Any], None]:
    """The loop that TorchRec's documentation shows, with its own fused collection and nothing of ours."""
    import torch
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    from tpurec.models import table_specs
    from tpurec.models.build import embedding_bag_configs

    specs = table_specs(recipe.tables, schema)
    collection = FusedEmbeddingBagCollection(
        embedding_bag_configs(specs),
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": recipe.tables.learning_rate, "eps": recipe.tables.eps},
    )
    dim = specs[0].embedding_dim
    model = DLRM(
        collection,
        len(schema.dense),
        [*recipe.model.dense_hidden_sizes, dim],
        [*recipe.model.over_hidden_sizes, 1],
    )
    tables = {id(parameter) for parameter in collection.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    optimizer = torch.optim.Adam(dense, lr=recipe.train.learning_rate)
    loss_function = torch.nn.BCEWithLogitsLoss()

    def step(batch: Any) -> None:
        loss = loss_function(model(batch.dense, batch.features).squeeze(1), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


if __name__ == "__main__":
    main()
