"""Run the test tiers, each in its own process with a time budget; say what was skipped and why, and what needs a TPU.

python -m tests.tiers              all tiers but `slow`
python -m tests.tiers default ray  only these, one after the other
python -m tests.tiers --must-run   a tier of which all tests were skipped fails, as in continuous integration

All tiers together run in rounds: those of a round side by side, because one alone leaves a core idle; tiers that start
processes of their own, or that something waits for, have their round to themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HARDWARE_PAGE = ROOT / "docs" / "not-run-on-hardware.md"
SPECIAL = ("compile", "interpret", "multiprocess", "ray", "browser", "emulated", "slow")
# Seconds on 2 quiet cores; the rounds below together under 40 minutes. A tier over its budget is reported; at twice the
# budget it is stopped and fails, so that a busy machine does not turn a passing tier into a failure.
BUDGETS = {
    "default": 650,
    "compile": 700,
    "interpret": 520,
    "multiprocess": 750,
    "ray": 420,
    "browser": 90,
    "emulated": 700,
    "slow": 7200,
}
# Each round's tiers are lanes that run side by side.
ROUNDS = ((("default",), ("emulated",)), (("compile",), ("interpret", "browser")), (("multiprocess", "ray"),))
STOP_FACTOR = 2
STOPPED = 124
MUST_RUN = "--must-run"
NO_TESTS = 5  # pytest's exit code for "nothing collected"


@dataclass
class Outcome:
    """What one tier did."""

    tier: str
    seconds: float
    code: int
    counts: Counter = field(default_factory=Counter)
    skips: Counter = field(default_factory=Counter)


def run_tier(tier: str, live: bool = True) -> Outcome:
    """Run one tier under its budget.

    Args:
        tier: `default` or a marker of `SPECIAL`.
        live: print what it prints at once; else when it is done, in one piece.

    Returns:
        Its outcome; code `STOPPED` if it was stopped.
    """
    expression = " and ".join(f"not {name}" for name in SPECIAL) if tier == "default" else f"{tier} and not slow"
    if tier == "slow":
        expression = "slow"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", expression, f"--junitxml={report}"]
        spool = None if live else (Path(folder) / "output.txt").open("w+", encoding="utf-8", errors="replace")
        title = f"\n=== tier {tier}: budget {BUDGETS[tier]} s"
        print(title + ("" if live else ", side by side; its output comes when it is done"), flush=True)
        try:
            limit = STOP_FACTOR * BUDGETS[tier]
            code = subprocess.run(
                command, cwd=ROOT, timeout=limit, check=False, stdout=spool, stderr=subprocess.STDOUT if spool else None
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"tier {tier} was stopped at {STOP_FACTOR} x its budget of {BUDGETS[tier]} s", flush=True)
            code = STOPPED
        if spool is not None:
            with spool:
                spool.seek(0)
                print(f"\n=== output of tier {tier}\n{spool.read()}", flush=True)
        outcome = Outcome(tier, time.monotonic() - started, code)
        if report.exists():
            _read_report(report, outcome)
    return outcome


def run_round(lanes: Sequence[Sequence[str]]) -> list[Outcome]:
    """Run lanes side by side, the tiers of each one after the other.

    Args:
        lanes: names of tiers; the first lane's output is printed as it comes.

    Returns:
        The outcomes.
    """
    with ThreadPoolExecutor(len(lanes)) as pool:
        running = [
            pool.submit(lambda lane, live: [run_tier(tier, live) for tier in lane], lane, number == 0)
            for number, lane in enumerate(lanes)
        ]
        return [outcome for lane in running for outcome in lane.result()]


def _read_report(report: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        skipped = case.find("skipped")
        if skipped is not None:
            outcome.counts["skipped"] += 1
            outcome.skips[re.sub(r"^Skipped: ", "", skipped.get("message", ""))] += 1
        elif kinds & {"failure", "error"}:
            outcome.counts["failed"] += 1
        else:
            outcome.counts["passed"] += 1


def _remark(outcome: Outcome) -> str:
    if outcome.code == STOPPED:
        return "  STOPPED"
    if _is_empty(outcome):
        return "  NOTHING RAN"
    return "  over budget" if outcome.seconds > BUDGETS[outcome.tier] else ""


def _is_empty(outcome: Outcome) -> bool:
    """Whether what the tier is to prove was not even tried."""
    return outcome.code in (0, NO_TESTS) and not outcome.counts["passed"]


def not_run_on_hardware(page: str) -> list[tuple[str, str, str]]:
    """Read what only a TPU can settle.

    Args:
        page: text of docs/not-run-on-hardware.md.

    Returns:
        The rows of its table: claim, what is known instead, where it is checked.

    Raises:
        ValueError: the page has no such table.
    """
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    rows = [(claim, known, where) for claim, known, where in cells[2:]]
    if not rows:
        raise ValueError(f"{HARDWARE_PAGE.name} has no table of three columns")
    return rows


def main(words: list[str]) -> int:
    """Run the tiers and print a summary.

    Args:
        words: names of tiers, none for all but `slow`; and `--must-run`: a tier in which nothing ran fails.

    Returns:
        0 if every tier passed, else 1; 2 for words that mean nothing.
    """
    tiers, must_run = [word for word in words if word != MUST_RUN], MUST_RUN in words
    unknown = set(tiers) - set(BUDGETS)
    if unknown:
        print(f"unknown tiers: {', '.join(sorted(unknown))}; known: {', '.join(BUDGETS)}", file=sys.stderr)
        return 2
    started = time.monotonic()
    rounds = ((tiers,),) if tiers else ROUNDS
    outcomes = [outcome for lanes in rounds for outcome in run_round(lanes)]
    print("\n=== summary\ntier          seconds  budget  passed  failed  skipped")
    total: Counter = Counter()
    for outcome in outcomes:
        counts = outcome.counts
        total.update(counts)
        print(
            f"{outcome.tier:<12} {outcome.seconds:>8.0f} {BUDGETS[outcome.tier]:>7} {counts['passed']:>7} "
            f"{counts['failed']:>7} {counts['skipped']:>8}{_remark(outcome)}"
        )
        for reason, count in outcome.skips.most_common():
            print(f"    {count} skipped: {reason}")
    print("    tier slow is not part of this run: python -m tests.tiers slow" if "slow" not in tiers else "")
    print(f"\n=== not run on hardware ({HARDWARE_PAGE.relative_to(ROOT)} says what is known instead)")
    for claim, _, where in not_run_on_hardware(HARDWARE_PAGE.read_text(encoding="utf-8")):
        print(f"    {claim} (instead: {where})")
    seconds = time.monotonic() - started
    print(
        f"\n{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped in {seconds:.0f} s",
        flush=True,
    )
    empty = [outcome.tier for outcome in outcomes if _is_empty(outcome)]
    if empty and must_run:
        print(f"failed, because nothing ran: tier {', '.join(empty)} (the reasons are above)", flush=True)
    passed = all(outcome.code in (0, NO_TESTS) for outcome in outcomes) and total["passed"]
    return 0 if passed and not (must_run and empty) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
