"""`tpurec export`: a checkpoint becomes a bundle that scores as training's evaluation did, or a clear refusal."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.export import export_run
from pipelines.run import load_run
from tests.pipelines.conftest import RECIPE, click_rows, write_rows
from tpurec.bundle import Bundle, read_manifest
from tpurec.errors import DataError, TpurecError


@pytest.fixture(scope="module")
def run(clicks, tmp_path_factory):
    """A finished RUN on `clicks`."""
    from pipelines.commands.train import train

    folder = tmp_path_factory.mktemp("export")
    (folder / "recipe.toml").write_text(RECIPE.format(data=clicks))
    train(folder / "recipe.toml", out=folder / "run")
    return folder / "run"


def test_the_bundle_scores_as_training_evaluates(run, clicks, tmp_path):
    """Case 36."""
    from pipelines.commands.evaluate import evaluate

    export_run(run, tmp_path / "bundle")
    evaluate(run, [str(clicks / "test")], scores=tmp_path / "evaluated.parquet")
    evaluated = pq.read_table(tmp_path / "evaluated.parquet")
    scores = Bundle.load(tmp_path / "bundle").score(pq.read_table(clicks / "test"))
    np.testing.assert_allclose(scores, evaluated.column("score").to_numpy(), atol=1e-6, rtol=0)
    assert len(scores) == 1003 and scores.std() > 0.1


def test_the_manifest_carries_metrics_and_where_it_came_from(run, tmp_path):
    manifest = export_run(run, tmp_path / "bundle")
    result = json.loads((run / "result.json").read_text())
    assert manifest.metrics["auc"] == result["auc"] and manifest.metrics["evaluated_on"] == "test"
    assert manifest.source["step"] == result["best_step"] and manifest.source["checkpoint"] == "best"
    assert manifest.counts["examples"] == 64
    assert read_manifest(tmp_path / "bundle") == manifest
    assert (tmp_path / "bundle" / "recipe.toml").read_text() == (run / "recipe.toml").read_text()


def test_other_checkpoints_can_be_chosen(run, tmp_path):
    steps = sorted(int(folder.name[5:]) for folder in (run / "checkpoints").iterdir())
    last = export_run(run, tmp_path / "last", "last")
    assert last.source["step"] == steps[-1]
    for step in steps:
        manifest = export_run(run, tmp_path / str(step), str(step))
        assert manifest.source["step"] == step
        if step != load_run(run).checkpoint.step:
            assert "auc" not in manifest.metrics  # the result's metrics are those of the best one
    versions = {read_manifest(tmp_path / str(step)).version for step in steps}
    assert len(versions) == len(steps)


def test_a_step_without_checkpoint_names_those_there_are(run, tmp_path):
    with pytest.raises(TpurecError, match="no checkpoint of step 1") as caught:
        export_run(run, tmp_path / "bundle", "1")
    assert "There are: " in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_complete_checkpoint_is_refused(run, tmp_path):
    begun = shutil.copytree(run, tmp_path / "begun")
    for folder in (begun / "checkpoints").iterdir():
        folder.rename(folder.with_name(f".unfinished-{folder.name}"))
    with pytest.raises(TpurecError, match="has no checkpoint yet"):
        export_run(begun, tmp_path / "bundle")
    with pytest.raises(TpurecError, match="is not a RUN"):
        export_run(tmp_path, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_examples_come_from_elsewhere_on_request_and_over_several_files(run, tmp_path):
    write_rows(tmp_path / "more" / "a.parquet", click_rows(10, 8))
    write_rows(tmp_path / "more" / "b.parquet", click_rows(0, 9))
    write_rows(tmp_path / "more" / "c.parquet", click_rows(10, 9))
    manifest = export_run(run, tmp_path / "bundle", examples=str(tmp_path / "more"))
    assert manifest.counts["examples"] == 20
    ages = pa.concat_tables([click_rows(10, 8), click_rows(10, 9)]).column("age")
    assert Bundle.load(tmp_path / "bundle").examples().column("age").to_pylist() == ages.to_pylist()


def test_data_that_moved_away_is_a_clear_refusal(clicks, run, tmp_path):
    moved = shutil.copytree(run, tmp_path / "run")
    text = (moved / "recipe.toml").read_text()
    (moved / "recipe.toml").write_text(text.replace(f"{clicks}/test", f"{clicks}/gone"))
    with pytest.raises(DataError, match=r"data\.test: .*gone: no such file") as caught:
        export_run(moved, tmp_path / "bundle")
    assert "--examples" in caught.value.remedy
