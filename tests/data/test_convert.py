"""`data convert`: every good row once, every bad one counted with its line, and OUT whole or not at all."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipelines.data import conversion_unit, training_parquet
from pipelines.data.convert import convert_files
from tests.data.run_command import run
from tpurec.errors import DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, TextInput, Transformer

SHOP = Schema(
    name="shop",
    label=LabelColumn("y"),
    dense=(DenseFeature("price"),),
    sparse=(SparseFeature("item", 100, kind="hex"), SparseFeature("user", 50, kind="integer", transform="identity")),
    id_policy="hash",
    keys=("request",),
    input=TextInput(columns=("request", "y", "price", "item", "user")),
)


def lines(start: int, stop: int) -> str:
    return "".join(f"r{n}\t{n % 2}\t{n}.5\t{n:08x}\t{n % 40}\n" for n in range(start, stop))


def write_schema(folder, schema=SHOP):
    path = folder / "shop.toml"
    path.write_text(schema.to_text())
    return path


def requests(folder) -> list[str]:
    return pyarrow.dataset.dataset(folder, format="parquet").to_table(columns=["request"])["request"].to_pylist()


# ---- real data -------------------------------------------------------------------------------------------------------


def test_case_30_real_criteo_rows_with_lost_tabs_are_padded_by_the_stated_rule(tmp_path, shared_data):
    """case 30"""
    done = run("data", "convert", shared_data / "criteo_raw_1000.tsv", tmp_path / "out", "--schema", "criteo")
    assert (done["rows_read"], done["rows_kept"], done["rows_rejected"]) == (1000, 1000, {})
    assert done["rows_padded"] == 498
    table = pq.read_table(tmp_path / "out")
    rows = [line.split("\t") for line in (shared_data / "criteo_raw_1000.tsv").read_text().split("\n")]
    for column, name in ((2, "I2"), (14, "C1"), (37, "C24"), (39, "C26")):
        want = [row[column] if column < len(row) and row[column] else None for row in rows]
        want = [None if text is None else float(text) if name == "I2" else text for text in want]
        assert table[name].to_pylist() == want
    assert min(table["I2"].to_pylist()) == -2  # negatives stay
    assert Schema.from_parquet(tmp_path / "out") == Schema.load("criteo")
    assert Transformer(Schema.load("criteo"))(table).num_rows == 1000


def test_real_csv_with_header_blanks_and_integers_written_as_floats_converts(tmp_path, shared_data):
    done = run("data", "convert", shared_data / "criteo_sample_200.csv", tmp_path / "out", "--schema", "criteo")
    assert (done["rows_read"], done["rows_kept"], done["rows_rejected"], done["rows_padded"]) == (200, 200, {}, 0)
    table = pq.read_table(tmp_path / "out")
    assert table["I3"][0].as_py() == 260.0 and table["I1"][0].as_py() is None and table["C26"][0].as_py() is None


def test_case_30_short_rows_that_lost_more_than_trailing_blanks_are_rejected(tmp_path):
    """case 30"""
    full = ["1", *["2"] * 13, *["0000000a"] * 26]
    rows = [full, full[:38], full[:37], full[:36], [*full[:37], ""], [*full, "x"], full[:15], ["1.5", *full[1:]]]
    rows += [["1", "x", *full[2:]], [*full[:14], "not hex!", *full[15:]], [*full[:14], "abc", *full[15:]]]
    (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    done = run("data", "convert", tmp_path / "a.tsv", tmp_path / "out", "--schema", "criteo")
    assert done["rows_rejected"] == {
        "too_few_fields": 3,  # 36 and 15 fields, and 38 of which the last is blank
        "too_many_fields": 1,
        "label_out_of_range": 1,
        "not_a_number": 1,
    }
    assert (done["rows_read"], done["rows_kept"], done["rows_padded"]) == (11, 5, 2)
    # Ids that are not hex follow the schema's policy (hash), as they do online: the row is kept as it is.
    assert pq.read_table(tmp_path / "out")["C1"].to_pylist()[-2:] == ["not hex!", "abc"]


# ---- kinds of input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_all_kinds_of_files_become_one_data_set_in_the_order_of_the_inputs(tmp_path, workers):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.tsv").write_text(lines(0, 30))
    (source / "b.tsv.gz").write_bytes(gzip.compress(lines(30, 40).encode()))
    (source / "c.tsv.zst").write_bytes(pa.compress(lines(40, 60).encode(), "zstd", asbytes=True))
    header = "user,item,price,y,request,unused\n"
    (source / "d.csv").write_text(header + "".join(f'{n % 40},{n:x},,0,"r{n}",?\n' for n in range(60, 70)))
    table = pa.table(
        {
            "request": [f"r{n}" for n in range(70, 90)],
            "y": pa.array([n % 2 for n in range(70, 90)], pa.int8()),
            "price": pa.array([None, *range(71, 90)], pa.int64()),
            "item": pa.array([f"{n:08x}" for n in range(70, 90)]).dictionary_encode(),
            "user": pa.array([float(n % 40) for n in range(70, 90)]),
            "unused": [None] * 20,
        }
    )
    pq.write_table(table, source / "e.parquet", row_group_size=7)
    schema = write_schema(tmp_path)
    done = run("data", "convert", source, tmp_path / "out", "--schema", schema, "--workers", workers)
    assert (done["rows_read"], done["rows_kept"], done["rows_rejected"]) == (90, 90, {})
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(90)]
    for file in (tmp_path / "out").glob("*.parquet"):
        found = pq.read_schema(file)
        assert Schema.from_arrow(found, file.name) == SHOP
        assert found.remove_metadata() == pq.read_schema(tmp_path / "out" / "00000-0000-000.parquet").remove_metadata()
    columns = Transformer(SHOP)(pq.read_table(tmp_path / "out"))
    np.testing.assert_array_equal(columns.sparse["user"].rows, [n % 40 for n in range(90)])
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["rows"] == 90 and len(manifest["files"]) == 5
    assert manifest["schema_fingerprint"] == SHOP.fingerprint()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_large_files_are_cut_into_ranges_and_files_with_the_same_rows_and_line_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion_unit, "RANGE_BYTES", 1_000)
    text = lines(0, 200).splitlines()
    text[150] = "short"
    (tmp_path / "a.tsv").write_text("\n".join(text))
    result = convert_files([tmp_path / "a.tsv"], tmp_path / "out", SHOP)
    assert result.units > 3
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(200) if n != 150]
    assert [str(row) for row in result.counts.examples] == [f"{tmp_path}/a.tsv: line 151: 1 fields, 5 expected"]


def test_parquet_is_cut_at_row_groups_into_units(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion_unit, "FILE_ROWS", 10)
    convert_files([write_rows(tmp_path / "a.tsv", 100)], tmp_path / "one", SHOP)
    pq.write_table(pq.read_table(tmp_path / "one"), tmp_path / "b.parquet", row_group_size=8)
    result = convert_files([tmp_path / "b.parquet"], tmp_path / "out", SHOP)
    assert result.units == 5
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(100)]


def write_rows(path, count):
    path.write_text(lines(0, count))
    return path


def test_row_groups_and_files_have_the_stated_sizes(tmp_path):
    tables = [pa.table({"n": np.arange(start, start + 30)}) for start in range(0, 300, 30)]
    with training_parquet.TrainingParquetWriter(tmp_path, "x", row_group_rows=20, file_rows=80) as writer:
        for table in tables:
            writer.write(table)
        assert not list(tmp_path.glob("x-*.parquet"))  # nothing has its name before all is written
    assert [(file.name, file.rows) for file in writer.files] == [
        (f"x-{number:03d}.parquet", rows) for number, rows in enumerate([80, 80, 80, 60])
    ]
    assert pq.read_table(tmp_path)["n"].to_pylist() == list(range(300))
    footer = pq.read_metadata(tmp_path / "x-000.parquet")
    assert [footer.row_group(group).num_rows for group in range(4)] == [20] * 4
    assert footer.row_group(0).column(0).compression == "ZSTD"


def test_a_column_that_is_a_number_and_an_id_comes_out_of_text_as_one(tmp_path):
    schema = Schema(
        name="people",
        label=LabelColumn("y"),
        dense=(DenseFeature("age"),),
        sparse=(SparseFeature("age_id", 100, column="age", kind="integer"),),
    )
    (tmp_path / "a.csv").write_text("age,y\n17,1\n,0\n35,0\n")
    convert_files([tmp_path / "a.csv"], tmp_path / "out", schema)
    table = pq.read_table(tmp_path / "out")
    assert table["age"].to_pylist() == [17, None, 35] and table["age"].type == pa.int64()
    found = run("data", "describe", tmp_path / "out")["columns"]
    assert (found["age"]["mean"], found["age_id"]["distinct"]) == (26.0, 2)


# ---- bad rows and bad files ------------------------------------------------------------------------------------------


def test_bad_rows_beyond_the_limit_fail_with_reasons_and_lines_and_leave_nothing(tmp_path, capsys):
    text = lines(0, 20).splitlines()
    text[3], text[7], text[9] = "r3\t7\t1\t1\t1", "r7\t1\tcheap\t1\t1", "r9\t1\t1\t1\t1.5"
    (tmp_path / "a.tsv").write_text("\n".join(text))
    schema = write_schema(tmp_path)
    before = sorted(tmp_path.iterdir())
    failed = run(
        "data", "convert", tmp_path / "a.tsv", tmp_path / "out", "--schema", schema, "--max-bad-rows", "2", code=1
    )
    message = failed["error"]["message"]
    assert (
        "3 of 19 rows read so far are bad (label_out_of_range 1, not_a_number 1, not_an_integer 1), at most 2"
        in message
    )
    assert "a.tsv: line 4: column 'y': label 7 is outside [0, 1]" in message
    assert "a.tsv: line 8: column 'price': 'cheap' is not a number" in message
    assert "--max-bad-rows" in failed["error"]["remedy"]
    assert sorted(tmp_path.iterdir()) == before
    capsys.readouterr()
    done = run("data", "convert", tmp_path / "a.tsv", tmp_path / "out", "--schema", schema, "--max-bad-rows", "3")
    assert (done["rows_read"], done["rows_kept"], sum(done["rows_rejected"].values())) == (20, 17, 3)
    assert "rejected: " in capsys.readouterr().err
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(20) if n not in (3, 7, 9)]


def test_without_a_limit_one_row_in_a_thousand_and_ten_in_any_case_may_be_bad(tmp_path):
    for bad, good, passes in ((10, 50, True), (11, 50, False), (15, 15_000, True), (16, 15_000, False)):
        (tmp_path / "a.tsv").write_text("bad\n" * bad + lines(0, good))
        try:
            assert convert_files([tmp_path / "a.tsv"], tmp_path / "out", SHOP).counts.num_rejected == bad
            assert passes
        except DataError as error:
            assert not passes and f"{bad} of" in error.problem


def test_a_row_with_several_faults_is_counted_once(tmp_path):
    (tmp_path / "a.tsv").write_text("r\t7\tx\t1\t1.5\n" + lines(0, 5))
    counts = convert_files([tmp_path / "a.tsv"], tmp_path / "out", SHOP).counts
    assert (counts.read, counts.kept, counts.num_rejected) == (6, 5, 1)


def test_ids_that_the_policy_error_would_stop_at_are_rejected_before_training(tmp_path):
    schema = Schema.from_text(SHOP.to_text().replace('id_policy = "hash"', 'id_policy = "error"'))
    (tmp_path / "a.tsv").write_text("a\t1\t1\txyz\t1\nb\t1\t1\t1\t50\nc\t1\t1\t1\t-1\n" + lines(0, 5))
    counts = convert_files([tmp_path / "a.tsv"], tmp_path / "out", schema).counts
    assert counts.kept == 5 and counts.num_rejected == 3
    Transformer(schema)(pq.read_table(tmp_path / "out"))
    assert convert_files([tmp_path / "a.tsv"], tmp_path / "all", SHOP).counts.kept == 8


@pytest.mark.parametrize("fault", ["absent", "type", "csv"])
def test_case_29_a_file_that_lacks_a_column_stops_all_before_anything_is_written(tmp_path, fault):
    """case 29"""
    write_rows(tmp_path / "a.tsv", 5)
    table = pa.table({"request": ["r"], "y": [1], "price": [1.0], "item": ["1"], "user": [1]})
    bad = tmp_path / "b.parquet"
    if fault == "absent":
        pq.write_table(table.drop_columns("item"), bad)
    elif fault == "type":
        pq.write_table(table.set_column(2, "price", pa.array(["dear"])), bad)
    else:
        bad = tmp_path / "b.csv"
        bad.write_text("request,y,item,user\nr,1,1,1\n")
    with pytest.raises(DataError, match=rf"{bad.name}.*{'item' if fault == 'absent' else 'price'}"):
        convert_files([tmp_path / "a.tsv", bad], tmp_path / "out", SHOP)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", bad.name]


def test_key_columns_need_one_type_in_all_files(tmp_path):
    write_rows(tmp_path / "a.tsv", 5)
    pq.write_table(
        pa.table({"request": [1], "y": [1], "price": [1.0], "item": ["1"], "user": [1]}), tmp_path / "b.parquet"
    )
    with pytest.raises(DataError, match=r"b\.parquet: key column 'request' is int64"):
        convert_files([tmp_path / "a.tsv", tmp_path / "b.parquet"], tmp_path / "out", SHOP)


@pytest.mark.parametrize(("label", "words"), [("1", "equal 1"), ("", "are missing")])
def test_case_31_labels_all_equal_or_missing_are_said_loudly(tmp_path, capsys, label, words):
    """case 31"""
    (tmp_path / "a.tsv").write_text("".join(f"r{n}\t{label}\t1\t1\t1\n" for n in range(5)))
    done = run("data", "convert", tmp_path / "a.tsv", tmp_path / "out", "--schema", write_schema(tmp_path))
    assert words in done["warnings"][0] and "AUC is undefined" in done["warnings"][0]
    assert "warning:" in capsys.readouterr().err
    assert done["rows_without_label"] == (0 if label else 5)


def test_case_31_minus_one_that_nobody_declared_is_rejected_and_said_not_trained_on(tmp_path):
    """case 31"""
    (tmp_path / "a.tsv").write_text("".join(f"r{n}\t-1\t1\t1\t1\n" for n in range(50)))
    failed = run("data", "convert", tmp_path / "a.tsv", tmp_path / "out", "--schema", write_schema(tmp_path), code=1)
    assert "label -1 is outside [0, 1]" in failed["error"]["message"]


def test_case_32_nan_labels_are_kept_as_missing_and_counted(tmp_path):
    """case 32"""
    (tmp_path / "a.tsv").write_text("a\t1\t1\t1\t1\nb\tNaN\t1\t1\t1\nc\t0\t1\t1\t1\n")
    counts = convert_files([tmp_path / "a.tsv"], tmp_path / "out", SHOP).counts
    assert (counts.kept, counts.missing_labels, counts.label_warning()) == (3, 1, None)
    assert pq.read_table(tmp_path / "out")["y"].to_pylist() == [1.0, None, 0.0]


def test_inputs_without_rows_or_none_at_all_fail(tmp_path):
    (tmp_path / "a.tsv").write_text("")
    with pytest.raises(DataError, match="hold no rows"):
        convert_files([tmp_path / "a.tsv"], tmp_path / "out", SHOP)
    with pytest.raises(DataError, match="no such file"):
        convert_files([tmp_path / "none"], tmp_path / "out", SHOP)
    run("data", "convert", tmp_path / "a.tsv", "--schema", "criteo", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv"]


def test_an_out_within_an_input_folder_and_an_input_within_out_are_refused(tmp_path):
    write_schema(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.tsv").write_text(lines(0, 10))
    with pytest.raises(DataError, match="lies in the input folder"):
        convert_files([logs], logs / "parquet", SHOP)
    with pytest.raises(DataError, match="lies in the input folder"):
        convert_files([tmp_path / "logs" / ".." / "logs"], logs, SHOP)
    assert [path.name for path in logs.iterdir()] == ["a.tsv"]
    convert_files([logs / "a.tsv"], tmp_path / "out", SHOP)
    (part,) = (tmp_path / "out").glob("*.parquet")
    with pytest.raises(DataError, match=r"is an input, and lies in .*out"):
        convert_files([part], tmp_path / "out", SHOP, overwrite=True)
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(10)]


# ---- memory ----------------------------------------------------------------------------------------------------------

_PEAK = """
import resource, sys
from pipelines.data.convert import convert_files
from tpurec.features import Schema
convert_files([sys.argv[1]], sys.argv[2], Schema.load("criteo"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**32, (2_000, 26), np.uint32)
    block = "".join("1\t" + "3\t" * 13 + "\t".join(f"{value:08x}" for value in row) + "\n" for row in ids).encode()
    peaks = []
    for copies in (40, 240):  # 21 and 126 MB as text, small when packed
        path = tmp_path / f"{copies}.tsv.zst"
        with pa.output_stream(path, compression="zstd") as stream:
            for _ in range(copies):
                stream.write(block)
        command = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / f"out{copies}")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
        assert pq.ParquetFile(next((tmp_path / f"out{copies}").glob("*.parquet"))).metadata.num_rows == 2_000 * copies
    assert peaks[1] < peaks[0] + 60, peaks  # MiB
