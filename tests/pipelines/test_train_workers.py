"""`--workers N`: the numbers of one process, by any plan; what is killed goes on to the same numbers to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from pipelines.engine_local import LocalSource
from pipelines.engine_workers import train_workers
from pipelines.evaluate_run import evaluate_run
from pipelines.metrics_log import read_metrics
from pipelines.planning import choose_plan
from pipelines.recipe import read_recipe
from pipelines.run import Run, load_run
from pipelines.source import find_data
from pipelines.training import train_run
from tests.pipelines.conftest import RECIPE, click_rows, write_rows
from tests.pipelines.worker_tasks import KILL
from tpurec.errors import TpurecError
from tpurec.reporting import Reporter
from tpurec.sharding.checkpoint import list_checkpoints, load_checkpoint, read_manifest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

# Each kind of sharding once; their parity in depth is the business of tests/sharding.
PLANS = {
    4: {"user": "column_wise", "item": "row_wise", "tags": "table_wise"},
    2: {"user": "row_wise", "item": "data_parallel", "tags": "column_wise"},
}


def recipe_for(path: Path, clicks: Path, workers: int, *overrides: str):
    path.write_text(RECIPE.format(data=clicks).replace("embedding_dim = 8", "embedding_dim = 16"))  # two columns of 8
    pins = [f"sharding.constraints.{table}.pin={kind}" for table, kind in PLANS.get(workers, {}).items()]
    return read_recipe(path, [f"sharding.num_workers={workers}", *pins, *overrides])


def train(run: Run, recipe) -> dict:
    data = find_data(recipe)
    with run.locked() as lock:
        run.begin(recipe, data.schema, data.train, data.test)
        source = LocalSource(recipe, data)
        if recipe.sharding.num_ranks:
            return train_workers(run, source, choose_plan(run, recipe, data.schema), Reporter(), lock)
        return train_run(run, source)


@pytest.fixture(scope="module")
def alone(clicks, tmp_path_factory):
    """The run of one process without sharding, and its result."""
    folder = tmp_path_factory.mktemp("alone")
    run = Run(folder / "run")
    return run, train(run, recipe_for(folder / "recipe.toml", clicks, 0))


@pytest.fixture(scope="module")
def undisturbed(clicks, tmp_path_factory):
    """The run of four workers, and its result."""
    folder = tmp_path_factory.mktemp("four")
    run = Run(folder / "run")
    return run, train(run, recipe_for(folder / "recipe.toml", clicks, 4))


METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")
COUNTS = ("rows_seen", "steps", "eval_rows", "missing_labels", "train_missing_labels", "ids", "mean_label", "best_step")


def check_close(run: Run, result: dict, reference, tolerance: float) -> None:
    """The same rows in the same batches; sums in another order."""
    assert {key: result[key] for key in COUNTS} == {key: reference[1][key] for key in COUNTS}
    assert [result[key] for key in METRICS] == pytest.approx([reference[1][key] for key in METRICS], abs=tolerance)
    lines = [[(line["kind"], line["step"]) for line in read_metrics(each.metrics_file)] for each in (run, reference[0])]
    assert lines[0] == lines[1]
    weights = [load_run(each.path).model.state_dict() for each in (run, reference[0])]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=tolerance)


def numbers(values: dict) -> dict:
    return {key: value for key, value in values.items() if "second" not in key and key not in ("restarts", "programs")}


def check_same(run: Run, result: dict, reference) -> None:
    """The same to the bit."""
    exchanged = ("exchange_bytes_per_step", "padding_share", "collectives_per_step")  # of the last start alone
    ours, theirs = ({k: v for k, v in numbers(r).items() if k not in exchanged} for r in (result, reference[1]))
    assert ours == theirs
    lines = [[numbers(line) for line in read_metrics(each.metrics_file)] for each in (run, reference[0])]
    assert lines[0] == lines[1]
    weights = [load_run(each.path).model.state_dict() for each in (run, reference[0])]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def load_step(run: Run) -> list[int]:
    """The numbers of updates of the tables in the newest checkpoint."""
    newest = list_checkpoints(run.checkpoints)[-1]
    names = [name for name in read_manifest(newest).tensors if name.endswith("step") and "embedding_bags" in name]
    found = {name: torch.zeros((), dtype=torch.int32) for name in names}
    load_checkpoint(newest, found, partial=True)
    return [int(number) for number in found.values()]


def test_four_workers_give_the_numbers_of_one_process_and_a_run_that_is_like_any_other(clicks, alone, undisturbed):
    """case 13, through the whole pipeline; 128 rows a batch, tables column-, row- and table-wise."""
    run, result = undisturbed
    check_close(run, result, alone, 2e-4)
    assert result["world_size"] == 4 and result["restarts"] == 0 and result["warnings"] == []
    assert result["exchange_bytes_per_step"] > 0 and 0 <= result["padding_share"] < 1
    assert 0 < result["collectives_per_step"] <= 6 and result["programs"] >= 1
    plan = json.loads(run.plan_file.read_text())
    assert {table["table"]["name"]: table["sharding"] for table in plan["tables"]} == PLANS[4]
    evaluated = evaluate_run(load_run(run.path), [str(clicks / "test")], None, Reporter())
    assert [evaluated[key] for key in METRICS] == pytest.approx([result[key] for key in METRICS], abs=1e-6)


def test_one_worker_gives_the_bits_of_no_workers(clicks, alone, tmp_path):
    run = Run(tmp_path / "run")
    result = train(run, recipe_for(tmp_path / "recipe.toml", clicks, 1))
    assert result.pop("world_size") == 1
    check_same(run, {key: value for key, value in result.items() if key in alone[1]}, alone)


def test_batches_that_three_workers_cannot_share_evenly_and_an_early_stop_end_as_in_one_process(clicks, tmp_path):
    """The workers stop at one step, with a batch routed and ids on their way; a thread writes the checkpoints."""
    odd = ("train.batch_size=100", "train.eval_batch_size=77", "train.evaluate_every_steps=3", "train.patience=1")
    asynchronous, rate = "checkpoint.asynchronous=true", "train.learning_rate=0.3"
    runs = []
    for workers in (0, 3):
        run = Run(tmp_path / f"run{workers}")
        recipe = recipe_for(tmp_path / "recipe.toml", clicks, workers, *odd, asynchronous, rate)
        runs.append((run, train(run, recipe)))
    assert runs[0][1]["stopped_early"] and runs[0][1]["steps"] < 90
    check_close(*runs[1], runs[0], 1e-2)


def test_sigkill_of_one_of_four_workers_in_mid_epoch_ends_with_the_undisturbed_numbers_to_the_bit(
    clicks, undisturbed, tmp_path, monkeypatch
):
    """case 25: every row once in each epoch, none twice"""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / KILL).write_text("[2]")  # not the first one, which writes the metrics
    monkeypatch.setattr("pipelines.workers.WORKER", (sys.executable, "-m", "tests.pipelines.worker_tasks"))
    result = train(run, recipe_for(tmp_path / "recipe.toml", clicks, 4))
    assert not (run.path / KILL).exists() and result["restarts"] == 1
    assert result["rows_seen"] == 2 * 4500
    check_same(run, result, undisturbed)


LAUNCHER = """
import sys
from pipelines import workers
from tpurec import cli
workers.WORKER = (sys.executable, "-m", "tests.pipelines.worker_tasks")
cli.main(sys.argv[1:])
"""


def test_four_workers_killed_with_their_launcher_are_resumed_by_two_on_another_plan_with_adams_state(clicks, tmp_path):
    """case 22 in a run: the same global batches, from the exact batch on; nothing had time to tidy up"""
    adam = ("tables.optimizer=row_wise_adam", "tables.learning_rate=0.01", "checkpoint.asynchronous=true")
    whole = Run(tmp_path / "whole")
    reference = whole, train(whole, recipe_for(tmp_path / "recipe.toml", clicks, 0, *adam))
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / KILL).write_text("[0, 1, 2, 3]")
    recipe_for(tmp_path / "recipe.toml", clicks, 4)
    pins = [f"--set=sharding.constraints.{table}.pin={kind}" for table, kind in PLANS[4].items()]
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(run.path), "--workers", "4", *pins]
    words += [f"--set={override}" for override in adam]
    killed = subprocess.run([sys.executable, "-c", LAUNCHER, *words], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list_checkpoints(run.checkpoints)[-1].name in ("step-00000015", "step-00000020")
    result = train(run, recipe_for(tmp_path / "recipe.toml", clicks, 2, *adam))
    assert result["world_size"] == 2
    check_close(run, result, reference, 2e-3)
    steps = [load_step(each) for each in (run, whole)]
    assert steps[0] == steps[1] and set(steps[0]) == {result["steps"]}


def test_an_interrupt_ends_four_workers_and_says_the_command_that_goes_on(clicks, tmp_path):
    run = Run(tmp_path / "run")
    recipe_for(tmp_path / "recipe.toml", clicks, 4)
    command = [sys.executable, "-m", "tpurec.cli", "train", str(tmp_path / "recipe.toml"), "--out", str(run.path)]
    pins = [f"--set=sharding.constraints.{table}.pin={kind}" for table, kind in PLANS[4].items()]
    with subprocess.Popen(
        [*command, "--workers", "4", "--json", *pins], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not list_checkpoints(run.checkpoints):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        workers = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    error = json.loads(out)["error"]
    assert error["message"] == "interrupted." and "Traceback" not in err
    assert f"--set sharding.num_workers=4 --out {run.path}" in error["remedy"]
    assert len(workers) == 4 and not psutil.wait_procs(workers, timeout=10)[1]
    with run.locked():
        pass


def test_ten_rows_over_four_workers_and_three_of_them_held_out_are_each_counted_once(tmp_path):
    """cases 2, 27, 28: workers without a row take part in every step and evaluation"""
    write_rows(tmp_path / "clicks" / "train" / "a.parquet", click_rows(10, 1))
    write_rows(tmp_path / "clicks" / "test" / "a.parquet", click_rows(3, 3))
    tiny = ("train.batch_size=8", "train.eval_batch_size=8", "data.validation_share=0", "data.shuffle_window=8")
    results = []
    for workers in (0, 4):
        run = Run(tmp_path / f"run{workers}")
        results.append(train(run, recipe_for(tmp_path / "recipe.toml", tmp_path / "clicks", workers, *tiny)))
    assert [result["rows_seen"] for result in results] == [20, 20]
    assert [result["steps"] for result in results] == [4, 4]
    assert [result["eval_rows"] for result in results] == [3, 3]
    assert results[1]["log_loss"] == pytest.approx(results[0]["log_loss"], abs=1e-5)


def test_an_error_in_one_worker_ends_all_with_its_line(clicks, tmp_path):
    import pyarrow as pa

    rows = click_rows(1000, 1)
    labels = rows["click"].to_numpy().copy()
    labels[777] = 3.0
    bad = rows.set_column(rows.schema.get_field_index("click"), rows.schema.field("click"), pa.array(labels))
    write_rows(tmp_path / "clicks" / "train" / "a.parquet", bad)
    write_rows(tmp_path / "clicks" / "test" / "a.parquet", click_rows(3, 3))
    recipe = recipe_for(tmp_path / "recipe.toml", tmp_path / "clicks", 2, "data.validation_share=0")
    with pytest.raises(TpurecError, match=r"a\.parquet: row 777 \(from 0\), column 'click': label 3 is outside"):
        train(Run(tmp_path / "run"), recipe)
    assert os.listdir(tmp_path / "run")  # what there is can be looked at, and the lock is free
    with Run(tmp_path / "run").locked():
        pass
