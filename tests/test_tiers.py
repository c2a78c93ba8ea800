"""The summary of the tiers says what no test here can show."""

import subprocess
import sys
import threading

import pytest

from tests import tiers


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
