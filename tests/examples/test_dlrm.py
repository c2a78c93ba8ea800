"""The demo: its steps in order, and the plan of its recipe in what it prints. Only the planner really runs here."""

import re

import pyarrow.parquet as pq
import pytest

from examples.dlrm import __main__ as demo
from tpurec.features.schema import Schema

ANSWERS = {
    "data synth": {"best_auc": 0.82},
    "data convert": {},
    "train": {"rows_per_second": 1.0, "steps": 1},
    "evaluate": {"auc": 0.8, "eval_rows": 1},
    "export": {},
    "score": {"rows_per_second": 1.0, "path": "scores.parquet"},
}


def test_the_demo_shows_the_plan_of_its_recipe(tmp_path, monkeypatch, capsys):
    real, done = demo.tpurec, []

    def tpurec(*words):
        words = [str(word) for word in words]
        name = " ".join(words[: 2 if words[0] == "data" else 1])
        done.append(name)
        if name == "data convert":
            (tmp_path / "data").mkdir(exist_ok=True)
            folder = tmp_path / "data" / words[2].rpartition("/")[2]
            folder.mkdir()
            pq.write_table(Schema.load("criteo").arrow_schema().empty_table(), folder / "00000.parquet")
        return real(*words) if name == "plan" else ANSWERS[name]

    monkeypatch.setattr(demo, "tpurec", tpurec)
    monkeypatch.setattr(demo, "first_rows", lambda *_: [])
    monkeypatch.setattr(demo, "ask_online", lambda *_: {"scores": []})
    monkeypatch.setattr(demo.console, "width", 200)
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    demo.main()
    out = capsys.readouterr().out
    assert done == ["data synth", *["data convert"] * 2, "plan", "train", "evaluate", "export", "score"]
    assert "$ tpurec plan pipelines/recipes/demo.toml" in out
    line = next(line for line in out.splitlines() if "plan for v6e-16" in line)
    found = re.search(r"fits, 16 ranks, none idle; tables: (.+); estimated ([0-9.]+) ms a step of 65,536", line)
    assert found is not None, line
    assert sum(int(part.split()[0]) for part in found[1].split(", ")) == 26 and float(found[2]) > 0


def test_a_command_that_fails_ends_the_demo_with_its_name(tmp_path):
    with pytest.raises(SystemExit, match="`tpurec plan` failed with exit code 1"):
        demo.tpurec("plan", tmp_path / "nothing.toml", "--slice", "v6e-16")
