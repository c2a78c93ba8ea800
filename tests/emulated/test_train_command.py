"""`tpurec train` with `device.kind = "tpu"`, a whole command on the emulated device; and what others make of its RUN.

Everything but the training on the device runs in processes that have no TPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.metrics_log import read_metrics
from pipelines.run import load_run
from tests.pipelines.conftest import RECIPE, click_rows, write_rows
from tpurec.sharding.checkpoint import list_checkpoints

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
CPU, TPU = "tpurec.cli", "tests.emulated.command"
METRICS = ("auc", "log_loss", "normalized_entropy", "calibration", "mean_label")
KEEP_ALL = ("--set", "checkpoint.keep_last=1000")


def run(module, *words):
    """Run a command; `module` decides whether its process has the device."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", module, *map(str, words), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def succeed(module, *words):
    code, answer, messages = run(module, *words)
    assert code == 0, f"{answer}\n{messages[-4000:]}"
    return answer, messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("clicks")
    write_rows(found / "train" / "a.parquet", click_rows(3000, 1))
    write_rows(found / "test" / "a.parquet", click_rows(500, 3))
    (found / "recipe.toml").write_text(RECIPE.format(data=found))
    return found


@pytest.fixture(scope="module")
def on_cpu(folder):
    out = folder / "cpu"
    return out, succeed(CPU, "train", folder / "recipe.toml", "--out", out, *KEEP_ALL)[0]


@pytest.fixture(scope="module")
def on_tpu(folder, emulator):
    out = folder / "tpu"
    words = ("--set", "device.kind=tpu", "--set", "device.on_recompile=error", *KEEP_ALL)
    return out, *succeed(TPU, "train", folder / "recipe.toml", "--out", out, *words)


def lines(out, kind):
    return [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == kind]


def assert_close(found, expected, keys):
    for key in keys:
        assert found[key] == pytest.approx(expected[key], abs=1e-4), key


def test_losses_and_metrics_are_those_of_the_cpu(on_cpu, on_tpu):
    (cpu, expected), (tpu, result, _) = on_cpu, on_tpu
    for kind, keys in (("train", ["log_loss"]), ("validation", METRICS), ("test", METRICS)):
        assert [line["step"] for line in lines(tpu, kind)] == [line["step"] for line in lines(cpu, kind)]
        for found, wanted in zip(lines(tpu, kind), lines(cpu, kind), strict=True):
            assert_close(found, wanted, keys)
    assert_close(result, expected, METRICS)
    for key in ("steps", "rows_seen", "best_step", "eval_rows", "ids", "warnings"):
        assert result[key] == expected[key], key


def test_every_program_is_told_with_its_shape_and_its_seconds_apart_from_the_speed(on_cpu, on_tpu):
    tpu, result, messages = on_tpu
    told = lines(tpu, "compilation")
    assert result["programs"] == sum(line["programs"] for line in told) == len(told)
    assert {line["activity"] for line in told} == {"training", "evaluation"}
    for activity, batch_size in (("training", 128), ("evaluation", 256)):
        capacities = [line["capacities"]["tags"] for line in told if line["activity"] == activity]
        assert capacities and all(low < high for low, high in pairwise(capacities))
        assert {line["batch_size"] for line in told if line["activity"] == activity} == {batch_size}
    assert len(
        re.findall(r"compiled 1 program for (training|evaluation), \d+ rows, ids of tags \d+: ", messages)
    ) == len(told)
    assert result["warmup_seconds"] == pytest.approx(sum(line["seconds"] for line in told), abs=0.01)
    steady = sum(line["seconds"] for line in told if line["activity"] == "training")
    assert result["rows_per_second"] > result["rows_seen"] / (steady + result["wait_seconds"] + 1e-9)
    assert on_cpu[1]["programs"] == 0 and on_cpu[1]["warmup_seconds"] == 0


def test_its_recipe_says_what_was_executed(on_tpu):
    recipe = (on_tpu[0] / "recipe.toml").read_text()
    assert 'kind = "tpu"' in recipe and 'execution = "compile"' in recipe


def killed_at(out, copy, step):
    """The RUN as a kill right after the checkpoint of a step would have left it."""
    shutil.copytree(out, copy)
    (copy / "result.json").unlink()
    for checkpoint in list_checkpoints(copy / "checkpoints"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return copy


@pytest.mark.parametrize(("first", "second"), [("tpu", "cpu"), ("cpu", "tpu")])
def test_a_run_goes_on_on_the_other_device_in_mid_epoch(first, second, folder, on_cpu, on_tpu):
    begun = {"cpu": on_cpu, "tpu": on_tpu}[first]
    out = killed_at(begun[0], folder / f"{first}-then-{second}", 20)
    module = {"cpu": CPU, "tpu": TPU}[second]
    result, messages = succeed(
        module, "train", folder / "recipe.toml", "--out", out, "--set", f"device.kind={second}", *KEEP_ALL
    )
    assert "resuming at step 20 " in messages
    assert_close(result, on_cpu[1], METRICS)
    assert result["steps"] == on_cpu[1]["steps"]
    steps = [line["step"] for line in lines(out, "train")]
    assert steps == [line["step"] for line in lines(on_cpu[0], "train")]
    for found, wanted in zip(lines(out, "train"), lines(on_cpu[0], "train"), strict=True):
        assert_close(found, wanted, ["log_loss"])


def test_a_machine_without_a_tpu_loads_evaluates_exports_and_scores_the_run(on_tpu, folder):
    out, result, _ = on_tpu
    model = load_run(out).model
    best = out / "checkpoints" / f"step-{result['best_step']:08d}"
    stored = {}
    for file in best.glob("*.safetensors"):
        stored |= load_file(file)
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, stored[f"model.{name}"]), name
    evaluated, _ = succeed(CPU, "evaluate", out, folder / "test")
    assert_close(evaluated, result, METRICS)
    exported, _ = succeed(CPU, "export", out, folder / "bundle")
    scored, _ = succeed(CPU, "score", folder / "bundle", folder / "test", folder / "scores.parquet")
    assert exported and scored["rows"] == 500 and scored["bad_rows"] == 0


def test_without_the_device_the_command_fails_in_seconds_and_leaves_nothing(folder, tmp_path):
    """libtpu is not asked: without a chip it looks for one through the cloud's metadata service, for minutes."""
    out = tmp_path / "run"
    code, answer, _ = run(CPU, "train", folder / "recipe.toml", "--out", out, "--set", "device.kind=tpu")
    assert code == 1 and not out.exists()
    assert answer["error"]["message"] == "device.kind = 'tpu': no TPU chip is attached to this host."
    assert "device.kind=cpu" in answer["error"]["remedy"]
