"""Checkpoints written by a thread while training goes on: the state of the moment of `save`, or nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.sharding.synthetic_shards import cut, on_ranks, placed, plan_of, whole_state
from tpurec.sharding import checkpoint, checkpoint_part
from tpurec.sharding.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load_checkpoint, read_manifest


@pytest.fixture
def held(monkeypatch):
    """Writing that waits until the test lets it go on."""
    gate = threading.Event()
    original = checkpoint_part.write_file

    def write(*more):
        assert gate.wait(60)
        return original(*more)

    monkeypatch.setattr(checkpoint_part, "write_file", write)
    yield gate
    gate.set()


def test_training_goes_on_while_the_state_of_the_call_is_written(tmp_path, held):
    tensors = {"x": torch.arange(8.0).view(4, 2), "y": torch.arange(6.0).view(2, 3).t(), "s": torch.tensor(1.0)}
    state = {"seen": [1, 2]}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    with Checkpointer(tmp_path, keep_last=1, asynchronous=True) as checkpointer:
        path = checkpointer.save(3, tensors, state)
        for tensor in tensors.values():
            tensor.add_(100)
        state["seen"].append(3)
        assert list_checkpoints(tmp_path) == [], "it is being held"
        held.set()
    assert list_checkpoints(tmp_path) == [path]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load_checkpoint(path, loaded).state == {"seen": [1, 2]}
    assert all(torch.equal(loaded[name], expected[name]) for name in tensors)


def test_at_most_one_is_in_flight(tmp_path, held):
    checkpointer = Checkpointer(tmp_path, keep_last=5, asynchronous=True)
    checkpointer.save(1, {"x": torch.zeros(3)}, {})
    threading.Timer(0.3, held.set).start()
    begun = time.monotonic()
    checkpointer.save(2, {"x": torch.zeros(3)}, {})
    assert time.monotonic() - begun > 0.2
    assert [path.name for path in list_checkpoints(tmp_path)][:1] == ["step-00000001"]
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("at", ["save", "wait", "end"])
def test_an_error_surfaces_at_the_next_save_or_at_the_end(tmp_path, monkeypatch, at):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_part, "write_file", fail)
        checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=True)
        message = r"step-00000001: cannot be written: .*No space left"
        with pytest.raises(CheckpointError, match=message), checkpointer:
            checkpointer.save(1, {"x": torch.zeros(3)}, {})
            if at == "save":
                checkpointer.save(2, {"x": torch.zeros(3)}, {})
            elif at == "wait":
                checkpointer.wait()
    assert list(tmp_path.iterdir()) == []
    with checkpointer:
        checkpointer.save(3, {"x": torch.zeros(3)}, {})
    assert len(list_checkpoints(tmp_path)) == 1, "an error is raised once"


def test_a_state_that_is_no_json_is_refused_at_once(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=True)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpointer.save(1, {"x": torch.zeros(3)}, {"loss": float("nan")})
    checkpointer.wait()
    assert list(tmp_path.iterdir()) == []


def test_after_an_interrupt_the_one_in_flight_is_given_up(tmp_path, held):
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path, keep_last=1, asynchronous=True) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(3)}, {})
        threading.Timer(0.2, held.set).start()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_during_the_copy_is_raised_at_once_and_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_part.RankPart, "snapshot", interrupted)
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path, keep_last=1, asynchronous=True) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(3)}, {})
    assert list(tmp_path.iterdir()) == []


def test_ranks_write_together_and_learn_of_a_failing_one_at_the_next_save(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "Ranks", lambda group: group)
    shapes = [("a", 37, 8, "row_wise_adagrad"), ("b", 20, 6, "adagrad")]
    tensors = whole_state(shapes)
    plan = plan_of([placed(*shapes[0], "row_wise", 4), placed(*shapes[1], "column_wise", 4)], 4)
    original = checkpoint_part.write_file

    def write(path, *more):
        if path.name == "rank-00001.safetensors" and "step-00000002" in str(path):
            raise OSError(5, "Input/output error")
        return original(path, *more)

    monkeypatch.setattr(checkpoint_part, "write_file", write)

    def action(ranks):
        pieces = cut(plan, ranks.rank, tensors)
        checkpointer = Checkpointer(tmp_path, keep_last=2, process_group=ranks, asynchronous=True)
        checkpointer.save(1, {}, {}, pieces=pieces)
        checkpointer.save(2, {}, {}, pieces=pieces)
        for piece in pieces:
            piece.tensor.zero_()
        checkpointer.save(3, {}, {}, pieces=pieces)

    for result in on_ranks(4, action):
        assert isinstance(result, CheckpointError) and "rank 1: [Errno 5] Input/output error" in str(result)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(tmp_path / "step-00000001", loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_long_save_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_LINES", 0.0)
    lines = []
    Checkpointer(tmp_path, keep_last=1, log=lines.append).save(1, {"x": torch.zeros(100_000_000 // 4)}, {})
    assert len(lines) == 6 and lines[0].startswith("step-00000001: 0.0 of 0.1 GB written, ")
    assert lines[-1].startswith("step-00000001: 0.1 of 0.1 GB written, ")
    lines.clear()
    monkeypatch.undo()
    Checkpointer(tmp_path, keep_last=1, log=lines.append).save(2, {"x": torch.zeros(10)}, {})
    assert lines == []


TRAIN_FOREVER = """
import sys, torch
from pathlib import Path
from tpurec.sharding.checkpoint import Checkpointer
x = torch.zeros(100_000, 16)
step = 0
with Checkpointer(Path(sys.argv[1]), keep_last=2, asynchronous=True) as checkpointer:
    while True:
        step += 1
        x.fill_(step)
        checkpointer.save(step, {"x": x}, {"step": step})
        x.fill_(-1)
        print(step, flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_while_a_thread_writes_every_checkpoint_that_looks_complete_is(tmp_path, end):
    """case 24, asynchronous"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for delay in (0.0, 0.01, 0.03):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN_FOREVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(5):
            begun = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(end)
        _, said = process.communicate(timeout=60)
        if end == signal.SIGINT:
            assert all(path.name.startswith("step-") for path in tmp_path.iterdir()), said
        complete = list_checkpoints(tmp_path)
        assert read_manifest(complete[-1]).step >= begun - 1
        for path in complete:
            loaded = {"x": torch.zeros(100_000, 16)}
            manifest = load_checkpoint(path, loaded)
            assert (loaded["x"] == manifest.state["step"]).all()
    Checkpointer(tmp_path, keep_last=2)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
