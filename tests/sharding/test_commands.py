"""`tpurec plan` as people and scripts use it."""

import json
from pathlib import Path

import pytest

from tests.sharding.problems import TABLE_LIST
from tpurec.sharding.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
BIG = """
batch_size = 1024
[[tables]]
name = "huge"
num_embeddings = 400_000_000
embedding_dim = 128
features = [{name = "f"}]
"""


def test_json_has_the_promised_keys_and_the_plan_file_loads(run, tables, tmp_path):
    code, out, err = run(tables, "--slice", "v6e-4", "--out", tmp_path / "plan.json", "--json")
    answer = json.loads(out)
    assert code == 0, err
    promised = {
        "fits", "slice", "num_chips", "num_ranks", "idle_ranks", "step_seconds", "step_parts", "lower_bound_seconds",
        "samples_per_second", "hbm_bytes_max", "hbm_bytes_mean", "hbm_bytes_capacity", "plan_seconds", "tables",
        "problems",
    }  # fmt: skip
    assert promised <= answer.keys()
    assert {"name", "sharding", "ranks", "bytes", "seconds"} <= answer["tables"][0].keys()
    assert answer["fits"] and answer["num_ranks"] == 4 and answer["problems"] == []
    assert answer["step_seconds"] >= answer["lower_bound_seconds"] > 0
    plan = Plan.load(tmp_path / "plan.json")
    assert [placed.name for placed in plan.tables] == ["user", "item"]


def test_several_slices_are_compared_side_by_side(run, tables):
    code, out, _ = run(tables, "--slice", "v6e-4", "--slice", "tpu7x:2x2x1", "--price-per-chip-hour", "2", "--json")
    answers = json.loads(out)["slices"]
    assert code == 0 and [found["slice"] for found in answers] == ["v6e-4", "tpu7x:2x2x1"]
    for found in answers:
        hours = 1e6 / found["samples_per_second"] / 3600
        assert found["cost_per_million_examples"] == pytest.approx(2 * found["num_chips"] * hours)
    text = run(tables, "--slice", "v6e-4", "--slice", "tpu7x:2x2x1")[1]
    assert "samples/s a chip" in text and "…" not in text


def test_ranks_on_cpus_are_not_called_chips_with_hbm(run, tables):
    out = run(tables, "--slice", "cpu-4")[1]
    assert "4 ranks on CPUs" in out and "RAM a rank" in out and "chip" not in out and "HBM" not in out


def test_every_slice_has_its_own_price_if_it_is_given(run, tables):
    slices = ("--slice", "v6e-4", "--slice", "v5p-8")
    both = ("--price-per-chip-hour", "1", "--price-per-chip-hour", "4")
    one, other = json.loads(run(tables, *slices, *both, "--json")[1])["slices"]
    for found, price in ((one, 1), (other, 4)):
        hours = 1e6 / found["samples_per_second"] / 3600
        assert found["cost_per_million_examples"] == pytest.approx(price * 4 * hours)
    assert "Cheapest: " in run(tables, *slices, *both)[1]
    assert run(tables, *slices, *both, "--price-per-chip-hour", "2")[0] == 2
    assert run(tables, "--slice", "v6e-4", "--price-per-chip-hour", "inf")[0] == 2


@pytest.mark.parametrize("width", [80, 120])
def test_no_slice_is_cut_off_however_many_there_are(run, tables, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    slices = ["v6e-4", "v6e-8", "v6e-16", "v5e-4", "v5e-8", "v5p-8", "v5p-16", "tpu7x:2x2x1", "cpu-4"]
    out = run(tables, *(word for name in slices for word in ("--slice", name)))[1]
    heads = [word for line in out.splitlines() if line.startswith("  ") and line.strip() for word in line.split()]
    assert heads == slices and "…" not in out
    assert max(map(len, out.splitlines())) <= width


def test_side_by_side_says_why_a_slice_does_not_do_and_what_would(run, tmp_path):
    path = tmp_path / "big.toml"
    path.write_text(BIG)
    code, out, _ = run(path, "--slice", "v6e-4", "--slice", "v6e-32")
    assert code == 0 and "v6e-4 does not fit:" in out and "'huge'" in out and "would help" in out
    code, out, err = run(path, "--slice", "v6e-1", "--slice", "v6e-4")
    assert code == 1 and "v6e-1 does not fit" in out and "ways out above" in err


def test_the_readme_shows_the_plan_of_the_mlperf_tables_as_it_is(run, monkeypatch):
    words = "examples/mlperf_dlrm_v2/tables.toml --slice v6e-64 --max-tables 0"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "98")
    code, out, _ = run(*words.split())
    shown = readme.partition(f"$ tpurec plan {words}\n")[2].partition("\n```")[0]
    assert code == 0 and [line.rstrip() for line in out.splitlines()] == shown.splitlines()


def test_the_readme_shows_the_answer_for_a_table_that_cannot_fit_as_it_is(run, tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, after = readme.partition("$ tpurec plan user_table.toml --slice v6e-8\n")
    (tmp_path / "user_table.toml").write_text(before.rpartition("$ cat user_table.toml\n")[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "98")
    code, out, err = run("user_table.toml", "--slice", "v6e-8")
    lines = [line.rstrip() for line in (out + err).splitlines()]
    assert code == 1 and lines == after.partition("\n```")[0].splitlines()


def test_no_way_out_is_promised_where_there_is_none(run, tmp_path):
    path = tmp_path / "big.toml"
    path.write_text(BIG.replace("400_000_000", "2_000_000_000_000"))
    code, out, err = run(path, "--slice", "v6e-256")
    assert code == 1 and "would help" not in out and "above" not in err


def test_many_tables_that_do_not_fit_are_not_all_listed(run, tmp_path):
    path = tmp_path / "many.toml"
    entry = BIG.partition("[[tables]]")[2]
    path.write_text(
        "batch_size = 1024\n"
        + "".join("[[tables]]" + entry.replace("huge", f"h{k}").replace('"f"', f'"f{k}"') for k in range(9))
    )
    out = run(path, "--slice", "v6e-1")[1]
    assert "'h4'" in out and "'h5'" not in out and "and 4 more tables" in out


def test_a_batch_that_a_later_slice_cannot_share_is_refused_before_any_search(run, tables, monkeypatch):
    monkeypatch.setattr("tpurec.sharding.planner.plan", lambda *_: pytest.fail("planned"))
    code, _, err = run(tables, "--slice", "v6e-4", "--slice", "cpu-3")
    assert code == 1 and "4096 cannot be shared evenly by the 3 ranks of cpu-3" in err


def test_names_with_brackets_are_printed_as_they_are(run, tmp_path):
    """rich takes [x] for a style: "[/x]" would even be an error."""
    path = tmp_path / "tables.toml"
    path.write_text(TABLE_LIST.replace('"user"', '"[bold]a[/x] b"'))
    for words in ((), ("--slice", "v6e-8")):
        assert run(path, "--slice", "v6e-4", *words)[0] == 0
    assert run(path, "--slice", "v6e-4")[1].count("[bold]a[/x] b") == 2


def test_a_narrow_window_cuts_nothing_off(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "tables.toml"
    name = "a_table_with_a_name_that_is_longer_than_anyone_would_like_it_to_be"
    path.write_text(TABLE_LIST.replace('"user"', f'"{name}"'))
    code, out, _ = run(path, "--slice", "v6e-4")
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    assert out.count("a_table") == 2


def test_the_report_of_several_slices_is_one_page(run, tables, tmp_path):
    page = tmp_path / "plan.html"
    code, out, err = run(tables, "--slice", "v6e-4", "--slice", "v5e-4", "--report", page, "--json")
    assert code == 0 and json.loads(out)["report"] == str(page), err
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [found["slice"] for found in data["slices"]] == ["v6e-4", "v5e-4"]


def test_the_summary_says_what_a_person_asks_first(run, tables):
    code, out, _ = run(tables, "--slice", "v6e-4")
    assert code == 0
    for phrase in ("v6e-4  fits", "4 ranks", "none idle", "lower bound", "HBM a rank", "most expensive", "user"):
        assert phrase in out


def test_tables_that_cannot_fit_exit_with_1_and_name_the_missing_bytes(run, tmp_path):
    """Case 17, as a command: table, bytes needed and there, a way out; one JSON object all the same."""
    path = tmp_path / "big.toml"
    path.write_text(BIG)
    code, out, _ = run(path, "--slice", "v6e-4", "--json")
    answer = json.loads(out)
    assert code == 1 and answer["fits"] is False
    problem = answer["problems"][0]
    assert "huge" in problem["message"] and problem["bytes_missing"] > 0
    assert problem["remedies"], "a way out is offered"
    code, out, err = run(path, "--slice", "v6e-4")
    assert code == 1 and "does not fit" in out and "would help" in out and "do not fit" in err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nothing.toml", "--slice", "v6e-4"], 1, "nothing.toml"),
        (["TABLES", "--slice", "v6e-5"], 1, "v6e-4"),
        (["TABLES"], 2, "slice"),
        (["TABLES", "--slice", "v6e-4", "--batch-size", "0"], 2, "batch-size"),
        (["TABLES", "--slice", "v6e-4", "--slice", "v6e-8", "--out", "x.json"], 2, "--slice"),
        (["TABLES", "--slice", "v6e-4", "--out", "no/such/folder/x.json"], 1, "folder"),
        (["no.such.module:model", "--slice", "v6e-4"], 1, "no"),
        (["TABLES", "--slice", "v7-64"], 1, "slice 'v7-64': chip 'v7' is not known"),
        (["TABLES", "--slice", "v5p-128", "--slice", "v5p:4x4x4"], 2, "v5p-128 is given twice"),
        (["", "--slice", "v6e-4"], 1, "TABLES is empty"),
        (["TABLES", "--slice", ""], 1, "v6e-64"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(run, tables, words, code, says):
    found, _, err = run(*(tables if word == "TABLES" else word for word in words))
    assert found == code and says in err


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_place_that_cannot_be_written_is_refused_before_planning(run, tables, tmp_path, monkeypatch, option):
    monkeypatch.setattr("tpurec.sharding.planner.plan", lambda *_: pytest.fail("planned"))
    before = tables.read_text()
    for place, says in ((tmp_path, "is a folder"), (tables, "TABLES itself"), (tmp_path / "no" / "x", "folder does")):
        code, _, err = run(tables, "--slice", "v6e-4", option, place)
        assert code == 1 and says in err
    assert tables.read_text() == before


def test_options_that_would_do_nothing_are_refused(run, tables, parquet):
    code, _, err = run(tables, "--slice", "v6e-4", "--embedding-dim", "8")
    assert code == 1 and "Leave out --embedding-dim" in err
    code, _, err = run(parquet, "--slice", "v6e-4", "--batch-size", "64", "--embedding-dim", "8", "--set", "a=1")
    assert code == 1 and "--set a=1 has nothing to change" in err
    assert "--set a=1" in run("os:getcwd", "--slice", "v6e-4", "--set", "a=1")[2]


def test_what_names_no_batch_size_needs_the_option(run, tables):
    tables.write_text(TABLE_LIST.replace("batch_size = 4096", ""))
    code, _, err = run(tables, "--slice", "v6e-4")
    assert code == 2 and "add --batch-size" in err
    assert run(tables, "--slice", "v6e-4", "--batch-size", "64")[0] == 0


def test_an_interrupted_plan_is_one_line_and_leaves_no_file(run, tables, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tpurec.sharding.planner.plan", interrupted)
    before = sorted(tmp_path.iterdir())
    words = ("--slice", "v6e-4", "--out", tmp_path / "plan.json", "--report", tmp_path / "plan.html")
    assert run(tables, *words) == (130, "", "error: interrupted.\n")
    assert sorted(tmp_path.iterdir()) == before


def test_plan_and_report_do_not_overwrite_each_other(run, tables, tmp_path):
    assert run(tables, "--slice", "v6e-4", "--out", tmp_path / "x", "--report", tmp_path / "x")[0] == 2
