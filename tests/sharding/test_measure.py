"""`tpurec plan --measure`: what a sample of training data says of the tables of a list, and what is wrong with data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpurec.features.hashing import hash_rows, integer_codes
from tpurec.sharding.measure import measure
from tpurec.sharding.skew import exponent_of
from tpurec.sharding.sources import read_source
from tpurec.sharding.tables import FeatureSpec, TableSpec

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
    damaged = bytearray((parquet / "part-0.parquet").read_bytes())
    pages = slice(4, len(damaged) - 8 - int.from_bytes(damaged[-8:-4], "little"))  # up to the footer, which is whole
    damaged[pages] = b"\xff" * len(damaged[pages])
    (parquet / "part-1.parquet").write_bytes(damaged)
    assert "part-1.parquet: row group 0 cannot be read" in complaint(parquet)
