"""Train on MovieLens-100k: will this user like this movie? Every step after `prepare` is a public `tpurec` command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.movielens.prepare import prepare
from tpurec.errors import TpurecError
from tpurec.reporting import Reporter

HERE = Path(__file__).parent
SCHEMA, RECIPE = HERE / "schema.toml", HERE / "recipe.toml"


def tpurec(reporter: Reporter, *words: str | Path) -> dict[str, Any]:
    """Run one `tpurec` command, its progress shown on stderr, and return its JSON answer.

    Args:
        reporter: prints the command, so that it can be copied.
        words: the command's words; `--json` is added.

    Returns:
        The object that the command printed.

    Raises:
        TpurecError: the command failed.
    """
    arguments = [str(word) for word in words]
    reporter.log(f"$ tpurec {' '.join(arguments)}")
    command = [sys.executable, "-m", "tpurec.cli", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise TpurecError(
            f"`tpurec {arguments[0]}` failed with exit code {done.returncode}.", "Its error stands above."
        )
    return json.loads(done.stdout)


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
    raw, data = out / "raw", out / "data"
    rows = prepare(folder, raw, seed)
    reporter.log(f"{folder}: {rows['train']:,} training and {rows['test']:,} test rows in {raw}")
    for part in ("train", "test"):
        tpurec(reporter, "data", "convert", raw / f"{part}.csv", data / part, "--schema", SCHEMA)
    places = ("--set", f"data.train={data / 'train'}", "--set", f"data.test={data / 'test'}")
    trained = tpurec(reporter, "train", RECIPE, *places, "--set", f"train.seed={seed}", "--out", out / "run")
    kept = ("auc", "log_loss", "normalized_entropy", "calibration", "eval_rows", "steps", "best_step", "run")
    return {
        **{key: trained[key] for key in kept},
        "train_rows": rows["train"],
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Parse the options and run.

    Raises:
        SystemExit: with 1 after a failure, whose reason is on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.movielens", description=__doc__)
    parser.add_argument("data", metavar="DATA_DIR", type=Path, help="holds ml-100k.inter, ml-100k.user, ml-100k.item")
    parser.add_argument("--out", type=Path, help="folder for data and RUN; default: build/movielens/seed-SEED")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of training")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    options = parser.parse_args()
    reporter = Reporter(options.json)
    out = options.out or Path("build/movielens") / f"seed-{options.seed}"
    try:
        reporter.result(run(options.data, out, options.seed, reporter))
    except TpurecError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
