"""Ray Data and Ray Train around the same loop: the same batches, so the same numbers to the bit."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipelines.engine_local import LocalSource
from pipelines.engine_ray import train_ray
from pipelines.metrics_log import read_metrics
from pipelines.ray_session import ray_session
from pipelines.recipe import read_recipe
from pipelines.run import Run, load_run
from pipelines.source import find_data
from pipelines.training import train_run
from tpurec.config import to_toml
from tpurec.errors import TpurecError
from tpurec.reporting import Reporter
from tpurec.sharding.checkpoint import list_checkpoints

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def one_ray():
    """One Ray for all tests of this file: it takes ten seconds to start."""
    with ray_session():
        yield


@pytest.fixture(scope="module")
def recipe(clicks, tmp_path_factory):
    from tests.pipelines.conftest import RECIPE

    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE.format(data=clicks))
    return read_recipe(path, ["train.evaluate_every_steps=0"])


def train(run: Run, recipe, engine: str, stop_at: int | None = None) -> dict:
    data = find_data(recipe)

    def progress(rows, loss):
        if stop_at is not None and len(read_metrics(run.metrics_file)) * recipe.train.log_every_steps >= stop_at:
            raise KeyboardInterrupt

    with run.locked():
        run.begin(recipe, data.schema, data.train, data.test)
        if engine == "ray":
            return train_ray(run, recipe, data, Reporter())
        return train_run(run, LocalSource(recipe, data), progress=progress)


@pytest.fixture(scope="module")
def local(recipe, tmp_path_factory):
    """A run of the local engine and its result."""
    run = Run(tmp_path_factory.mktemp("local") / "run")
    return run, train(run, recipe, "local")


def numbers(values: dict) -> dict:
    return {key: value for key, value in values.items() if "second" not in key}


def check_same(run: Run, result: dict, local) -> None:
    assert numbers(result) == numbers(local[1])
    lines = [[numbers(line) for line in read_metrics(each.metrics_file)] for each in (run, local[0])]
    assert lines[0] == lines[1]
    weights = [load_run(each.path).model.state_dict() for each in (run, local[0])]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_a_run_begun_by_one_engine_is_finished_by_the_other_with_the_same_numbers_to_the_bit(
    one_ray, recipe, local, tmp_path
):
    run = Run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, recipe, "local", stop_at=21)
    assert list_checkpoints(run.checkpoints)
    check_same(run, train(run, recipe, "ray"), local)


def kill_worker_after_checkpoint(run: Run, killed: list[int]) -> None:
    import psutil

    while not list_checkpoints(run.checkpoints):
        time.sleep(0.002)
    for process in psutil.Process().children(recursive=True):
        if "RayTrainWorker" in " ".join(process.cmdline()):  # Ray names a worker after its class
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)


def test_a_killed_worker_is_restarted_and_goes_on_from_its_checkpoint_with_the_same_numbers_to_the_bit(
    one_ray, recipe, local, tmp_path
):
    """case 25"""
    run, killed = Run(tmp_path / "run"), []
    killer = threading.Thread(target=kill_worker_after_checkpoint, args=(run, killed), daemon=True)
    killer.start()
    result = train(run, recipe, "ray")
    killer.join(timeout=1)
    assert len(killed) == 1
    check_same(run, result, local)


def test_a_failure_with_a_known_cause_is_our_error_not_a_retry(one_ray, clicks, recipe, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'data.train = "{clicks}/train"\ntables.learning_rate = 1e30\ntrain.learning_rate = 1e30\n')
    with pytest.raises(TpurecError, match=r"the loss is .* Lower train\.learning_rate"):
        train(Run(tmp_path / "run"), read_recipe(path), "ray")


def test_a_polite_kill_ends_ray_and_leaves_a_run_that_can_be_resumed(recipe, local, tmp_path):
    run = Run(tmp_path / "run")
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe))
    command = [sys.executable, "-m", "tpurec.cli", "train", str(path), "--out", str(run.path), "--engine", "ray"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not list_checkpoints(run.checkpoints):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(out)["error"]["message"] == "interrupted." and "Traceback" not in err
    check_same(run, train(run, recipe, "local"), local)


def test_what_ray_prints_goes_to_stderr_because_stdout_is_for_the_result(monkeypatch, capsys):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: print("begun"))
    monkeypatch.setattr(ray, "shutdown", lambda: print("ended"))
    with ray_session():
        print("(raylet) a worker died")
    out, err = capsys.readouterr()
    assert out == "" and err == "begun\n(raylet) a worker died\nended\n"
