"""What the examples on MovieLens-100k have in common: their options, and the public commands that they run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tpurec.errors import TpurecError
from tpurec.reporting import Reporter

Example = Callable[[Path, Path, int, Reporter], dict[str, Any]]


def convert_and_train(example: Path, out: Path, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Convert the rows that an example has prepared, and train on them by its schema and recipe.

    Args:
        example: the example's folder, with `schema.toml` and `recipe.toml`.
        out: has `raw/train.csv` and `raw/test.csv`, and gets `data` and `run`; a RUN that is there is resumed.
        seed: of training.
        reporter: where progress goes.

    Returns:
        What `tpurec train` answered.

    Raises:
        TpurecError: a command failed.
    """
    for part in ("train", "test"):
        words = (out / "raw" / f"{part}.csv", out / "data" / part, "--schema", example / "schema.toml")
        tpurec(reporter, "data", "convert", *words)
    places = [word for part in ("train", "test") for word in ("--set", f"data.{part}={out / 'data' / part}")]
    return tpurec(
        reporter, "train", example / "recipe.toml", *places, "--set", f"train.seed={seed}", "--out", out / "run"
    )


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


def main(
    name: str,
    description: str | None,
    seed_of: str,
    run: Example,
    show: Callable[[Console, dict[str, Any]], None] | None = None,
) -> None:
    """Parse an example's options and run it.

    Args:
        name: of its module in `examples`.
        description: what `--help` says.
        seed_of: what `--seed` decides.
        run: takes the folder with MovieLens-100k's files, the folder for data and RUN, the seed, and where progress
            goes; gives the result.
        show: draws the result; by default `key: value` lines.

    Raises:
        SystemExit: with 1 after a failure, whose reason is on stderr.
    """
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=description)
    parser.add_argument("data", metavar="DATA_DIR", type=Path, help="holds ml-100k.inter, ml-100k.user, ml-100k.item")
    parser.add_argument("--out", type=Path, help=f"folder for data and RUN; default: build/{name}/seed-SEED")
    parser.add_argument("--seed", type=int, default=0, help=f"of {seed_of}")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    options = parser.parse_args()
    # `import torch` would otherwise look for a TPU, where torch_tpu is installed (docs/embeddings.md).
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    reporter = Reporter(options.json)
    out = options.out or Path("build") / name / f"seed-{options.seed}"
    try:
        result = run(options.data, out, options.seed, reporter)
    except TpurecError as error:
        sys.exit(f"error: {error}")
    reporter.result(result, show and (lambda console: show(console, result)))
