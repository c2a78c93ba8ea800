"""A whole run in one process: result, RUN folder, and resumption that changes no number."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.engine_local import LocalSource
from pipelines.metrics_log import read_metrics
from pipelines.recipe import read_recipe
from pipelines.run import Run, load_run
from pipelines.source import find_data
from pipelines.training import train_run
from tests.pipelines.conftest import SCHEMA, click_rows, write_rows
from tpurec.errors import ConfigError, DataError, TpurecError
from tpurec.features import Schema
from tpurec.sharding.checkpoint import list_checkpoints, read_manifest


class Killed(Exception):
    """Stands for a kill at a chosen step."""


def train(run: Run, recipe, kill_at: int | None = None) -> dict:
    data = find_data(recipe)
    steps = 0

    def progress(rows, loss):
        nonlocal steps
        steps += 1
        if steps == kill_at:
            raise Killed

    with run.locked():
        run.begin(recipe, data.schema, data.train, data.test)
        return train_run(run, LocalSource(recipe, data), progress=progress)


def numbers(result: dict) -> dict:
    """What must not depend on the clock."""
    return {key: value for key, value in result.items() if "second" not in key}


def lines(run: Run) -> list[dict]:
    return [numbers(line) for line in read_metrics(run.metrics_file)]


@pytest.fixture(scope="module")
def whole(clicks, tmp_path_factory):
    """An uninterrupted run: folder and result."""
    from tests.pipelines.conftest import RECIPE

    folder = tmp_path_factory.mktemp("whole")
    recipe_file = folder / "recipe.toml"
    recipe_file.write_text(RECIPE.format(data=clicks))
    run = Run(folder / "run")
    return run, train(run, read_recipe(recipe_file))


def test_the_model_learns_and_every_test_row_counts_once(whole):
    _, result = whole
    assert result["auc"] > 0.75 and result["normalized_entropy"] < 0.9
    assert 0.8 < result["calibration"] < 1.25
    assert (result["eval_rows"], result["missing_labels"], result["evaluated_on"]) == (1003, 0, "test")
    assert (result["rows_seen"], result["steps"]) == (9000, 72)
    assert result["warnings"] == []


def test_the_folder_has_what_others_need(whole, clicks):
    run, result = whole
    assert Schema.load(run.schema_file).fingerprint() == SCHEMA.fingerprint()
    assert read_recipe(run.recipe_file).train.batch_size == 128
    assert any(run.tensorboard.iterdir())
    steps = [read_manifest(path).step for path in list_checkpoints(run.checkpoints)]
    assert steps[-2:] == [70, 72] and result["best_step"] in steps
    kinds = {line["kind"] for line in read_metrics(run.metrics_file)}
    assert kinds == {"train", "validation", "test"}
    loaded = load_run(run.path)
    assert loaded.checkpoint.step == result["best_step"] and not loaded.model.training


def test_the_best_checkpoint_is_the_one_with_the_best_validation(whole):
    run, result = whole
    validations = [line for line in lines(run) if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [15, 30, 36, 45, 60, 72]
    best = min(validations, key=lambda line: line["log_loss"])
    assert result["best_step"] == best["step"]
    assert all(line["eval_rows"] == 500 for line in validations)


@pytest.mark.parametrize("kills", [[3], [23], [36], [72], [12, 31, 5]])
def test_a_run_that_is_killed_and_resumed_ends_in_the_same_numbers_to_the_bit(whole, recipe_file, tmp_path, kills):
    """case 25: before the first checkpoint, in mid-epoch, at the end of an epoch, at the very end, and several times"""
    recipe, run = read_recipe(recipe_file), Run(tmp_path / "run")
    for kill in kills:
        with pytest.raises(Killed):
            train(run, recipe, kill_at=kill)
        with run.metrics_file.open("a") as stream:
            stream.write('{"kind": "train", "st')  # what a kill in mid-line leaves
    result = train(run, recipe)
    assert numbers(result) == numbers(whole[1])
    assert lines(run) == lines(whole[0]), "no line is lost or there twice"


def test_a_run_killed_between_its_test_and_its_result_has_no_line_twice(recipe_file, tmp_path):
    run, recipe = Run(tmp_path / "run"), read_recipe(recipe_file)
    first = train(run, recipe)  # `train` here writes no result.json: the command does
    before = lines(run)
    assert numbers(train(run, recipe)) == numbers(first)
    assert lines(run) == before


def test_tensorboard_has_every_step_of_a_resumed_run_once(recipe_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, recipe = Run(tmp_path / "run"), read_recipe(recipe_file)
    with pytest.raises(Killed):
        train(run, recipe, kill_at=29)  # lines of steps 21 and 28 come after the checkpoint of step 20
    train(run, recipe)
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in events.Scalars("train/log_loss")] == [*range(7, 72, 7), 72]
    assert [event.step for event in events.Scalars("validation/auc")] == [15, 30, 36, 45, 60, 72]
    assert [event.step for event in events.Scalars("test/auc")] == [72]


def test_the_number_of_readers_and_the_place_of_the_data_change_nothing(whole, recipe_file, clicks, tmp_path):
    shutil.copytree(clicks, tmp_path / "moved")
    overrides = [f"data.train={tmp_path}/moved/train", f"data.test={tmp_path}/moved/test", "data.reader_workers=3"]
    run = Run(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, read_recipe(recipe_file), kill_at=23)
    result = train(run, read_recipe(recipe_file, overrides))
    assert numbers(result) == numbers(whole[1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=64", r"another recipe: train\.batch_size was 128, now 64"),
        ("tables.overrides.user.embedding_dim=4", r"tables\.overrides\.user\.embedding_dim was None, now 4"),
        ("data.validation_share=0.2", r"data\.validation_share was 0\.1, now 0\.2"),
    ],
)
def test_a_recipe_that_would_change_numbers_is_refused(whole, recipe_file, override, message):
    with pytest.raises(ConfigError, match=message):
        whole[0].check_recipe(read_recipe(recipe_file, [override]))


def test_other_data_and_another_schema_are_refused(recipe_file, clicks, tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, read_recipe(recipe_file), kill_at=3)
    other = write_rows(tmp_path / "other.parquet", click_rows(3000, 9))
    with pytest.raises(TpurecError, match=r"the train data of this RUN were 5000 rows in 2 files .*now they are 3000"):
        train(run, read_recipe(recipe_file, [f"data.train={other}"]))
    with pytest.raises(TpurecError, match=r"the test data of this RUN were 1003 rows"):
        train(run, read_recipe(recipe_file, [f"data.test={other}"]))
    changed = tmp_path / "schema.toml"
    changed.write_text(SCHEMA.to_text().replace("num_embeddings = 50", "num_embeddings = 51"))
    with pytest.raises(ConfigError, match="begun with another schema"):
        train(run, read_recipe(recipe_file, [f"data.schema={changed}"]))


def test_a_folder_that_is_no_run_is_left_alone(recipe_file, tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "thesis.doc").write_text("do not overwrite")
    with pytest.raises(ConfigError, match=r"is not a RUN \(it has 'thesis\.doc' but no recipe\.toml\)"):
        train(Run(folder), read_recipe(recipe_file))
    with pytest.raises(ConfigError, match="is not a RUN: it has no recipe"):
        load_run(folder)
    with pytest.raises(ConfigError, match="is a file; a RUN is a folder"):
        Run(folder / "thesis.doc").check_recipe(read_recipe(recipe_file))


def test_two_processes_cannot_train_into_one_folder(tmp_path):
    run = Run(tmp_path / "run")
    with run.locked(), pytest.raises(TpurecError, match="another process is training"), Run(run.path).locked():
        pass
    with run.locked():
        pass


def test_a_run_without_checkpoint_cannot_be_loaded(recipe_file, tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, read_recipe(recipe_file), kill_at=2)
    with pytest.raises(TpurecError, match="has no checkpoint yet"):
        load_run(run.path)


def test_without_validation_the_last_checkpoint_is_evaluated(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file, ["data.validation_share=0", "train.max_steps=25"])
    result = train(Run(tmp_path / "run"), recipe)
    assert (result["steps"], result["best_step"], result["eval_rows"]) == (25, None, 1003)
    assert load_run(tmp_path / "run").checkpoint.step == 25


def test_without_test_data_the_validation_rows_give_the_metrics(clicks, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'[data]\ntrain = "{clicks}/train"\n[train]\nmax_steps = 3\n[device]\nthreads = 1\n')
    result = train(Run(tmp_path / "run"), read_recipe(path))
    assert (result["evaluated_on"], result["eval_rows"]) == ("validation", 250)
    result = train(Run(tmp_path / "none"), read_recipe(path, ["data.validation_share=0"]))
    assert (result["evaluated_on"], result["eval_rows"], result["auc"]) == (None, 0, None)
    assert (result["rows_seen"], result["steps"]) == (5000, 3)


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_fewer_test_rows_than_a_batch_are_each_counted_once(recipe_file, tmp_path, rows):
    """case 27"""
    test = write_rows(tmp_path / "few.parquet", click_rows(rows, 5))
    recipe = read_recipe(recipe_file, [f"data.test={test}", "train.max_steps=2"])
    assert train(Run(tmp_path / "run"), recipe)["eval_rows"] == rows


def labelled(table: pa.Table, labels) -> pa.Table:
    return table.set_column(0, "click", pa.array(labels, type=pa.float32()))


def test_equal_labels_are_said_loudly_and_auc_is_undefined(recipe_file, tmp_path):
    """case 31"""
    train_file = write_rows(tmp_path / "train.parquet", labelled(click_rows(400, 1), [0.0] * 400))
    test_file = write_rows(tmp_path / "test.parquet", labelled(click_rows(50, 2), [1.0] * 50))
    overrides = [f"data.train={train_file}", f"data.test={test_file}", "train.max_steps=2"]
    result = train(Run(tmp_path / "run"), read_recipe(recipe_file, overrides))
    assert result["auc"] is None and result["normalized_entropy"] is None and result["log_loss"] > 0
    assert "all training labels are 0" in result["warnings"][0]
    assert "all 50 labels are 1: AUC is undefined" in result["warnings"][1]
    json.dumps(result, allow_nan=False)


def test_minus_1_in_place_of_a_missing_label_is_an_error_that_names_the_way_out(recipe_file, tmp_path):
    """case 31"""
    file = write_rows(tmp_path / "train.parquet", labelled(click_rows(400, 1), [0.0, -1.0] * 200))
    with pytest.raises(DataError, match=r"column 'click': label -1 is outside \[0, 1\].*set label\.missing"):
        train(Run(tmp_path / "run"), read_recipe(recipe_file, [f"data.train={file}"]))
    declared = tmp_path / "schema.toml"
    declared.write_text(SCHEMA.to_text().replace('column = "click"', 'column = "click"\nmissing = -1.0'))
    test = write_rows(tmp_path / "test.parquet", labelled(click_rows(50, 2), [-1.0] * 50))
    overrides = [f"data.schema={declared}", f"data.test={test}", "train.max_steps=2"]
    result = train(Run(tmp_path / "declared"), read_recipe(recipe_file, overrides))
    assert (result["auc"], result["eval_rows"], result["missing_labels"]) == (None, 50, 50)
    assert "none of 50 rows has a label" in result["warnings"][0]


def test_rows_without_label_are_masked_and_counted(recipe_file, tmp_path):
    """case 32"""
    labels = np.where(np.arange(400) % 4 == 0, np.nan, np.arange(400) % 2).astype(np.float32)
    file = write_rows(tmp_path / "train.parquet", labelled(click_rows(400, 1), labels))
    overrides = [f"data.train={file}", f"data.test={file}", "data.validation_share=0", "train.epochs=1"]
    result = train(Run(tmp_path / "run"), read_recipe(recipe_file, overrides))
    assert (result["rows_seen"], result["train_missing_labels"]) == (400, 100)
    assert (result["eval_rows"], result["missing_labels"]) == (400, 100)
    assert any("100 of 400 training rows have no label" in warning for warning in result["warnings"])


def test_ids_that_the_policy_handled_are_counted_and_said(recipe_file, clicks, tmp_path):
    table = pq.read_table(clicks / "train" / "a.parquet")
    items = table["item"].to_pylist()
    items[5] = "not hex"
    file = write_rows(tmp_path / "train.parquet", table.set_column(4, "item", pa.array(items)))
    overrides = [f"data.train={file}", "train.epochs=1", "data.validation_share=0"]
    result = train(Run(tmp_path / "run"), read_recipe(recipe_file, overrides))
    assert result["ids"]["item"] == {"ids": 3000, "malformed": 1}
    assert any("handled by the id policy: 1 malformed" in warning for warning in result["warnings"])
    with pytest.raises(DataError, match=r"row 5 \(from 0\), column 'item'.*'not hex' is not hexadecimal"):
        train(Run(tmp_path / "strict"), read_recipe(recipe_file, [*overrides, "data.id_policy=error"]))


def test_data_without_rows_are_refused_before_training(recipe_file, clicks, tmp_path):
    empty = write_rows(tmp_path / "empty.parquet", click_rows(10).slice(0, 0))
    for key in ("train", "test"):
        with pytest.raises(DataError, match=rf"data\.{key}: 1 files without a row"):
            find_data(read_recipe(recipe_file, [f"data.{key}={empty}"]))


def test_a_file_that_is_damaged_behind_its_footer_is_named(recipe_file, clicks, tmp_path):
    file = tmp_path / "damaged.parquet"
    data = bytearray((clicks / "train" / "a.parquet").read_bytes())
    data[4:20_000] = bytes(19_996)
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"damaged\.parquet: row group \d+ cannot be read") as caught:
        train(Run(tmp_path / "run"), read_recipe(recipe_file, [f"data.train={file}"]))
    assert "\n" not in caught.value.problem  # Arrow's message has two lines


@pytest.mark.parametrize("name", ["result.json", "data.json"])
def test_a_damaged_record_of_a_run_is_named_with_the_way_out(tmp_path, name):
    (tmp_path / name).write_text('{"auc": ')
    run = Run(tmp_path)
    with pytest.raises(TpurecError, match=rf"{name}: damaged") as caught:
        run.result() if name == "result.json" else run.fingerprints()
    assert "Remove it" in caught.value.remedy


def test_a_damaged_checkpoint_is_named_when_resuming(recipe_file, tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, read_recipe(recipe_file), kill_at=23)
    newest = list_checkpoints(run.checkpoints)[-1]
    next(newest.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(TpurecError, match=rf"{newest.name}/rank-00000\.safetensors: 0 bytes.*Remove the folder"):
        train(run, read_recipe(recipe_file))
    shutil.rmtree(newest)
    assert train(run, read_recipe(recipe_file))["steps"] == 72
