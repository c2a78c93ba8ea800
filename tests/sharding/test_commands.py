"""`tpurec plan` as people and scripts use it."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpurec import cli
from tpurec.errors import ConfigError
from tpurec.features.hashing import hash_rows, integer_codes
from tpurec.sharding.measure import measure
from tpurec.sharding.plan import Plan
from tpurec.sharding.skew import exponent_of
from tpurec.sharding.sources import read_source
from tpurec.sharding.tables import FeatureSpec, TableSpec

TABLES = """
batch_size = 4096
[[tables]]
name = "user"
num_embeddings = 1_000_000
embedding_dim = 64
features = [{name = "user_id", ids_per_example = 1}, {name = "friend", ids_per_example = 8}]
[[tables]]
name = "item"
num_embeddings = 5_000
embedding_dim = 64
features = [{name = "item_id"}]
"""
BIG = """
batch_size = 1024
[[tables]]
name = "huge"
num_embeddings = 400_000_000
embedding_dim = 128
features = [{name = "f"}]
"""
SCHEMA = """
name = "small"
[label]
column = "label"
[[dense]]
name = "age"
transform = "log1p"
[[sparse]]
name = "user_id"
kind = "integer"
num_embeddings = 1000
[[sparse]]
name = "tags"
kind = "integer"
num_embeddings = 50
transform = "identity"
multi_valued = true
"""


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def tables(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(TABLES)
    return path


@pytest.fixture
def parquet(tmp_path):
    from tpurec.features.schema import Schema

    schema = Schema.from_text(SCHEMA)
    rows = pa.table(
        {
            "label": [0.0, 1.0] * 50,
            "age": [1.0] * 100,
            "user_id": list(range(10)) * 10,
            "tags": [[1, 2, 3], []] * 50,
        },
        schema=schema.arrow_schema(),
    )
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(rows, folder / "part-0.parquet", row_group_size=20)
    return folder


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


def test_the_readme_shows_the_answer_for_a_table_that_cannot_fit_as_it_is(run, tmp_path, monkeypatch):
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
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
    path.write_text(TABLES.replace('"user"', '"[bold]a[/x] b"'))
    for words in ((), ("--slice", "v6e-8")):
        assert run(path, "--slice", "v6e-4", *words)[0] == 0
    assert run(path, "--slice", "v6e-4")[1].count("[bold]a[/x] b") == 2


def test_a_narrow_window_cuts_nothing_off(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "tables.toml"
    name = "a_table_with_a_name_that_is_longer_than_anyone_would_like_it_to_be"
    path.write_text(TABLES.replace('"user"', f'"{name}"'))
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


def test_a_recipe_is_planned_by_its_schema_and_dense_part(tmp_path, parquet):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\ntrain = "{parquet}"\n[tables]\nembedding_dim = 32\noptimizer = "adagrad"\n[train]\nbatch_size = 512\n'
    )
    found = read_source(str(recipe))
    assert [(table.name, table.num_embeddings, table.embedding_dim) for table in found.tables] == [
        ("user_id", 1000, 32),
        ("tags", 50, 32),
    ]
    assert found.tables[0].optimizer == "adagrad" and found.batch_size == 512
    assert found.assumptions.dense_parameters < 100_000, "the recipe's own MLPs, not the default's 16 million"
    assert read_source(str(recipe), ["tables.embedding_dim=64"]).tables[0].embedding_dim == 64


def test_a_data_set_is_measured_instead_of_assumed(parquet):
    found = {table.name: table for table in read_source(str(parquet), embedding_dim=16).tables}
    assert found["user_id"].ids_per_example == 1 and found["user_id"].unique_share == pytest.approx(10 / 100)
    assert found["tags"].ids_per_example == pytest.approx(1.5) and found["tags"].unique_share_ids == 150
    assert found["tags"].unique_share == pytest.approx(3 / 150)


LIST = """
batch_size = 4096
[[tables]]
name = "users"
num_embeddings = 4
embedding_dim = 64
zipf_exponent = 3.0
features = [{name = "user_id", ids_per_example = 9}]
[[tables]]
name = "tags"
num_embeddings = 50
embedding_dim = 64
features = [{name = "tags"}]
"""


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "listed.toml"
    path.write_text(LIST)
    return path


def test_a_table_list_is_measured_on_data_in_place_of_what_it_says(run, listed, parquet):
    """The list's rows are hashed into, not the schema's thousand; a given skew gives way to the measured one."""
    found = read_source(str(listed), data=str(parquet))
    users, tags = found.tables
    distinct = len(set(hash_rows(integer_codes(np.arange(10)), 4)))
    assert (users.ids_per_example, users.unique_share, users.unique_share_ids) == (1, distinct / 100, 100)
    assert users.zipf_exponent is None and tags.ids_per_example == pytest.approx(1.5)

    code, out, err = run(listed, "--slice", "v6e-4", "--measure", parquet, "--json")
    measured = json.loads(out)["measured"]
    assert code == 0 and (measured["num_examples"], measured["num_examples_in_data"]) == (100, 100), err
    seen = {table["name"]: table for table in measured["tables"]}
    assert seen["tags"]["num_ids"] == 150 and seen["tags"]["unique_share"] == pytest.approx(3 / 150)
    assert seen["users"]["zipf_exponent"] == pytest.approx(exponent_of(users, 0.0))
    out = run(listed, "--slice", "v6e-4", "--measure", parquet)[1]
    assert f"Measured on 100 of 100 examples in {parquet}" in out and "Zipf exponent" in out and "2.00%" in out
    out = run(listed, "--slice", "v6e-4", "--slice", "v6e-8", "--measure", parquet)[1]
    assert "Measured on 100 of 100" in out and "samples/s a chip" in out


def test_the_sample_is_spread_over_the_files_and_passes_empty_row_groups(parquet):
    whole = pq.read_table(parquet / "part-0.parquet")
    pq.write_table(whole.slice(0, 0), parquet / "a-first.parquet")
    with pq.ParquetWriter(parquet / "b-second.parquet", whole.schema) as writer:
        writer.write_table(whole.slice(0, 0))
        writer.write_table(whole.slice(0, 20))
    tables = [TableSpec("tags", 50, 8, (FeatureSpec("tags"),))]
    _, measured = measure(tables, parquet, sample_rows=20)
    assert (measured.num_examples, measured.num_examples_in_data) == (20, 120)


def test_ids_without_a_row_are_counted_and_left_out(run, listed, parquet):
    rows = pq.read_table(parquet / "part-0.parquet")
    wild = pa.array([[1, 50, -3], [2]] * 50, rows.schema.field("tags").type)
    pq.write_table(rows.set_column(3, rows.schema.field("tags"), wild), parquet / "part-0.parquet")
    tags = measure(read_source(str(listed)).tables, parquet)[1].tables[1]
    assert (tags.ids_without_row, tags.num_ids, tags.ids_per_example) == (100, 100, 1.0)
    assert "100 of 300 ids have no row" in run(listed, "--slice", "v6e-4", "--measure", parquet)[1]


def test_measuring_names_a_feature_that_the_data_lacks(run, tables, parquet):
    code, _, err = run(tables, "--slice", "v6e-4", "--measure", parquet)
    assert code == 1 and "'friend', 'item_id' are not in this data" in err and "user_id, tags" in err


def test_measuring_names_what_is_wrong_with_the_data(run, listed, parquet, tmp_path):
    whole = pq.read_table(parquet / "part-0.parquet")

    def complaint(data):
        code, out, err = run(listed, "--slice", "v6e-4", "--measure", data)
        assert code == 1 and out == "" and err.count("\n") == 1
        return err

    assert "no such file" in complaint(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    assert "no *.parquet file" in complaint(tmp_path / "folder")
    assert "not a Parquet file" in complaint(listed)
    pq.write_table(whole.replace_schema_metadata(None), tmp_path / "foreign.parquet")
    assert "no tpurec schema" in complaint(tmp_path / "foreign.parquet")
    pq.write_table(whole.slice(0, 0), tmp_path / "folder" / "part.parquet")
    assert "has no rows to measure" in complaint(tmp_path / "folder")
    pq.write_table(whole.drop_columns(["tags"]), parquet / "part-1.parquet")  # case 29: a later file
    assert "part-1.parquet" in (err := complaint(parquet)) and "tags" in err
    (parquet / "part-1.parquet").write_bytes(b"PAR1")
    assert "part-1.parquet: not a Parquet file" in complaint(parquet)


def test_a_torchrec_model_is_planned_by_its_collections(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "from torchrec import EmbeddingBagCollection, EmbeddingBagConfig\n"
        "from torchrec.models.dlrm import DLRM\n"
        "def make():\n"
        "    table = EmbeddingBagConfig(name='t', num_embeddings=100, embedding_dim=8, feature_names=['a', 'b'])\n"
        "    tables = EmbeddingBagCollection(tables=[table], device=torch.device('meta'))\n"
        "    return DLRM(tables, 3, [8, 8], [4, 1], dense_device=torch.device('meta'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_source("own_model:make")
    assert [(t.name, t.num_embeddings, t.embedding_dim, len(t.features)) for t in found.tables] == [("t", 100, 8, 2)]
    # DLRM: (3*8+8) + (8*8+8) dense, (8 + 3 pairs)*4+4 and 4+1 over.
    assert found.assumptions.dense_parameters == 32 + 72 + 48 + 5


def test_tables_of_one_name_in_two_collections_are_refused(tmp_path, monkeypatch):
    (tmp_path / "twice_model.py").write_text(
        "import torch\n"
        "from torchrec import EmbeddingBagCollection as Bags, EmbeddingBagConfig as Config\n"
        "def bags(rows):\n"
        "    return Bags(tables=[Config(name='t', num_embeddings=rows, embedding_dim=8, feature_names=[f'f{rows}'])],\n"
        "                device=torch.device('meta'))\n"
        "def make():\n"
        "    return torch.nn.ModuleList([bags(100), bags(200)])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="two collections have different tables of the name 't'"):
        read_source("twice_model:make")


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
    tables.write_text(TABLES.replace("batch_size = 4096", ""))
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


def test_a_factory_that_makes_no_model_is_named():
    with pytest.raises(ConfigError, match=r"os:getcwd: gives a str, not a torch module"):
        read_source("os:getcwd")


def test_what_a_factory_raises_is_named_as_the_factorys():
    with pytest.raises(ConfigError, match=r"os:chdir: calling it raised TypeError"):
        read_source("os:chdir")


def test_plan_diff_says_what_moves(run, tables, tmp_path, capsys):
    for name, slice_ in (("a", "v6e-4"), ("b", "v6e-8")):
        assert run(tables, "--slice", slice_, "--out", tmp_path / f"{name}.json")[0] == 0

    def compare(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["plan-diff", *map(str, arguments)])
        return caught.value.code, capsys.readouterr().out

    code, out = compare(tmp_path / "a.json", tmp_path / "a.json", "--json")
    assert code == 0 and json.loads(out)["bytes_moved"] == 0
    code, out = compare(tmp_path / "a.json", tmp_path / "b.json", "--json")
    found = json.loads(out)
    assert 0 < found["bytes_moved"] <= found["bytes_total"]
    assert sum(table["bytes_moved"] for table in found["tables"]) == found["bytes_moved"]
    out = compare(tmp_path / "a.json", tmp_path / "b.json")[1]
    assert "2 of 2 tables change" in out and "to move" in out and "on 4 ranks" in out and "…" not in out
    out = compare(tmp_path / "a.json", tmp_path / "b.json", "--max-tables", "1")[1]
    assert "The table that moves most" in out and ("user" in out) != ("item" in out)
    assert "No table changes and nothing moves (2 tables)" in compare(tmp_path / "a.json", tmp_path / "a.json")[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is a folder, a plan file is expected"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "is not a sharding plan"),
        (b"{}", "is not a sharding plan"),
        (b'{"format": "tpurec.plan", "version": 1}', "bad.json: slice 'None' is not understood"),
        (b'{"format": "tpurec.plan", "version": 9}', "plan version 9"),
    ],
)
def test_plan_diff_names_the_file_that_is_no_plan(tmp_path, capsys, text, says):
    path = tmp_path / "bad.json"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan-diff", str(path), str(path)])
    err = capsys.readouterr().err
    assert caught.value.code == 1 and says in err and "bad.json" in err and "ake" in err and err.count("\n") == 1
