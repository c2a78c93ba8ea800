"""The sharding planner against its lower bound, the exact optimum of small problems, and TorchRec's planner.

python -m benchmarks.planner [--json] [--only TEXT] [--no-torchrec] [--torchrec-timeout 60] [--plot FILE.png]

Every plan is made in a process of its own, so that seconds include start-up of the libraries and the peak memory is
its own. Both planners' plans are costed by our model in the same run, and by TorchRec's estimator where it has such
shardings.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.planner_problems import BATCH_SIZE, PROBLEMS, mixed_tables, problem
from tpurec.topology.slices import SliceTopology

SMALL_PROBLEMS = 200
GROWTH = [(count, slice_) for slice_ in ("v6e-16", "v6e-256", "v5p-2048") for count in (25, 50, 100, 200, 400)]


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="only problems whose name has this text")
    parser.add_argument("--no-torchrec", action="store_true", help="leave TorchRec's planner out")
    parser.add_argument("--torchrec-timeout", type=float, default=60.0, help="seconds that TorchRec's planner gets")
    parser.add_argument("--plot", metavar="FILE", help="draw how time grows with tables and ranks (needs matplotlib)")
    parser.add_argument("--child", nargs=3, metavar=("PLANNER", "PROBLEM", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(*options.child)))
        return
    result: dict[str, Any] = {"batch_size": BATCH_SIZE, "problems": {}}
    for name in PROBLEMS:
        if options.only in name:
            result["problems"][name] = _compare(name, None if options.no_torchrec else options.torchrec_timeout)
            _say(name, result["problems"][name])
    if not options.only:
        result["small"] = small_problems()
        print(f"small problems: {result['small']}", file=sys.stderr)
    if options.plot:
        result["growth"] = growth()
        draw(result["growth"], options.plot)
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)


def _compare(name: str, torchrec_timeout: float | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "plan.json"  # so that TorchRec's time is not spent on planning with ours again
        found = {"ours": _run("ours", name, ours, None)}
        if torchrec_timeout is not None:
            found["torchrec"] = _run("torchrec", name, ours, torchrec_timeout)
    if torchrec_timeout is not None:
        other = found["torchrec"]
        if "our_model" in other:
            found["step_torchrec_over_ours_by_our_model"] = (
                other["our_model"]["step_seconds"] / found["ours"]["step_seconds"]
            )
            mine = other.get("its_estimator_ms_of_ours")
            found["step_torchrec_over_ours_by_its_estimator"] = other["its_estimator_ms"] / mine if mine else None
            found["plan_seconds_torchrec_over_ours"] = other["plan_seconds"] / found["ours"]["plan_seconds"]
    return found


def _run(planner: str, name: str, plan_file: Path, timeout: float | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner", "--child", planner, name, str(plan_file)]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no plan in {timeout:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": time.perf_counter() - begun}


def _child(planner: str, name: str, plan_file: str) -> dict[str, Any]:
    tables, slice_name = problem(name)
    from tpurec.sharding.planner import plan

    if planner == "ours":
        begun = time.process_time()
        answer = plan(tables, slice_name, BATCH_SIZE)
        cpu_seconds = time.process_time() - begun
        found = answer.summary()
        if answer.fits:
            answer.save(plan_file)
        keys = ("fits", "num_ranks", "idle_ranks", "step_seconds", "lower_bound_seconds", "lower_bound_kind")
        return {
            **{key: found[key] for key in (*keys, "hbm_bytes_max", "plan_seconds")},
            "plan_cpu_seconds": cpu_seconds,
            "step_over_bound": found["step_seconds"] / found["lower_bound_seconds"],
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    from benchmarks.planner_torchrec import run
    from tpurec.sharding.plan import Plan

    ours = Plan.load(plan_file) if Path(plan_file).exists() else None
    return run(tables, SliceTopology.parse(slice_name), BATCH_SIZE, ours)


def small_problems(count: int = SMALL_PROBLEMS) -> dict[str, float]:
    """Compare the search for large problems with the exact optimum of small ones.

    Args:
        count: random problems.

    Returns:
        How far above the optimum, in percent.
    """
    import numpy as np

    from tpurec.sharding import search
    from tpurec.sharding.assumptions import Assumptions
    from tpurec.sharding.exact import best_of_all
    from tpurec.sharding.planner import make_space

    enumerate_small = search.is_small
    above = []
    try:
        search.is_small = lambda space: False
        for seed in range(count):
            rng = np.random.default_rng(seed)
            slice_ = SliceTopology.parse(str(rng.choice(["cpu-2", "cpu-3", "v6e-4", "v6e-8"])))
            tables = mixed_tables(2 if slice_.num_ranks > 4 else 3, float(10 ** rng.uniform(6, 10)), seed)
            batch = 128 * slice_.num_ranks
            space = make_space(tables, slice_, batch, Assumptions())
            best = best_of_all(space, space.model.capacity_bytes)
            if best is not None:
                found = search.search(space, tables, slice_, Assumptions(), search.Clock(None))
                above.append(100 * (found.cost.seconds / space.cost(best).seconds - 1))
    finally:
        search.is_small = enumerate_small
    return {
        "problems": len(above),
        "heuristic_above_optimum_percent_max": float(np.max(above)),
        "heuristic_above_optimum_percent_median": float(np.median(above)),
    }


def growth() -> list[dict[str, Any]]:
    """How planning time grows with tables and ranks.

    Returns:
        Per size: tables, ranks, seconds, seconds of CPU time, step over bound.
    """
    from tpurec.sharding.planner import plan

    points = []
    for count, slice_ in GROWTH:
        begun = time.process_time()
        answer = plan(mixed_tables(count, count * 1e9), slice_, BATCH_SIZE)
        cpu_seconds = time.process_time() - begun
        found = answer.summary()
        if found["fits"]:
            ratio = found["step_seconds"] / found["lower_bound_seconds"]
            size = {"tables": count, "ranks": found["num_ranks"]}
            points.append({**size, "seconds": found["plan_seconds"], "cpu_seconds": cpu_seconds, "over_bound": ratio})
            print(f"growth: {points[-1]}", file=sys.stderr)
    return points


def draw(points: list[dict[str, Any]], path: str) -> None:
    """Draw planning time over tables, one line per number of ranks.

    Args:
        points: of `growth`.
        path: the picture's file.
    """
    from tpurec.extras import require

    require("matplotlib", "--plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for ranks in sorted({point["ranks"] for point in points}):
        line = [point for point in points if point["ranks"] == ranks]
        axes.loglog([p["tables"] for p in line], [p["seconds"] for p in line], marker="o", label=f"{ranks} ranks")
    counts = sorted({point["tables"] for point in points})
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tables")
    axes.set_ylabel("seconds to plan")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _say(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {json.dumps(found)}", file=sys.stderr)


def print_table(result: dict[str, Any]) -> None:
    """Print the results for people.

    Args:
        result: what --json prints.
    """
    header = f"{'problem':<30}{'s':>8}{'CPU s':>8}{'RSS MB':>8}{'idle':>6}{'ms/step':>9}{'/bound':>8}"
    print(f"{header}{'TorchRec s':>12}{'its step/ours':>15}{'by its estimator':>18}")
    for name, found in result["problems"].items():
        ours, other = found["ours"], found.get("torchrec", {})
        if "error" in ours:
            print(f"{name:<30}  {ours['error']}")
            continue
        line = f"{name:<30}{ours['plan_seconds']:>8.2f}{ours['plan_cpu_seconds']:>8.2f}"
        line += f"{ours['peak_rss_bytes'] / 1e6:>8.0f}{ours['idle_ranks']:>6}"
        line += f"{1e3 * ours['step_seconds']:>9.3f}{ours['step_over_bound']:>8.3f}"
        if "error" in other:
            line += f"  {other['error']}"
        elif other:
            line += f"{other['plan_seconds']:>12.1f}{found['step_torchrec_over_ours_by_our_model']:>15.2f}"
            judged = found["step_torchrec_over_ours_by_its_estimator"]  # None: it has no such shardings as ours
            line += f"{'-' if judged is None else format(judged, '.2f'):>18}"
        print(line)


if __name__ == "__main__":
    main()
