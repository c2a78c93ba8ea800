"""Two-tower retrieval on MovieLens-100k: which movies will a user like, out of all that he has not seen yet?

Every step after `prepare` is a public `tpurec` command; recall and NDCG are computed from the vectors of all users and
movies, and stand beside those of a ranking by popularity.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.movielens.__main__ import tpurec
from examples.ranking import comparison, show
from examples.two_tower.prepare import Split, prepare
from tpurec.errors import TpurecError
from tpurec.reporting import Reporter

HERE = Path(__file__).parent
SCHEMA, RECIPE = HERE / "schema.toml", HERE / "recipe.toml"
K = 20


def run(folder: Path, out: Path, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Prepare, convert, train and rank.

    Args:
        folder: holds MovieLens-100k's files.
        out: for the data and the RUN; a RUN that is there is resumed.
        seed: of the split, the negatives and training.
        reporter: where progress goes.

    Returns:
        Recall and NDCG at 20 of the model and of popularity, their margin, the log loss and AUC on the held-out likes
        and their negatives, the RUN, and the seconds it all took.

    Raises:
        TpurecError: the files are not there, or a command failed.
    """
    started = time.monotonic()
    raw, data = out / "raw", out / "data"
    split = prepare(folder, raw, seed)
    likes, held_out = (sum(map(len, lists)) for lists in (split.train, split.held_out))
    reporter.log(f"{folder}: {likes:,} likes to learn from and {held_out:,} held out, in {raw}")
    for part in ("train", "test"):
        tpurec(reporter, "data", "convert", raw / f"{part}.csv", data / part, "--schema", SCHEMA)
    places = ("--set", f"data.train={data / 'train'}", "--set", f"data.test={data / 'test'}")
    trained = tpurec(reporter, "train", RECIPE, *places, "--set", f"train.seed={seed}", "--out", out / "run")
    users, items = vectors(Path(trained["run"]), raw / "pairs.csv", split)
    return {
        **comparison(users @ items.T, split.train, split.held_out, K),
        **{key: trained[key] for key in ("auc", "log_loss", "steps", "run")},
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def vectors(run_folder: Path, pairs: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """The trained towers' vectors of all users and movies.

    Args:
        run_folder: the RUN.
        pairs: rows in which every user and every movie occurs, user i and movie i in row i.
        split: how many there are.

    Returns:
        float32 `[users, D]` and `[items, D]`.
    """
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import torch

    from pipelines.run import load_run
    from tpurec.embeddings import to_torch
    from tpurec.features import Ladder, Transformer, pack, to_storage

    loaded = load_run(run_folder)
    types = dict.fromkeys(loaded.schema.columns(keys=True), pa.string())
    text = pa_csv.read_csv(pairs, convert_options=pa_csv.ConvertOptions(column_types=types))
    table, _ = to_storage(text, loaded.schema, str(pairs))
    columns = Transformer(loaded.schema)(table)
    batch = to_torch(pack(columns, columns.num_rows, Ladder.for_batch(columns.num_rows)))
    with torch.inference_mode():
        users, items = loaded.model.vectors(batch.features)
    return users[: len(split.users)].numpy(), items[: len(split.items)].numpy()


def main() -> None:
    """Parse the options and run.

    Raises:
        SystemExit: with 1 after a failure, whose reason is on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.two_tower", description=__doc__)
    parser.add_argument("data", metavar="DATA_DIR", type=Path, help="holds ml-100k.inter, ml-100k.user, ml-100k.item")
    parser.add_argument("--out", type=Path, help="folder for data and RUN; default: build/two_tower/seed-SEED")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the negatives and training")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    options = parser.parse_args()
    # `import torch` would otherwise look for a TPU, where torch_tpu is installed (docs/embeddings.md).
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    reporter = Reporter(options.json)
    out = options.out or Path("build/two_tower") / f"seed-{options.seed}"
    try:
        result = run(options.data, out, options.seed, reporter)
    except TpurecError as error:
        sys.exit(f"error: {error}")
    reporter.result(result, lambda console: show(console, "Movies that a user likes, out of all unseen", result, K))


if __name__ == "__main__":
    main()
