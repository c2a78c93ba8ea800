"""The summary of the tiers says what no test here can show."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import tiers
from tests.emulated import setup


def test_the_page_is_the_source_of_what_was_not_run_on_hardware():
    rows = tiers.not_run_on_hardware(tiers.HARDWARE_PAGE.read_text())
    assert len(rows) >= 5 and all(all(row) for row in rows)
    assert any("torch_tpu runs the training step" in claim for claim, _, _ in rows)
    for _, _, where in rows:
        for tier in where.split("tier `")[1:]:
            assert tier.split("`")[0] in tiers.BUDGETS, where
    with pytest.raises(ValueError, match="has no table"):
        tiers.not_run_on_hardware("# Not run on hardware\n\nNothing.\n")


def test_the_summary_prints_every_claim_and_an_empty_tier_does_not_pass(monkeypatch, capsys):
    done = subprocess.CompletedProcess([], tiers.NO_TESTS)
    monkeypatch.setattr(tiers.subprocess, "run", lambda *arguments, **keywords: done)
    assert tiers.main(["emulated"]) == 1
    printed = capsys.readouterr().out
    for claim, _, where in tiers.not_run_on_hardware(tiers.HARDWARE_PAGE.read_text()):
        assert f"    {claim} (instead: {where})" in printed
    assert printed.index("=== summary") < printed.index("=== not run on hardware") < printed.index("0 passed")


REPORT = """<testsuites><testsuite><testcase name="a"><skipped message="Skipped: no gcc"/></testcase>
<testcase name="b">{outcome}</testcase></testsuite></testsuites>"""


@pytest.mark.parametrize("ran", [False, True])
def test_a_tier_of_which_all_is_skipped_is_remarked_and_fails_where_it_must_run(monkeypatch, capsys, ran):
    def run(command, **keywords):
        (report,) = [word.split("=", 1)[1] for word in command if word.startswith("--junitxml")]
        emulated = "emulated and not slow" in command
        outcome = '<skipped message="Skipped: no gcc"/>' if emulated and not ran else ""
        Path(report).write_text(REPORT.format(outcome=outcome))
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(tiers.subprocess, "run", run)
    assert tiers.main(["default", "emulated"]) == 0
    assert ("NOTHING RAN" in capsys.readouterr().out) != ran
    assert tiers.main(["default", "emulated", "--must-run"]) == (0 if ran else 1)
    assert ("failed, because nothing ran: tier emulated" in capsys.readouterr().out) != ran


def test_continuous_integration_lets_no_tier_pass_that_did_not_run():
    ci, makefile = ((tiers.ROOT / name).read_text() for name in (".ci/run", "Makefile"))
    assert "make test TIERS=--must-run" in ci and "-m tests.tiers $(TIERS)" in makefile


@pytest.mark.parametrize("has_headers", [False, True])
def test_a_compiler_without_headers_is_a_reason_to_skip_and_a_shim_that_does_not_compile_is_none(
    monkeypatch, tmp_path, has_headers
):
    compiler = tmp_path / "gcc"
    compiler.write_text(f"#!/bin/sh\ncase $* in *-shared*) exit 1;; *) exit {int(not has_headers)};; esac\n")
    compiler.chmod(0o755)
    (tmp_path / setup.PLUGIN).parent.mkdir(parents=True)
    (tmp_path / setup.PLUGIN).touch()
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(setup.shutil, "which", lambda name: str(compiler))
    with pytest.raises(RuntimeError if has_headers else setup.Unavailable, match="shim.c" if has_headers else "libc6"):
        setup.prepare(tmp_path)


def test_an_unknown_tier_is_a_usage_error():
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers", "nosuch"], cwd=tiers.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "unknown tiers: nosuch" in done.stderr


def test_all_tiers_but_slow_are_in_a_round_once():
    planned = [tier for lanes in tiers.ROUNDS for lane in lanes for tier in lane]
    assert sorted([*planned, "slow"]) == sorted(tiers.BUDGETS)


def test_lanes_run_side_by_side_and_a_lane_in_order(monkeypatch):
    both_started = threading.Barrier(2, timeout=20)
    order = []

    def run(tier, live):
        if tier != "third":
            both_started.wait()
        order.append((tier, live))
        return tiers.Outcome(tier, 0.0, 0)

    monkeypatch.setattr(tiers, "run_tier", run)
    outcomes = tiers.run_round((("first",), ("second", "third")))
    assert [outcome.tier for outcome in outcomes] == ["first", "second", "third"]
    assert order.index(("second", False)) < order.index(("third", False))
    assert ("first", True) in order
