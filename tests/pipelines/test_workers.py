"""Starting, hearing, ending and restarting worker processes; what they do here needs no training."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipelines import workers
from pipelines.workers import Job, Progress, run_workers
from tpurec.errors import TpurecError
from tpurec.reporting import Reporter

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]
COMMAND = (sys.executable, "-m", "tests.pipelines.worker_tasks")


@pytest.fixture(autouse=True)
def our_tasks(monkeypatch):
    monkeypatch.setattr(workers, "WORKER", COMMAND)


def run(task: str, count: int, max_restarts: int = 2, **options):
    moved: list[float] = []
    answer = run_workers(
        Job(task, options, count), Reporter(), Progress(lambda rows, note: moved.append(rows)), max_restarts
    )
    return (*answer, moved)


def test_three_ranks_meet_and_exchange_values_of_different_lengths():
    result, restarts, _ = run("gather", 3)
    assert restarts == 0
    assert result["words"] == [{"rank": rank, "text": "é" * rank} for rank in range(3)]
    assert result["arrays"] == [[], [0.0], [0.0, 1.0]] and result["empty"] == [[], [], []]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_lost_worker_starts_all_again_and_the_bar_moves_once(tmp_path, how, capfd):
    result, restarts, moved = run("counted", 2, path=str(tmp_path / "tries"), failures=2, how=how)
    assert result == {"done": True} and restarts == 2 and moved == [10]
    err = capfd.readouterr().err
    reason = "was ended by signal SIGKILL" if how == "kill" else "ended with code 7 and without a word"
    assert err.count(f"worker 1 of 2 {reason}; starting all again") == 2
    assert "\nrank 0 says" in f"\n{err}" and "[worker 0] printed by rank 0" in err


def test_a_failure_that_follows_from_a_loss_is_not_taken_for_the_cause_though_it_is_seen_first(tmp_path, capfd):
    """A peer of a killed worker may end before the killed one can be waited for."""
    result, restarts, _ = run("bereft", 2, sign=str(tmp_path / "sign"))
    assert result == {"done": True} and restarts == 1
    assert "worker 1 of 2 was ended by signal SIGKILL; starting all again" in capfd.readouterr().err


def test_a_worker_lost_more_often_than_allowed_is_an_error_that_says_how_to_go_on(tmp_path):
    with pytest.raises(TpurecError, match=r"after 1 restarts worker 1 of 2 was ended by signal SIGKILL"):
        run("counted", 2, 1, path=str(tmp_path / "tries"), failures=9, how="kill")
    assert (tmp_path / "tries").read_text() == "xx"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("problem", r"^file x: column 'y' is gone\. Put it back\.$"),
        ("full", r"^run/metrics\.jsonl: No space left on device\. Check path, permissions and free space\.$"),
        ("large", r"^out of memory: Unable to allocate 4\.00 EiB.* fewer workers"),
        ("defect", r"^worker 1 of 3: ZeroDivisionError: of mine\."),
    ],
)
def test_a_failure_with_a_cause_ends_all_workers_at_once_and_is_not_tried_again(tmp_path, how, message, capfd):
    begun = time.monotonic()
    with pytest.raises(TpurecError, match=message):
        run("counted", 3, path=str(tmp_path / "tries"), failures=9, how=how, wait=True)
    assert time.monotonic() - begun < 40  # the other workers would sleep for 60 s
    assert (tmp_path / "tries").read_text() == "x"
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (how == "defect")


LAUNCHER = """
import sys
from pipelines import workers
from tpurec.reporting import Reporter
workers.WORKER = {command!r}
workers.run_workers(workers.Job("hang", {{}}, 2), Reporter(), workers.Progress(lambda rows, note: None))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launcher_however_it_ends(number):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(command=COMMAND)], stderr=subprocess.PIPE, text=True
    ) as launcher:
        pids = [json.loads(re.search(r"\[\d, \d+\]", launcher.stderr.readline())[0])[1] for _ in range(2)]
        running = [psutil.Process(pid) for pid in pids]
        os.kill(launcher.pid, number)
        launcher.communicate(timeout=30)
    gone, alive = psutil.wait_procs(running, timeout=10)
    assert len(gone) == 2 and not alive
