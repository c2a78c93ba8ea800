"""`tpurec train` and `tpurec evaluate` as a user runs them; those that are killed in processes of their own."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.metrics_log import read_metrics
from pipelines.run import Run, load_run
from tests.pipelines.conftest import SCHEMA, click_rows, write_rows
from tpurec import cli
from tpurec.sharding.checkpoint import list_checkpoints

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*words) -> subprocess.Popen:
    command = [sys.executable, "-m", "tpurec.cli", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def tpurec(*words, code: int = 0) -> tuple[dict, str]:
    """Run a command in this process, which saves its start; returns its one JSON object and what it wrote to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        cli.main([*map(str, words), "--json"])
    assert stopped.value.code == code, err.getvalue()
    assert out.getvalue().count("\n") == 1, out.getvalue()
    return json.loads(out.getvalue()), err.getvalue()


def numbers(values: dict) -> dict:
    return {key: value for key, value in values.items() if "second" not in key and key != "run"}


@pytest.fixture(scope="module")
def trained(clicks, tmp_path_factory):
    """A RUN trained by the command, its recipe file and its result."""
    from tests.pipelines.conftest import RECIPE

    folder = tmp_path_factory.mktemp("trained")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(data=clicks))
    result, _ = tpurec("train", recipe, "--out", folder / "run")
    return folder / "run", recipe, result


@pytest.mark.parametrize("copied", [False, True])
def test_test_data_that_were_trained_on_are_said_loudly(trained, clicks, tmp_path, copied):
    _, recipe, result = trained
    assert not any("flatter" in warning for warning in result["warnings"])
    test = clicks / "train" / "a.parquet"
    if copied:
        test = shutil.copy(test, tmp_path / "renamed.parquet")
    found, err = tpurec(
        "train", recipe, "--out", tmp_path / "run", "--set", f"data.test={test}", "--set", "train.max_steps=1"
    )
    assert "is training data and test data" in found["warnings"][0] and found["warnings"][0] in err


KEYS = {
    "auc", "normalized_entropy", "log_loss", "calibration", "rows_seen", "eval_rows", "steps", "rows_per_second", "run",
}  # fmt: skip


def test_train_prints_one_object_with_the_promised_keys_and_a_finished_run_prints_it_again(trained):
    run, recipe, result = trained
    assert result.keys() >= KEYS
    assert result["run"] == str(run) and result["auc"] > 0.75
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    again, err = tpurec("train", recipe, "--out", run)
    assert again == result and "finished" in err
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*")) == before, "nothing was touched"
    changed, _ = tpurec("train", recipe, "--out", run, "--set", "train.batch_size=64", code=1)
    assert "train.batch_size was 128, now 64" in changed["error"]["message"]


def test_evaluate_gives_the_metrics_that_training_gave_and_a_score_for_every_row_in_order(trained, clicks, tmp_path):
    run, _, result = trained
    out = tmp_path / "deep" / "scores.parquet"
    found, _ = tpurec("evaluate", run, clicks / "test", "--scores", out)
    for key in ("auc", "normalized_entropy", "log_loss", "calibration", "eval_rows"):
        assert found[key] == result[key], key
    scores, rows = pq.read_table(out), pq.read_table(clicks / "test")
    assert scores.column_names == ["row", "request", "label", "score"]
    assert scores["row"].to_pylist() == list(range(1003))
    assert scores["request"].to_pylist() == rows["request"].to_pylist()
    assert scores["label"].to_pylist() == rows["click"].to_pylist()
    assert all(0 < score < 1 for score in scores["score"].to_pylist())
    assert [path.name for path in out.parent.iterdir()] == ["scores.parquet"]


def test_evaluate_masks_rows_without_label_and_still_scores_them(trained, tmp_path):
    """cases 31, 32"""
    run, _, _ = trained
    table = click_rows(3, 5)
    file = write_rows(tmp_path / "a.parquet", table.set_column(0, "click", pa.array([1.0, None, 0.0], pa.float32())))
    found, err = tpurec("evaluate", run, file, "--scores", tmp_path / "scores.parquet")
    assert (found["eval_rows"], found["missing_labels"]) == (3, 1) and found["auc"] in (0.0, 1.0)
    assert "1 of 3 rows have no label" in err
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores["label"].to_pylist() == [1.0, None, 0.0] and scores["score"].null_count == 0
    same = write_rows(tmp_path / "b.parquet", table.set_column(0, "click", pa.array([1.0] * 3, pa.float32())))
    found, err = tpurec("evaluate", run, same)
    assert found["auc"] is None and found["log_loss"] > 0
    assert "warning: the data: all 3 labels are 1: AUC is undefined" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "nowhere.toml"], 1, "nowhere.toml: no such file"),
        (["train", "{recipe}", "--set", "train.bach_size=3"], 1, "unknown key 'train.bach_size'"),
        (["train", "{recipe}", "--set", "data.train=nowhere"], 1, "data.train: nowhere: no such file or folder"),
        (["train", "{recipe}", "--engine", "spark"], 2, "spark"),
        (["train"], 2, "RECIPE"),
        (["evaluate", "nowhere", "{data}"], 1, "nowhere: is not a RUN"),
        (["evaluate", "{run}", "nowhere"], 1, "DATA: nowhere: no such file or folder"),
        (["evaluate", "{run}"], 2, "DATA"),
        (["evaluate", "{run}", "{data}", "--scores", "{data}"], 1, "is a folder; one file is written"),
        (["evaluate", "{run}", "{data}", "--scores", "{data}/a.parquet"], 1, "is one of the input files"),
        (["evaluate", "{run}", "{data}", "--scores", "{run}/recipe.toml"], 1, "exists, and is no Parquet file"),
        (["train", "{recipe}", "--set", "data.train=[]"], 1, "data.train: an empty list"),
    ],
)
def test_mistakes_are_one_line_with_the_right_exit_code_and_leave_nothing(
    trained, clicks, tmp_path, monkeypatch, capsys, words, code, message
):
    run, recipe, _ = trained
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main([word.format(recipe=recipe, run=run, data=clicks / "test") for word in words])
    out, err = capsys.readouterr()
    assert stopped.value.code == code and out == ""
    assert message in " ".join(err.split()) and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("labels", [None, float("nan"), -1.0])
def test_rows_that_all_lack_their_label_are_refused_before_there_is_a_run(recipe_file, tmp_path, labels):
    """case 32: what fills the column at night may fail, and the training command is the first to see it"""
    table = click_rows(1500, 5)
    table = table.set_column(0, "click", pa.array([labels] * len(table), pa.float32()))
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA.to_text().replace('column = "click"', 'column = "click"\nmissing = -1.0'))
    file = write_rows(tmp_path / "train.parquet", table)
    words = ["train", recipe_file, "--out", tmp_path / "run", "--set", f"data.train={file}"]
    answer, _ = tpurec(*words, "--set", f"data.schema={schema}", code=1)
    assert "column 'click': no label in any of 1500 rows of 1 files" in answer["error"]["message"]
    assert "label.column" in answer["error"]["remedy"] and not (tmp_path / "run").exists()
    one = table.set_column(0, "click", pa.array([*[labels] * 1499, 1.0], pa.float32()))
    write_rows(file, one)
    tpurec(*words, "--set", f"data.schema={schema}", "--set", "train.max_steps=1", "--set", "data.validation_share=0")


def until_checkpoint(process: subprocess.Popen, run: Run, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list_checkpoints(run.checkpoints)) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_there_is(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 120
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found[0].relative_to(folder)


@pytest.mark.multiprocess
def test_killed_with_sigkill_in_mid_epoch_and_rerun_gives_the_same_numbers_to_the_bit(trained, tmp_path):
    """cases 24, 25"""
    whole, recipe, result = trained
    run = Run(tmp_path / "run")
    process = start("train", recipe, "--out", run.path)
    until_checkpoint(process, run, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not run.result_file.exists()
    resumed, err = tpurec("train", recipe, "--out", run.path)
    assert "resuming at step" in err
    assert numbers(resumed) == numbers(result)
    lines = [[numbers(line) for line in read_metrics(path / "metrics.jsonl")] for path in (whole, run.path)]
    assert lines[0] == lines[1]
    weights = [load_run(path).model.state_dict() for path in (whole, run.path)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_with_130_and_says_the_command_that_goes_on(trained, tmp_path, monkeypatch, how):
    _, recipe, result = trained
    monkeypatch.chdir(tmp_path)
    process = start("train", recipe, "--set", "train.log_every_steps=7", "--json")  # without --out
    run = Run(until_there_is(tmp_path, "runs/*"))
    until_checkpoint(process, run, 1)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err
    error = json.loads(out)["error"]
    assert error["message"] == "interrupted."
    assert all(path.name.startswith("step-") for path in run.checkpoints.iterdir()), "nothing is half-written"
    before, command = error["remedy"].split(": ", 1)
    assert before == "Go on from the last checkpoint" and command in err
    name, *words, last = shlex.split(command)
    assert (name, last) == ("tpurec", "--json")
    resumed, err = tpurec(*words)
    assert "resuming at step" in err
    assert numbers(resumed) == numbers(result)


@pytest.mark.multiprocess
def test_a_second_process_is_refused_while_the_first_trains(trained, tmp_path):
    _, recipe, _ = trained
    run = Run(tmp_path / "run")
    first = start("train", recipe, "--out", run.path, "--set", "train.epochs=1000")
    try:
        until_checkpoint(first, run, 1)
        refused, _ = tpurec("train", recipe, "--out", run.path, "--set", "train.epochs=1000", code=1)
        assert "another process is training into this RUN" in refused["error"]["message"]
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--plan", "p.json"], 2, "--plan goes with --workers"),
        (["--workers", "0"], 2, "'--workers'"),
        (["--workers", "2", "--plan", "p.json"], 1, "p.json: no such file"),
        (["--workers", "100000"], 1, "a CPU slice has 1 to 1024 ranks"),
        (["--workers", "2", "--set", "sharding.slice=v6e-16"], 1, "slice = 'v6e-16' has 16 ranks"),
        (["--set", "sharding.slice=v6e-16"], 1, "Train with --engine ray on a cluster that has the slice"),
        (["--workers", "2", "--set", "sharding.constraints.usr.pin=row_wise"], 1, "there is no table 'usr'"),
        (["--engine", "ray", "--workers", "2", "--set", "device.kind=tpu"], 1, "Set sharding.slice"),
        (["--workers", "2", "--set", "device.check=true"], 1, "Check with one process"),
        (["--workers", "1000"], 1, f"at most {16 * len(os.sched_getaffinity(0))} are started"),
        (
            ["--workers", "3", "--set", "train.batch_size=2"],
            1,
            "batch_size = 2 is smaller than the number of",
        ),
    ],
)
def test_workers_that_cannot_be_are_refused_before_there_is_a_run(recipe_file, tmp_path, options, code, message):
    """case 38"""
    answer, _ = tpurec("train", recipe_file, "--out", tmp_path / "run", *options, code=code)
    assert message in " ".join(answer["error"]["message"].split()) + answer["error"]["remedy"]
    assert not (tmp_path / "run").exists()
