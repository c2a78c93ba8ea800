"""Two-tower retrieval on MovieLens-100k: which movies will a user like, out of all that he has not seen yet?

Every step after `prepare` is a public `tpurec` command; recall and NDCG are computed from the vectors of all users and
movies, and stand beside those of a ranking by popularity.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples.on_movielens import convert_and_train, main
from examples.ranking import comparison, show
from examples.two_tower.prepare import Split, prepare
from tpurec.reporting import Reporter

HERE = Path(__file__).parent
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
    raw = out / "raw"
    split = prepare(folder, raw, seed)
    likes, held_out = (sum(map(len, lists)) for lists in (split.train, split.held_out))
    reporter.log(f"{folder}: {likes:,} likes to learn from and {held_out:,} held out, in {raw}")
    trained = convert_and_train(HERE, out, seed, reporter)
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


def shown(console: Console, result: dict[str, Any]) -> None:
    """Print the result for people."""
    show(console, "Movies that a user likes, out of all unseen", result, K)


if __name__ == "__main__":
    main("two_tower", __doc__, "the split, the negatives and training", run, shown)
