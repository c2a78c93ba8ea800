"""The next movie on MovieLens-100k: what does a user rate next, after all that he has rated?

Every step after `prepare` is a public `tpurec` command; recall and NDCG are computed from the scores of all movies that
the user has not rated yet, and stand beside those of a ranking by popularity.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples.on_movielens import convert_and_train, main
from examples.ranking import comparison, show
from examples.sequence.prepare import Sequences, prepare
from tpurec.reporting import Reporter

HERE = Path(__file__).parent
K = 10


def run(folder: Path, out: Path, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Prepare, convert, train and rank.

    Args:
        folder: holds MovieLens-100k's files.
        out: for the data and the RUN; a RUN that is there is resumed.
        seed: of the random movies and of training.
        reporter: where progress goes.

    Returns:
        Recall and NDCG at 10 of the model and of popularity, their margin, the log loss (the cross entropy of the next
        movie among the others) on the held-out movies, the RUN, and the seconds it all took.

    Raises:
        TpurecError: the files are not there, or a command failed.
    """
    started = time.monotonic()
    raw = out / "raw"
    found = prepare(folder, raw, seed)
    reporter.log(f"{folder}: {sum(map(len, found.held_out)):,} last movies held out, in {raw}")
    trained = convert_and_train(HERE, out, seed, reporter)
    return {
        **comparison(scores(Path(trained["run"]), found), found.seen, found.held_out, K),
        **{key: trained[key] for key in ("log_loss", "steps", "run")},
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def scores(run_folder: Path, found: Sequences) -> np.ndarray:
    """The trained model's scores of all movies for all users, after all that they have seen.

    Args:
        run_folder: the RUN.
        found: the sequences.

    Returns:
        float32 `[users, items]`.
    """
    import torch
    from torchrec import KeyedJaggedTensor

    from pipelines.run import load_run

    model = load_run(run_folder).model
    row_of_item = torch.tensor([int(item) for item in found.items])  # the schema's transform is the identity
    seen = [items[::-1][: model.history_length] for items in found.seen]
    history = row_of_item[torch.tensor([item for items in seen for item in items], dtype=torch.int64)]
    ids = {"history": history, "item": row_of_item, "others": row_of_item[:0]}
    lengths = {name: torch.zeros(len(seen), dtype=torch.int64) for name in ids}
    lengths["history"] = torch.tensor([len(items) for items in seen])
    lengths["item"][0] = len(row_of_item)  # all movies' rows, whichever user they are asked for
    features = KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=torch.cat(list(lengths.values())))
    with torch.inference_mode():
        rows = model.items(features)
        return (model.user_vectors(rows["history"]) @ rows["item"].values().T).numpy()


def shown(console: Console, result: dict[str, Any]) -> None:
    """Print the result for people."""
    show(console, "The movie that a user rates next, out of all unseen", result, K)


if __name__ == "__main__":
    main("sequence", __doc__, "the random movies and of training", run, shown)
