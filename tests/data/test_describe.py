"""`data describe`: the numbers are those of the data, whatever the pieces it is read in."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data import parquet_rows
from pipelines.data.describe import describe
from pipelines.data.synth import SynthConfig, synthesize
from tests.data.run_command import run
from tpurec.cli import main
from tpurec.errors import DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature

SCHEMA = Schema(
    name="shop",
    label=LabelColumn("stars", threshold=4),
    dense=(DenseFeature("price"),),
    sparse=(SparseFeature("item", 10, kind="integer"), SparseFeature("tags", 10, multi_valued=True)),
)


@pytest.fixture
def folder(tmp_path):
    table = pa.table(
        {
            "stars": pa.array([5.0, 4.0, 1.0, None, 2.0], pa.float32()),
            "price": pa.array([-1.0, 0.0, None, 7.0, 2.0], pa.float32()),
            "item": pa.array([3, 3, 4, None, 3]),
            "tags": pa.array([["a", "b"], [], ["a"], None, ["a", ""]]),
        }
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table.cast(SCHEMA.with_metadata(table.schema)), tmp_path / "data" / "a.parquet", row_group_size=2)
    return tmp_path / "data"


@pytest.mark.parametrize("piece_rows", [1, 100])
def test_counts_are_those_of_the_rows(folder, monkeypatch, piece_rows):
    monkeypatch.setattr(parquet_rows, "PIECE_ROWS", piece_rows)
    found = run("data", "describe", folder, "--batch-size", "2")
    assert (found["rows"], found["label_rate"], found["schema"]) == (5, 0.5, "shop")
    columns = found["columns"]
    assert columns["stars"]["blanks"] == 1
    price = columns["price"]
    assert (price["count"], price["blanks"], price["negatives"], price["zeros"]) == (4, 1, 1, 1)
    assert (price["lowest"], price["mean"], price["highest"]) == (-1.0, 2.0, 7.0)
    item = columns["item"]
    assert (item["count"], item["blanks"], item["distinct"], item["distinct_is_exact"]) == (4, 1, 2, True)
    assert item["top"] == [{"id": "3", "count": 3, "share": 0.75}, {"id": "4", "count": 1, "share": 0.25}]
    assert item["unique_share"] == pytest.approx((1 / 2 + 1) / 2)  # of [3, 3] and [4]; the last row is no full batch
    tags = columns["tags"]
    assert (tags["count"], tags["blanks"], tags["max_ids_per_example"]) == (4, 2, 2)
    assert tags["ids_per_example"] == pytest.approx(4 / 5)


def test_people_get_tables(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "describe", str(folder)])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "5 rows in 1 files, schema 'shop'" in shown and "3 75.0%" in shown and "1 missing" in shown


def test_synthetic_logs_have_the_blanks_and_the_skew_that_were_planted(tmp_path):
    synthesize(tmp_path / "logs", SynthConfig(rows=30_000, seed=2, multi_hot=True, weighted=True))
    found = describe([tmp_path / "logs"])
    assert found.counts.kept == 30_000
    assert found.dense["I12"].blanks / 30_000 == pytest.approx(0.77, abs=0.02)
    assert found.sparse["C22"].blanks / 30_000 == pytest.approx(0.76, abs=0.02)
    assert found.sparse["C15"].ids_per_example == pytest.approx(4.0, abs=0.1)
    # Drawn as r ** -1.4 rounded down to whole ranks, which is flatter at the first few.
    assert found.sparse["C3"].zipf_exponent == pytest.approx(1.3, abs=0.08)
    assert found.sparse["C17"].distinct == 10
    assert found.label.mean == pytest.approx(0.26, abs=0.02)


def test_text_needs_a_schema_and_bad_rows_are_left_out_and_counted(tmp_path, shared_data):
    with pytest.raises(DataError, match="--schema"):
        describe([shared_data / "criteo_raw_1000.tsv"])
    text = (shared_data / "criteo_raw_1000.tsv").read_text()
    (tmp_path / "a.tsv").write_text("7\tbroken\n" + text)
    found = run("data", "describe", tmp_path / "a.tsv", "--schema", "criteo")
    assert (found["rows"], found["rows_rejected"], found["label_rate"]) == (1000, {"too_few_fields": 1}, 0.205)
    assert found["columns"]["C9"]["distinct"] == 2 and found["columns"]["C26"]["blanks"] == 498


def test_rows_without_the_label_column_are_described_without_it(tmp_path):
    table = pa.table({"price": [1.0], "item": [1], "tags": [["a"]]})
    pq.write_table(table.cast(SCHEMA.with_metadata(table.schema)), tmp_path / "a.parquet")
    found = describe([tmp_path])
    assert found.label is None and np.isclose(found.dense["price"].mean, 1.0)


def test_case_31_labels_all_equal_are_said_loudly(tmp_path, capsys):
    """case 31"""
    table = pa.table({"stars": [1.0, 2.0], "price": [1.0, 1.0], "item": [1, 1], "tags": [["a"], []]})
    pq.write_table(table.cast(SCHEMA.with_metadata(table.schema)), tmp_path / "a.parquet")
    found = run("data", "describe", tmp_path)
    assert "AUC is undefined" in found["warnings"][0]
