"""Run the whole job as a user would: every step below is a `tpurec` command that can be copied from the terminal."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RECIPE = "pipelines/recipes/demo.toml"
SERVE_READY_SECONDS = 120
PLAN_BATCH = 65_536
console = Console(highlight=False)


def tpurec(*words: str | Path) -> dict[str, Any]:
    """Run one `tpurec` command, its progress shown, and return its JSON answer.

    Args:
        words: the command's words; `--json` is added.

    Returns:
        The object that the command printed.

    Raises:
        SystemExit: the command failed; its own error is on the terminal already.
    """
    arguments = [str(word) for word in words]
    console.print(f"$ tpurec {' '.join(arguments)}", style="bold", markup=False, soft_wrap=True)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", *arguments, "--json"], stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        sys.exit(f"demo: `tpurec {arguments[0]}` failed with exit code {done.returncode}")
    console.print(f"  done in {time.monotonic() - started:.1f} s", style="dim")
    return json.loads(done.stdout)


def ask_online(bundle: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Start the service on a free port, send one request, and stop it.

    Args:
        bundle: folder of the scoring bundle.
        rows: raw input rows.

    Returns:
        The answer of `POST /v1/score`.
    """
    words = [sys.executable, "-m", "tpurec.cli", "serve", str(bundle), "--port", "0", "--json"]
    console.print(f"$ tpurec serve {bundle} --port 0", style="bold", markup=False, soft_wrap=True)
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""  # printed once the service is ready
        if not line:
            sys.exit(f"demo: `tpurec serve` stopped with exit code {server.wait(SERVE_READY_SECONDS)}")
        url = json.loads(line)["url"]
        request = urllib.request.Request(
            f"{url}/v1/score", json.dumps({"rows": rows}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    finally:
        server.terminate()
        server.wait(30)


def planned(plan: dict[str, Any]) -> str:
    """Say a plan in one line.

    Args:
        plan: what `tpurec plan --json` answered; it fits, or the command had failed.

    Returns:
        Ranks, what became of the tables, and the estimated step.
    """
    ways = Counter(table["sharding"] for table in plan["tables"]).most_common()
    return (
        f"fits, {plan['num_ranks']} ranks, {plan['idle_ranks'] or 'none'} idle; tables: "
        f"{', '.join(f'{number} {way}' for way, number in ways)}; estimated {plan['step_seconds'] * 1e3:.2f} ms a step "
        f"of {PLAN_BATCH:,} (a model, not run on hardware)"
    )


def first_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Read raw rows for a request from a Parquet folder.

    Args:
        path: folder of Parquet files.
        count: how many rows.

    Returns:
        One mapping of column to value a row, blanks left out.
    """
    import pyarrow.dataset

    rows = pyarrow.dataset.dataset(path, format="parquet").head(count).to_pylist()
    return [{name: value for name, value in row.items() if value is not None and name != "label"} for row in rows]


def main() -> None:
    """Parse the options and run the steps."""
    parser = argparse.ArgumentParser(prog="python -m examples.dlrm", description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000, help="synthetic rows in all, test rows included")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for data, run, bundle and scores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", default="v6e-16", help="slice to plan the recipe's tables for")
    options = parser.parse_args()
    raw, data, run, bundle = (options.out / name for name in ("raw", "data", "run", "bundle"))
    scores = options.out / "scores.parquet"
    started = time.monotonic()

    synth = tpurec(
        "data", "synth", raw, "--rows", options.rows, "--seed", options.seed, "--format", "tsv", "--overwrite"
    )
    for part in ("train", "test"):
        tpurec("data", "convert", raw / part, data / part, "--schema", "criteo")
    recipe_data = ("--set", f"data.train={data / 'train'}", "--set", f"data.test={data / 'test'}")
    plan = tpurec("plan", RECIPE, *recipe_data, "--slice", options.slice, "--batch-size", PLAN_BATCH)
    trained = tpurec("train", RECIPE, *recipe_data, "--out", run)
    evaluated = tpurec("evaluate", run, data / "test", "--scores", options.out / "evaluated.parquet")
    tpurec("export", run, bundle)
    scored = tpurec("score", bundle, data / "test", scores, "--overwrite")
    answer = ask_online(bundle, first_rows(data / "test", 3))

    share = (evaluated["auc"] - 0.5) / (synth["best_auc"] - 0.5)
    table = Table(title="The whole job, on this CPU", show_header=False, title_justify="left")
    table.add_row("test AUC", f"{evaluated['auc']:.4f} on {evaluated['eval_rows']:,} rows")
    table.add_row("best reachable AUC", f"{synth['best_auc']:.4f} (the model reaches {share:.0%} of its gain over 0.5)")
    table.add_row("training", f"{trained['rows_per_second']:,.0f} rows/s, {trained['steps']:,} steps, run in {run}")
    table.add_row("offline scoring", f"{scored['rows_per_second']:,.0f} rows/s, scores in {scored['path']}")
    table.add_row("online scoring", f"{json.dumps(answer)} for 3 rows")
    table.add_row(f"plan for {plan['slice']}", planned(plan))
    table.add_row("all in", f"{time.monotonic() - started:.0f} s")
    console.print(table)


if __name__ == "__main__":
    main()
