"""Table lists are read from TOML and JSON; what is wrong is named with file, table, key, value and remedy."""

import dataclasses
import json

import pytest

from tests.sharding.problems import MLPERF, table
from tpurec.errors import ConfigError
from tpurec.sharding.tables import FeatureSpec, TableSpec, from_table_mapping, read_tables

GOOD = {"name": "user", "num_embeddings": 100, "embedding_dim": 16, "features": [{"name": "user_id"}]}


def test_the_mlperf_list_is_the_canonical_one():
    tables = read_tables(MLPERF).tables
    assert len(tables) == 26 and {t.embedding_dim for t in tables} == {128}
    assert sum(t.num_embeddings for t in tables) == 204_184_588
    assert sum(t.ids_per_example for t in tables) == 214  # as its multi_hot_sizes add up
    assert {(t.dtype, t.optimizer) for t in tables} == {("float32", "row_wise_adagrad")}


def test_torchrecs_spelling_of_the_optimizer_is_an_alias():
    written = table("a", 1000, 64, optimizer="rowwise_adagrad")
    assert written == table("a", 1000, 64, optimizer="row_wise_adagrad") and written.optimizer == "row_wise_adagrad"


def test_toml_and_json_read_alike(tmp_path):
    toml, text = tmp_path / "t.toml", tmp_path / "t.json"
    toml.write_text(
        'batch_size = 8\n[[tables]]\nname = "user"\nnum_embeddings = 100\nembedding_dim = 16\n'
        'features = [{name = "user_id", ids_per_example = 2.5}]\n[assumptions]\nzipf_exponent = 1.2\n'
    )
    entry = {**GOOD, "features": [{"name": "user_id", "ids_per_example": 2.5}]}
    text.write_text(json.dumps({"batch_size": 8, "tables": [entry], "assumptions": {"zipf_exponent": 1.2}}))
    read = read_tables(toml)
    assert read == read_tables(text)
    assert (read.batch_size, read.assumptions.zipf_exponent, read.tables[0].ids_per_example) == (8, 1.2, 2.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_embeddings": 0}, ["'user'", "num_embeddings = 0", "1 to 2^53 - 1"]),
        ({"embedding_dim": -4}, ["'user'", "embedding_dim = -4"]),
        ({"num_embeddings": "many"}, ["(user)", "num_embeddings", "'many'"]),
        ({"dtype": "int4"}, ["'user'", "dtype = 'int4'", "float32, bfloat16, float16"]),
        ({"optimizer": "lion"}, ["'user'", "optimizer = 'lion'", "row_wise_adagrad"]),
        ({"pooling": "max"}, ["'user'", "pooling = 'max'", "sum, mean, none"]),
        ({"num_embedings": 3}, ["unknown key 'num_embedings'", "num_embeddings"]),
        ({"features": []}, ["'user'", "features", "at least one"]),
        ({"features": [{"name": "f", "ids_per_example": -1}]}, ["'f'", "ids_per_example = -1"]),
        ({"allow": ["diagonal"]}, ["'user'", "allow", "'diagonal'", "row_wise"]),
        ({"pin": "row_wise", "forbid": ["row_wise"]}, ["'user'", "pin = 'row_wise'", "forbidden"]),
        ({"pin_ranks": [0]}, ["'user'", "pin_ranks", "needs pin"]),
        ({"unique_share": 0.5}, ["'user'", "unique_share", "unique_share_ids"]),
        ({"zipf_exponent": float("nan")}, ["'user'", "zipf_exponent"]),
        ({"features": ["user_id"]}, ["(user)", "['user_id']", 'features = [{name = "user_id"}]']),
        ({"features": "user_id"}, ["(user)", "'user_id'", 'features = [{name = "user_id"}]']),
    ],
)
def test_what_is_wrong_is_named(change, words):
    with pytest.raises(ConfigError) as caught:
        from_table_mapping({"tables": [{**GOOD, **change}]}, "lists/a.toml")
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).startswith("lists/a.toml")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, "has no list 'tables'"),
        ({"tables": []}, "has no list 'tables'"),
        ({"tables": ["user"]}, "tables[0] = 'user'"),
        ({"tables": [GOOD], "table": 1}, "unknown key 'table'"),
        ({"tables": [GOOD], "batch_size": 0}, "batch_size = 0"),
        ({"tables": [GOOD], "assumptions": {"zipf": 1}}, "unknown key 'zipf'"),
        ({"tables": [GOOD], "assumptions": {"gather_efficiency": 1.5}}, "gather_efficiency = 1.5: is a share"),
        ({"tables": [GOOD], "assumptions": {"hbm_bytes": 0}}, "hbm_bytes = 0: must be greater than 0"),
        ({"tables": [GOOD, {**GOOD, "features": [{"name": "other"}]}]}, "table 'user' is listed 2 times"),
        ({"tables": [GOOD, {**GOOD, "name": "item"}]}, "feature 'user_id' is listed 2 times (table 'user', 'item')"),
        ({"tables": [GOOD], "assumptions": {"zipf_exponent": float("nan")}}, "zipf_exponent = nan"),
        ({"tables": [GOOD], "assumptions": 3}, "assumptions = 3: must be a section"),
    ],
)
def test_faults_of_the_whole_list(mapping, words):
    with pytest.raises(ConfigError) as caught:
        from_table_mapping(mapping, "a.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("a.json: ") or str(caught.value).startswith("a.json [assumptions]: ")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_tables(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="no such file"):
        read_tables(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json: not valid JSON"):
        read_tables(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="must be an object"):
        read_tables(broken)


def test_sizes():
    adam = table("a", 1000, 64, optimizer="adam", dtype="bfloat16")
    assert (adam.weight_bytes, adam.state_bytes) == (128_000, 512_000)
    assert table("b", 1000, 64).state_bytes == 4000  # row-wise Adagrad: one float per row
    shared = TableSpec("c", 10, 8, (FeatureSpec("f", 2.0), FeatureSpec("g", 3.0)))
    assert (shared.ids_per_example, shared.vectors_per_example) == (5.0, 2.0)
    assert TableSpec("d", 10, 8, shared.features, pooling="none").vectors_per_example == 5.0


def test_the_documentation_lists_every_key_with_its_default():
    text = (MLPERF.parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    section = text.split("\n## TABLES\n")[1].split("\n## ")[0]
    listed = [
        [(cells[0].strip("`"), cells[2]) for cells in map(_cells, part.splitlines()) if cells[0].startswith("`")]
        for part in (section.partition("Keys of a table:")[2].split("Keys of a feature:"))
    ]
    shown = {None: "none", (): "empty", 1.0: "1", False: "false", dataclasses.MISSING: "must be given"}
    for kind, found in zip((TableSpec, FeatureSpec), listed, strict=True):
        assert found == [(f.name, shown.get(f.default, f.default)) for f in dataclasses.fields(kind)]


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [""]
