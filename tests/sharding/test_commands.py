"""`tpurec plan` as people and scripts use it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpurec import cli
from tpurec.errors import ConfigError
from tpurec.sharding.plan import Plan
from tpurec.sharding.sources import read_source

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


def test_the_summary_says_what_a_person_asks_first(run, tables):
    code, out, _ = run(tables, "--slice", "v6e-4")
    assert code == 0
    for phrase in ("v6e-4  fits", "4 ranks", "none idle", "lower bound", "HBM a rank", "most expensive", "user"):
        assert phrase in out


def test_tables_that_cannot_fit_exit_with_1_and_name_the_missing_bytes(run, tmp_path):
    """Case 17, as a command: table, bytes needed and there, a way out; one JSON object all the same."""
    path = tmp_path / "big.toml"
    path.write_text(
        'batch_size = 1024\n[[tables]]\nname = "huge"\nnum_embeddings = 400_000_000\nembedding_dim = 128\n'
        'features = [{name = "f"}]\n'
    )
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


def test_measuring_names_a_feature_that_the_data_lacks(run, tables, parquet):
    code, _, err = run(tables, "--slice", "v6e-4", "--measure", parquet)
    assert code == 1 and "friend" in err and "tags" in err


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


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_place_that_cannot_be_written_is_refused_before_planning(run, tables, tmp_path, monkeypatch, option):
    monkeypatch.setattr("tpurec.sharding.planner.plan", lambda *_: pytest.fail("planned"))
    before = tables.read_text()
    for place, says in ((tmp_path, "is a folder"), (tables, "TABLES itself"), (tmp_path / "no" / "x", "folder does")):
        code, _, err = run(tables, "--slice", "v6e-4", option, place)
        assert code == 1 and says in err
    assert tables.read_text() == before


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
    assert "move" in compare(tmp_path / "a.json", tmp_path / "b.json")[1]
