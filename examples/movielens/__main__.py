"""Train on MovieLens-100k: will this user like this movie? Every step after `prepare` is a public `tpurec` command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from examples.movielens.prepare import prepare
from examples.on_movielens import convert_and_train, main
from tpurec.reporting import Reporter

HERE = Path(__file__).parent


def run(folder: Path, out: Path, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Prepare, convert and train.

    Args:
        folder: holds MovieLens-100k's files.
        out: for the data and the RUN; a RUN that is there is resumed.
        seed: of the split into training and test rows, and of training.
        reporter: where progress goes.

    Returns:
        The metrics on the test rows, the numbers of rows and steps, the RUN, and the seconds it all took.

    Raises:
        TpurecError: the files are not there, or a command failed.
    """
    started = time.monotonic()
    raw = out / "raw"
    rows = prepare(folder, raw, seed)
    reporter.log(f"{folder}: {rows['train']:,} training and {rows['test']:,} test rows in {raw}")
    trained = convert_and_train(HERE, out, seed, reporter)
    kept = ("auc", "log_loss", "normalized_entropy", "calibration", "eval_rows", "steps", "best_step", "run")
    return {
        **{key: trained[key] for key in kept},
        "train_rows": rows["train"],
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    main("movielens", __doc__, "the split and of training", run)
