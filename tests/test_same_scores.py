"""Case 36, by the commands alone: the same 1,000 rows through `evaluate --scores`, `score` and `serve`, to 1e-6.

Synthetic logs as text, with lists of ids that have weights (case 6) and ids without a row (case 7): the TSV goes
through `data convert` for training and evaluation, and as it is through `score`.
"""

import json
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.multiprocess
NUM_ROWS = 1000
# Line of the test file, from 0 -> an id that its hex column C1 cannot hold.
STRANGE_IDS = {3: "not-hex", 500: "0123456789abcdef0", 999: "0x12"}

RECIPE = """
[data]
train = "{folder}/data/train"
test = "{folder}/data/test"

[tables]
embedding_dim = 8

[train]
batch_size = 512
learning_rate = 0.005
eval_batch_size = 384

[checkpoint]
every_steps = 10
"""


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
def folder(tmp_path_factory):
    """A folder with logs, their conversion, a RUN and its bundle, all made by the commands."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    tpurec("data", "synth", folder / "logs", "--rows", 10 * NUM_ROWS, "--format", "tsv", "--multi-hot", "--weights")
    (test,) = (folder / "logs" / "test").iterdir()
    lines = [line.split("\t") for line in test.read_text().splitlines()]
    assert len(lines) == NUM_ROWS
    for number, id_ in STRANGE_IDS.items():
        lines[number][14] = id_
    test.write_text("".join("\t".join(fields) + "\n" for fields in lines))
    for part in ("train", "test"):
        schema = folder / "logs" / "schema.toml"
        tpurec("data", "convert", folder / "logs" / part, folder / "data" / part, "--schema", schema)
    tpurec("train", folder / "recipe.toml", "--out", folder / "run")
    exported = tpurec("export", folder / "run", folder / "bundle")
    assert exported["bundle"] == str(folder / "bundle") and exported["bytes"] > 1_000_000
    return folder


@pytest.fixture(scope="module")
def evaluated(folder):
    """Scores of training's evaluation, float32 [1000], in the order of the data."""
    result = tpurec("evaluate", folder / "run", folder / "data" / "test", "--scores", folder / "evaluated.parquet")
    assert result["eval_rows"] == NUM_ROWS
    assert result["ids"]["C1"]["malformed"] == len(STRANGE_IDS)
    table = pq.read_table(folder / "evaluated.parquet")
    assert table.column("row").to_pylist() == list(range(NUM_ROWS))
    scores = table.column("score").to_numpy()
    assert scores.std() > 0.02  # a constant would prove nothing
    return scores


@pytest.mark.parametrize("source", ["data/test", "logs/test"])
def test_offline(folder, evaluated, source):
    out = folder / f"{source.replace('/', '-')}.parquet"
    result = tpurec("score", folder / "bundle", folder / source, out)
    written = pq.read_table(out)
    assert result["rows"] == NUM_ROWS and result["bad_rows"] == 0
    assert result["ids"]["C1"]["malformed"] == len(STRANGE_IDS)
    assert written.column("row").to_pylist() == list(range(NUM_ROWS))
    np.testing.assert_allclose(written.column("score").to_numpy(), evaluated, atol=1e-6, rtol=0)


def test_online(folder, evaluated):
    rows = pq.read_table(folder / "data" / "test").drop_columns(["label"]).to_pylist()
    assert len(rows[0]["C10"]) == len(rows[0]["C10_weights"])
    words = [sys.executable, "-m", "tpurec.cli", "serve", str(folder / "bundle"), "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["url"]
        scores = []
        for start, stop in ((0, 1), (1, 300), (300, NUM_ROWS)):
            body = json.dumps({"rows": rows[start:stop]}).encode()
            request = urllib.request.Request(f"{url}/v1/score", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                scores += json.load(response)["scores"]
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    np.testing.assert_allclose(scores, evaluated, atol=1e-6, rtol=0)
    assert f'tpurec_policy_ids_total{{reason="malformed",table="C1"}} {len(STRANGE_IDS)}.0' in metrics
