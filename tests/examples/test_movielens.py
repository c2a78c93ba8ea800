"""The MovieLens example: its preparation, its schema on the real data, and the AUC that its recipe reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

from examples.movielens.__main__ import HERE
from examples.movielens.prepare import prepare
from tpurec.errors import DataError
from tpurec.features import Schema, Transformer, to_storage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Files of the real layout: 20 ratings, 2 users, 3 movies, one of them without a year."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    ratings = [f"{1 + i % 2}\t{1 + i % 3}\t{1 + i % 5}\t88125094{i}" for i in range(20)]
    lines = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings],
        "user": [
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            "1\t24\tM\ttechnician\t85711",
            "2\t53\tF\tother\tT8H1N",
        ],
        "item": [
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            "1\tToy \"Story\t1995\tAnimation Children's",
            "2\tunkonwn\tunkonwn\tunknown",
            "3\tX\t1994\tWar",
        ],
    }
    for ending, text in lines.items():
        (folder / f"ml-100k.{ending}").write_text("\n".join(text) + "\n")
    return folder


def _rows(path: Path) -> list[dict]:
    schema = Schema.load(HERE / "schema.toml")
    types = dict.fromkeys(schema.columns(keys=True), pa.string())
    return pa_csv.read_csv(path, convert_options=pa_csv.ConvertOptions(column_types=types)).to_pylist()


def test_every_rating_goes_to_one_part_with_the_facts_of_its_user_and_movie(tiny, tmp_path):
    assert prepare(tiny, tmp_path / "raw", seed=3) == {"train": 18, "test": 2}
    rows = _rows(tmp_path / "raw" / "train.csv") + _rows(tmp_path / "raw" / "test.csv")
    expected = sorted((str(1 + i % 2), str(1 + i % 3), str(1 + i % 5)) for i in range(20))
    assert sorted((row["user"], row["item"], row["rating"]) for row in rows) == expected
    for row in rows:
        assert (row["age"], row["zip_prefix"]) == {"1": ("24", "85"), "2": ("53", "T8")}[row["user"]]
        assert (row["year"], row["genres"]) == {
            "1": ("1995", "Animation Children's"),
            "2": ("", "unknown"),
            "3": ("1994", "War"),
        }[row["item"]]


def test_the_split_follows_the_seed(tiny, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare(tiny, tmp_path / name, seed)
    assert _rows(tmp_path / "a" / "test.csv") == _rows(tmp_path / "b" / "test.csv")
    assert _rows(tmp_path / "a" / "train.csv") != _rows(tmp_path / "c" / "train.csv")


def test_files_that_do_not_fit_are_named(tiny, tmp_path):
    with pytest.raises(DataError, match=r"ml-100k\.inter: no such file"):
        prepare(tmp_path, tmp_path / "raw", 0)
    users = tiny / "ml-100k.user"
    text = users.read_text()
    users.write_text(text.replace("age:token", "years:token"))
    with pytest.raises(DataError, match=r"ml-100k\.user: no column 'age'"):
        prepare(tiny, tmp_path / "raw", 0)
    users.write_text("\n".join(text.splitlines()[:2]) + "\n")
    with pytest.raises(DataError, match="names user '2'"):
        prepare(tiny, tmp_path / "raw", 0)


def test_the_schema_knows_every_id_of_the_real_data(shared_data, tmp_path):
    prepare(shared_data, tmp_path, seed=0)
    schema = Schema.load(HERE / "schema.toml")
    for part, rows in (("train", 90_000), ("test", 10_000)):
        table, problems = to_storage(pa.Table.from_pylist(_rows(tmp_path / f"{part}.csv")), schema, part)
        counts = Transformer(schema)(table).counts
        assert not problems and counts.rows == rows and counts.missing_labels == 0
        assert all(set(reasons) == {"ids"} for reasons in counts.tables.values()), counts.tables
        assert counts.tables["user"]["ids"] == rows and counts.tables["genres"]["ids"] > rows


@pytest.mark.slow
def test_the_recipe_reaches_its_auc_on_rows_it_never_saw(shared_data, tmp_path):
    command = [sys.executable, "-m", "examples.movielens", shared_data, "--out", tmp_path / "out", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    assert result["auc"] >= 0.780 and result["eval_rows"] == 10_000 and result["train_rows"] == 90_000
    assert 0.9 < result["calibration"] < 1.1


def test_the_recipe_stops_on_rows_of_the_training_data():
    from pipelines.recipe import read_recipe

    recipe = read_recipe(HERE / "recipe.toml")
    assert recipe.data.validation_share == 0.1 and recipe.train.patience > 0
