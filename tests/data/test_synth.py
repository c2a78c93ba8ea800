"""`data synth`: the same seed gives the same rows, in either format, and OUT appears whole or not at all."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data import synth as synth_module
from pipelines.data.auc_histogram import AucHistogram
from pipelines.data.click_columns import id_numbers
from pipelines.data.convert import convert_files
from pipelines.data.criteo import COLUMNS, DENSE, SPARSE
from pipelines.data.hex_text import hex_strings
from pipelines.data.planted import PlantedModel
from pipelines.data.synth import SynthConfig, draw_chunk, synthesize
from tests.data.logistic_regression import auc
from tests.data.run_command import run
from tpurec.errors import DataError
from tpurec.features import Schema, Transformer


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks and files already at a few thousand rows."""
    monkeypatch.setattr(synth_module, "CHUNK_ROWS", 500)
    monkeypatch.setattr(synth_module, "FILE_ROWS", 1_000)


def _bytes(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_command_writes_criteo_columns_with_blanks_negatives_and_the_schema(tmp_path):
    done = run("data", "synth", tmp_path / "logs", "--rows", "5000", "--seed", "3")
    assert (done["rows"], done["train_rows"], done["test_rows"]) == (5000, 4500, 500)
    assert 0.75 < done["best_auc"] < 0.88
    table = pq.read_table(tmp_path / "logs" / "train")
    assert table.column_names == list(COLUMNS)
    assert len(table) == 4500
    assert set(table["label"].to_pylist()) == {0, 1}
    for name in DENSE:
        assert pa.types.is_integer(table.schema.field(name).type)
    assert min(table["I2"].drop_null().to_pylist()) == -2
    assert table["I12"].null_count > 3000 and table["C22"].null_count > 3000 and table["C1"].null_count == 0
    for name in SPARSE:
        assert all(len(text) == 8 and int(text, 16) >= 0 for text in table[name].drop_null().to_pylist())
    assert Schema.from_parquet(tmp_path / "logs" / "train") == Schema.load("criteo")
    assert Schema.load(tmp_path / "logs" / "schema.toml") == Schema.load("criteo")
    manifest = json.loads((tmp_path / "logs" / "manifest.json").read_text())
    assert (manifest["best_auc"], manifest["seed"], manifest["rows"], manifest["version"]) == (
        done["best_auc"],
        3,
        5000,
        1,
    )


def test_best_auc_is_that_of_the_planted_probabilities_on_the_rows_written(tmp_path):
    result = synthesize(tmp_path / "logs", SynthConfig(rows=20_000, seed=6))
    drawn, labels = draw_chunk(PlantedModel(6), "test", 0, 2_000)
    written = pq.read_table(tmp_path / "logs" / "test")["label"].to_numpy()
    np.testing.assert_array_equal(written, labels)
    assert result.best_auc == pytest.approx(auc(drawn.logits, labels), abs=1e-4)
    assert 0.78 < result.best_auc < 0.85


def test_histogram_gives_the_auc_of_pieces_added_up():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 5_000)
    labels = rng.random(5_000) < 1 / (1 + np.exp(-logits))
    whole, parts = AucHistogram(), AucHistogram()
    whole.add(logits, labels)
    for start in range(0, 5_000, 700):
        piece = AucHistogram()
        piece.add(logits[start : start + 700], labels[start : start + 700])
        parts += piece
    assert whole.auc() == parts.auc() == pytest.approx(auc(logits, labels), abs=1e-5)
    assert np.isnan(AucHistogram().auc())


@pytest.mark.parametrize("kind", ["parquet", "tsv"])
def test_same_seed_same_bytes_for_any_number_of_workers(tmp_path, small_chunks, kind):
    config = SynthConfig(rows=3_700, seed=9, format=kind, weighted=True)
    synthesize(tmp_path / "a", config)
    synthesize(tmp_path / "b", config, workers=3)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    synthesize(tmp_path / "c", SynthConfig(rows=3_700, seed=10, format=kind, weighted=True))
    assert _bytes(tmp_path / "a") != _bytes(tmp_path / "c")
    assert len(list((tmp_path / "a" / "train").iterdir())) == 4


@pytest.mark.parametrize("weighted", [False, True])
def test_tsv_converts_to_what_parquet_holds(tmp_path, small_chunks, weighted):
    tables = []
    for kind in ("tsv", "parquet"):
        synthesize(tmp_path / kind, SynthConfig(rows=1_500, seed=1, format=kind, multi_hot=True, weighted=weighted))
        schema = Schema.load(tmp_path / kind / "schema.toml")
        result = convert_files([tmp_path / kind / "train"], tmp_path / f"{kind}_train", schema)
        assert (result.counts.read, result.counts.num_rejected, result.counts.padded) == (1_350, 0, 0)
        tables.append(pq.read_table(tmp_path / f"{kind}_train"))
    assert tables[0].equals(tables[1])
    assert pa.types.is_list(tables[0].schema.field("C10").type)
    if weighted:
        lengths = [len(ids) for ids in tables[0]["C10"].to_pylist()]
        assert lengths == [len(weights) for weights in tables[0]["C10_weights"].to_pylist()]
        assert max(lengths) > 5
    columns = Transformer(schema)(tables[0])
    assert columns.num_rows == 1_350 and (columns.sparse["C15"].weights is not None) is weighted


def test_ids_of_a_column_are_all_different():
    numbers = id_numbers(4, np.arange(200_000))
    assert len(np.unique(numbers)) == 200_000
    texts = hex_strings(numbers[:1_000])
    assert [int(text, 16) for text in texts.to_pylist()] == numbers[:1_000].tolist()


def test_out_that_is_not_ours_is_refused_and_ours_only_replaced_on_request(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="was not written by this command"):
        synthesize(tmp_path / "mine", SynthConfig(rows=100), overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "logs").mkdir()  # an empty folder may be filled
    synthesize(tmp_path / "logs", SynthConfig(rows=100))
    with pytest.raises(DataError, match="--overwrite"):
        synthesize(tmp_path / "logs", SynthConfig(rows=200))
    synthesize(tmp_path / "logs", SynthConfig(rows=200), overwrite=True)
    assert pq.read_table(tmp_path / "logs" / "train").num_rows == 180
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "mine"]


def test_interrupted_in_the_middle_it_leaves_nothing(tmp_path, small_chunks):
    def stop(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "logs", SynthConfig(rows=4_000), progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_write_one_folder_at_once(tmp_path, small_chunks):
    def again(rows):
        with pytest.raises(DataError, match="another process"):
            synthesize(tmp_path / "logs", SynthConfig(rows=100))

    synthesize(tmp_path / "logs", SynthConfig(rows=1_000), progress=again)
    assert pq.read_table(tmp_path / "logs" / "train").num_rows == 900


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "100", "--test-share", "1"], ["--seed", "1"]])
def test_wrong_usage_ends_with_2(tmp_path, words):
    run("data", "synth", tmp_path / "logs", *words, code=2)
    assert not (tmp_path / "logs").exists()
