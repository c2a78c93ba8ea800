"""Case 36: the same 1,000 rows through `evaluate --scores`, `score` and `serve` have the same scores, to 1e-6."""

import json
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.pipelines.conftest import RECIPE, SCHEMA, click_rows, write_rows

pytestmark = pytest.mark.multiprocess
NUM_ROWS = 1000


def tpurec(*words):
    """Run a command; returns its JSON answer."""
    child = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, a RUN and its bundle, all made by the commands."""
    folder = tmp_path_factory.mktemp("same")
    write_rows(folder / "train" / "a.parquet", click_rows(4000, 1))
    write_rows(folder / "test" / "a.parquet", click_rows(NUM_ROWS, 3), row_group_size=300)
    (folder / "recipe.toml").write_text(RECIPE.format(data=folder))
    tpurec("train", folder / "recipe.toml", "--out", folder / "run")
    exported = tpurec("export", folder / "run", folder / "bundle")
    assert exported["bundle"] == str(folder / "bundle") and exported["bytes"] > 10_000
    return folder


@pytest.fixture(scope="module")
def evaluated(trained):
    """Scores of training's evaluation, float32 [1000], in the order of the data."""
    result = tpurec("evaluate", trained / "run", trained / "test", "--scores", trained / "evaluated.parquet")
    assert result["eval_rows"] == NUM_ROWS
    table = pq.read_table(trained / "evaluated.parquet")
    assert table.column("request").to_pylist() == click_rows(NUM_ROWS, 3).column("request").to_pylist()
    scores = table.column("score").to_numpy()
    assert scores.std() > 0.1  # a constant would prove nothing
    return scores


def test_offline(trained, evaluated):
    result = tpurec("score", trained / "bundle", trained / "test", trained / "scores.parquet")
    written = pq.read_table(trained / "scores.parquet")
    assert result["rows"] == NUM_ROWS
    assert written.column("request").to_pylist() == click_rows(NUM_ROWS, 3).column("request").to_pylist()
    np.testing.assert_allclose(written.column("score").to_numpy(), evaluated, atol=1e-6, rtol=0)


def test_online(trained, evaluated):
    rows = click_rows(NUM_ROWS, 3).select(SCHEMA.columns(labels=False)).to_pylist()
    words = [sys.executable, "-m", "tpurec.cli", "serve", trained / "bundle", "--port", "0", "--json"]
    server = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["url"]
        scores = []
        for start, stop in ((0, 1), (1, 300), (300, NUM_ROWS)):
            body = json.dumps({"rows": rows[start:stop]}).encode()
            request = urllib.request.Request(f"{url}/v1/score", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                scores += json.load(response)["scores"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    np.testing.assert_allclose(scores, evaluated, atol=1e-6, rtol=0)
