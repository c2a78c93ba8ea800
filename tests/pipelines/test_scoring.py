"""`tpurec score`: every row once, in order, with the bundle's score; bad input is said before work is lost."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import score_inputs, scoring
from pipelines.data import parquet_rows
from pipelines.scoring import score_files
from tests.bundle.small import small_table, write_pooled_bundle, write_small_bundle
from tpurec.bundle import Bundle, BundleError
from tpurec.errors import ConfigError, DataError, MissingExtra
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, TextInput
from tpurec.reporting import Reporter


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_small_bundle(tmp_path_factory.mktemp("scoring") / "bundle")


@pytest.fixture(scope="module")
def strict_bundle(tmp_path_factory):
    """Its id policy is `error`."""
    return write_small_bundle(tmp_path_factory.mktemp("scoring") / "strict", id_policy="error")


def run(bundle, places, out, **options):
    return score_files(bundle, [str(place) for place in places], out, reporter=Reporter(), **options)


def changed(table, column, values, type_=None):
    position = table.column_names.index(column)
    return table.set_column(position, column, pa.array(values, type_))


def test_every_row_gets_the_bundles_score_beside_the_schemas_keys_in_order(bundle, tmp_path):
    table = small_table(250)
    pq.write_table(table.slice(0, 100), tmp_path / "b.parquet", row_group_size=30)
    pq.write_table(table.slice(100, 150), tmp_path / "a.parquet", row_group_size=1000)
    result = run(bundle, [tmp_path / "b.parquet", tmp_path / "a.parquet"], tmp_path / "scores.parquet")
    written = pq.read_table(tmp_path / "scores.parquet")
    assert written.column_names == ["request", "score"]
    assert written.column("request").to_pylist() == table.column("request").to_pylist()
    loaded = Bundle.load(bundle)
    np.testing.assert_allclose(written.column("score").to_numpy(), loaded.score(table), atol=1e-6, rtol=0)
    assert (result["rows"], result["bad_rows"], result["engine"]) == (250, 0, "local")
    assert result["path"] == str(tmp_path / "scores.parquet") and result["rows_per_second"] > 0
    assert written.schema.metadata[b"tpurec.model"].decode() == result["model"] == loaded.version


def test_a_folder_is_read_by_name_and_pieces_are_bounded(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_rows.read_parquet, "__defaults__", (None, 7))
    seen = []
    predict = Bundle.predict
    monkeypatch.setattr(Bundle, "predict", lambda self, columns: (seen.append(len(columns)), predict(self, columns))[1])
    table = small_table(60)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    pq.write_table(table.slice(40), tmp_path / "in" / "z.parquet")
    pq.write_table(table.slice(0, 40), tmp_path / "in" / "deep" / "a.parquet")
    run(bundle, [tmp_path / "in"], tmp_path / "scores.parquet")
    written = pq.read_table(tmp_path / "scores.parquet")
    assert written.column("request").to_pylist() == table.column("request").to_pylist()
    assert max(seen) == 7


@pytest.mark.parametrize(
    ("keys", "expected"), [(["slot", "request"], ["slot", "request", "score"]), ([], ["row", "score"])]
)
def test_key_columns_are_chosen_and_without_any_rows_are_numbered(bundle, tmp_path, keys, expected):
    table = small_table(20)
    pq.write_table(table.slice(0, 9), tmp_path / "a.parquet")
    pq.write_table(table.slice(9), tmp_path / "b.parquet")
    run(bundle, [tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "scores.parquet", keys=keys)
    written = pq.read_table(tmp_path / "scores.parquet")
    assert written.column_names == expected
    if keys:
        assert written.column("slot").equals(table.column("slot"))
    else:
        assert written.column("row").to_pylist() == list(range(20))


def test_a_key_that_is_also_a_text_feature_keeps_its_type(bundle, tmp_path):
    pq.write_table(small_table(5), tmp_path / "a.parquet")
    run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", keys=["ad"])
    written = pq.read_table(tmp_path / "scores.parquet")
    assert written.column("ad").equals(small_table(5).column("ad"))


@pytest.mark.parametrize("groups", [0, 1])
def test_no_rows_give_a_file_without_rows(bundle, tmp_path, groups):
    table = small_table(0)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for _ in range(groups):
            writer.write_table(table)
    assert run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")["rows"] == 0
    written = pq.read_table(tmp_path / "scores.parquet")
    assert written.column_names == ["request", "score"] and len(written) == 0


def test_weighted_sum_of_two_ids_is_210_offline(tmp_path):
    """Case 6."""
    feature = SparseFeature("f", num_embeddings=5, kind="integer", transform="identity", multi_valued=True, weights="w")
    schema = Schema(name="weighted", sparse=(feature,))
    example = {"f": [1, 2], "w": [10.0, 100.0], "pooled": 210.0}
    bundle = write_pooled_bundle(tmp_path / "b", schema, 0.01, example)
    rows = [{"f": [1, 2], "w": [10.0, 100.0]}, {"f": None, "w": None}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.arrow_schema()), tmp_path / "a.parquet")
    run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet").column("score").to_numpy()
    np.testing.assert_allclose(np.log(scores / (1 - scores)) * 100, [210, 0], rtol=1e-4, atol=1e-4)


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def never_scored(monkeypatch):
    """Fails the test if a row of the inputs is scored (the bundle's own examples, 5 rows, may be)."""
    predict = Bundle.predict

    def watch(self, columns):
        assert len(columns) == 5, "rows were scored before the inputs had been checked"
        return predict(self, columns)

    monkeypatch.setattr(Bundle, "predict", watch)


def test_a_file_that_lacks_a_column_is_named_before_any_work(bundle, tmp_path, never_scored):
    """Case 29."""
    pq.write_table(small_table(30), tmp_path / "a.parquet")
    pq.write_table(small_table(30).drop_columns(["slot"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: no column 'slot'"):
        run(bundle, [tmp_path], tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()


@pytest.mark.parametrize(
    ("column", "values", "type_"),
    [
        ("slot", [[1]] * 30, pa.list_(pa.int64())),  # case 35: a list where a scalar is expected
        ("tags", [1] * 30, pa.int64()),  # case 35: a scalar where a list is
        ("price", [True] * 29 + [None], pa.list_(pa.float32())),
        ("ad", [1.5] * 30, pa.float64()),
    ],
)
def test_a_column_of_another_type_is_named_before_any_work(bundle, tmp_path, never_scored, column, values, type_):
    """Cases 29 and 35."""
    if type_ == pa.list_(pa.float32()):
        values = [[1.0]] * 30
    pq.write_table(small_table(30), tmp_path / "a.parquet")
    pq.write_table(changed(small_table(30), column, values, type_), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=rf"b\.parquet: column '{column}'"):
        run(bundle, [tmp_path], tmp_path / "scores.parquet")


def test_a_key_column_that_is_absent_or_of_two_types_is_named_before_any_work(bundle, tmp_path, never_scored):
    pq.write_table(small_table(30), tmp_path / "a.parquet")
    pq.write_table(changed(small_table(30), "request", range(30), pa.int64()), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: key column 'request' is int64, in .*a\.parquet it is string"):
        run(bundle, [tmp_path], tmp_path / "scores.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'nothing'"):
        run(bundle, [tmp_path], tmp_path / "scores.parquet", keys=["nothing"])
    with pytest.raises(ConfigError, match="'score' has the name of the scores"):
        run(bundle, [tmp_path], tmp_path / "scores.parquet", keys=["score"])


def test_what_is_not_there_or_not_parquet_is_named(bundle, tmp_path):
    with pytest.raises(DataError, match=r"absent\.parquet: no such file"):
        run(bundle, [tmp_path / "absent.parquet"], tmp_path / "scores.parquet")
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        run(bundle, [tmp_path / "empty"], tmp_path / "scores.parquet")


def _with_bad_rows(path):
    """Rows 3 and 41 have ids without a row, row 12 has one weight too few, row 41 is bad twice."""
    table = small_table(60)
    slots = table.column("slot").to_pylist()
    slots[3], slots[41] = 2**33, -1
    weights = table.column("tag_weights").to_pylist()
    tags = table.column("tags").to_pylist()
    tags[12], weights[12] = [1, 2], [1.0]
    tags[41], weights[41] = [1, 2], [1.0]
    table = changed(table, "slot", slots, pa.int64())
    table = changed(table, "tags", tags, pa.list_(pa.int64()))
    table = changed(table, "tag_weights", weights, pa.list_(pa.float32()))
    pq.write_table(table, path, row_group_size=25)


def test_a_row_that_the_schema_refuses_ends_the_job_with_file_and_row(strict_bundle, tmp_path):
    _with_bad_rows(tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        run(strict_bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")
    assert "a.parquet: row 3 (from 0): column 'slot': " in caught.value.problem
    assert "id 8589934592 is out of range, num_embeddings is 10" in caught.value.problem
    assert "--on-bad-row null" in caught.value.remedy
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_on_request_such_rows_get_a_null_and_all_others_their_score(strict_bundle, tmp_path):
    _with_bad_rows(tmp_path / "a.parquet")
    result = run(strict_bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", rule="null")
    written = pq.read_table(tmp_path / "scores.parquet")
    assert result["rows"] == len(written) == 60 and result["bad_rows"] == 3
    scores = written.column("score").to_pylist()
    assert [row for row, score in enumerate(scores) if score is None] == [3, 12, 41]
    expected = Bundle.load(strict_bundle).score(small_table(60))
    good = [row for row in range(60) if row not in (3, 12, 41)]
    np.testing.assert_allclose([scores[row] for row in good], expected[good], atol=1e-6, rtol=0)
    assert written.column("request").to_pylist() == small_table(60).column("request").to_pylist()
    assert any("3 of 60 rows were refused" in warning and "row 3 (from 0)" in warning for warning in result["warnings"])


@pytest.mark.parametrize("policy", ["skip", "hash"])
def test_ids_without_a_row_follow_the_policy_and_are_counted(tmp_path, policy):
    """Case 7: the same as the bundle, which is the same as serving."""
    bundle = write_small_bundle(tmp_path / "bundle", id_policy=policy)
    table = changed(small_table(5), "slot", [10, -1, 2**31, 2**33, 2**32 + 3], pa.int64())
    pq.write_table(table, tmp_path / "a.parquet")
    result = run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")
    written = pq.read_table(tmp_path / "scores.parquet").column("score").to_numpy()
    np.testing.assert_allclose(written, Bundle.load(bundle).score(table), atol=1e-6, rtol=0)
    if policy == "skip":
        blank = changed(table, "slot", [None] * 5, pa.int64())
        np.testing.assert_allclose(written, Bundle.load(bundle).score(blank), atol=1e-6, rtol=0)
    assert result["ids"]["slot"] == {"ids": 5, "out_of_range": 5}
    assert any("'slot'" in warning and "5 out_of_range" in warning for warning in result["warnings"])


# ---- text ----------------------------------------------------------------------------------------------------------

TEXT_SCHEMA = Schema(
    name="text",
    label=LabelColumn("label"),
    dense=(DenseFeature("price"),),
    sparse=(
        SparseFeature("ad", num_embeddings=50, kind="hex"),
        SparseFeature("slot", num_embeddings=10, kind="integer", transform="identity"),
        SparseFeature(
            "tags",
            num_embeddings=20,
            kind="integer",
            transform="identity",
            multi_valued=True,
            separator="|",
            weights="w",
        ),
    ),
    input=TextInput(columns=("label", "price", "slot", "tags", "w", "ad"), short_rows="blank", min_fields=4),
)


def text_rows(count=40):
    """Rows with the label, as text fields; blanks are empty."""
    rows = []
    for number in range(count):
        tags = [str((number * 3 + k) % 20) for k in range(number % 4)]
        weights = [str(0.25 * (k + 1)) for k in range(number % 4)]
        rows.append(
            {
                "label": str(number % 2),
                "price": "" if number % 5 == 2 else str(number / 4),
                "slot": str(number % 10),
                "tags": "|".join(tags),
                "w": "|".join(weights),
                "ad": "" if number % 9 == 4 else f"{number * 7919:08x}",
            }
        )
    return rows


def typed_table(rows):
    """The same rows as training Parquet has them."""
    plain = [
        {
            "price": float(row["price"]) if row["price"] else None,
            "slot": int(row["slot"]),
            "tags": [int(tag) for tag in row["tags"].split("|") if tag],
            "w": [float(weight) for weight in row["w"].split("|") if weight],
            "ad": row["ad"] or None,
        }
        for row in rows
    ]
    return pa.Table.from_pylist(plain, schema=TEXT_SCHEMA.arrow_schema(labels=False))


def lines(rows, columns=TEXT_SCHEMA.input.columns, delimiter="\t"):
    return "".join(delimiter.join(row[name] for name in columns) + "\n" for row in rows)


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("scoring") / "text"
    return write_small_bundle(path, schema=TEXT_SCHEMA, examples=typed_table(text_rows(6)))


def _compressed(path, text):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(text.encode(), codec="zstd", asbytes=True))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["day.tsv", "day.tsv.gz", "day.tsv.zst", "day.csv", "day.csv.gz"])
def test_text_has_the_scores_of_the_same_rows_as_parquet(text_bundle, tmp_path, name):
    rows = text_rows()
    if ".csv" in name:
        columns = ("ad", "label", "w", "tags", "slot", "price")
        text = ",".join(columns) + "\n" + lines(rows, columns, ",")
    else:
        text = lines(rows)
    path = _compressed(tmp_path / name, text)
    result = run(text_bundle, [path], tmp_path / "scores.parquet", keys=["slot", "label"])
    written = pq.read_table(tmp_path / "scores.parquet")
    assert result["rows"] == 40 and result["bad_rows"] == 0
    assert written.column("slot").to_pylist() == [row["slot"] for row in rows]
    expected = Bundle.load(text_bundle).score(typed_table(rows))
    np.testing.assert_allclose(written.column("score").to_numpy(), expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.05


def test_ranges_of_a_text_file_join_without_a_seam(text_bundle, tmp_path, monkeypatch):
    rows = text_rows()
    (tmp_path / "a.tsv").write_text(lines(rows))
    whole = run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "whole.parquet")
    monkeypatch.setattr(score_inputs, "RANGE_BYTES", 100)
    cut = run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "cut.parquet")
    one, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "cut"))
    assert len(score_inputs.open_inputs([str(tmp_path / "a.tsv")], TEXT_SCHEMA, []).parts) > 5
    assert one.column("row").equals(other.column("row")) and whole["rows"] == cut["rows"] == 40
    np.testing.assert_allclose(one.column("score").to_numpy(), other.column("score").to_numpy(), atol=1e-6, rtol=0)


def test_text_without_the_label_is_scored_on_request_and_refused_otherwise(text_bundle, tmp_path):
    rows = text_rows()
    columns = TEXT_SCHEMA.input.columns[1:]
    (tmp_path / "a.tsv").write_text(lines(rows, columns))
    with pytest.raises(DataError, match=r"a\.tsv: line \d+"):  # its fields stand one to the left
        run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "scores.parquet")
    run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "scores.parquet", unlabelled=True)
    written = pq.read_table(tmp_path / "scores.parquet").column("score").to_numpy()
    expected = Bundle.load(text_bundle).score(typed_table(rows))
    np.testing.assert_allclose(written, expected, atol=1e-6, rtol=0)


def test_a_schema_without_text_columns_has_no_label_to_leave_out(bundle, tmp_path):
    pq.write_table(small_table(3), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="--unlabelled"):
        run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", unlabelled=True)


def test_lines_that_cannot_be_read_keep_their_place(text_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(score_inputs, "RANGE_BYTES", 300)
    rows = text_rows()
    broken = lines(rows).splitlines(keepends=True)
    broken[5] = "1\t2\n"  # too few fields
    broken[21] = broken[21].replace("\n", "\tmore\tand more\n")  # too many
    broken[30] = lines([{**rows[30], "slot": "seven"}])  # no number
    broken[33] = "\n"  # no line
    (tmp_path / "a.tsv").write_text("".join(broken))
    with pytest.raises(DataError) as caught:
        run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "scores.parquet")
    assert "a.tsv: line 6: 2 fields, 6 expected" in caught.value.problem
    result = run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "scores.parquet", rule="null", keys=["ad"])
    written = pq.read_table(tmp_path / "scores.parquet")
    scores = written.column("score").to_pylist()
    assert [row for row, score in enumerate(scores) if score is None] == [5, 21, 30, 33]
    assert result["rows"] == 40 and result["bad_rows"] == 4
    expected = Bundle.load(text_bundle).score(typed_table(rows))
    good = [row for row in range(40) if row not in (5, 21, 30, 33)]
    np.testing.assert_allclose([scores[row] for row in good], expected[good], atol=1e-6, rtol=0)
    assert [written.column("ad")[row].as_py() for row in good] == [rows[row]["ad"] or None for row in good]


def test_a_line_far_into_a_file_is_named_by_its_line(text_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(score_inputs, "RANGE_BYTES", 100)
    broken = lines(text_rows()).splitlines(keepends=True)
    broken[34] = "1\t2\n"
    (tmp_path / "a.tsv").write_text("".join(broken))
    with pytest.raises(DataError, match=r"a\.tsv: line 35: 2 fields"):
        run(text_bundle, [tmp_path / "a.tsv"], tmp_path / "scores.parquet")


def test_a_compressed_file_that_was_cut_short_is_an_error_and_leaves_nothing(text_bundle, tmp_path):
    path = _compressed(tmp_path / "a.tsv.gz", lines(text_rows()))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"a\.tsv\.gz: cannot be read to its end"):
        run(text_bundle, [path], tmp_path / "scores.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tsv.gz"]


def test_a_csv_that_lacks_a_column_is_named_before_any_work(text_bundle, tmp_path):
    """Case 29."""
    columns = ("label", "price", "tags", "w", "ad")
    (tmp_path / "a.csv").write_text(",".join(columns) + "\n" + lines(text_rows(), columns, ","))
    with pytest.raises(DataError, match=r"a\.csv: no column 'slot'"):
        run(text_bundle, [tmp_path / "a.csv"], tmp_path / "scores.parquet")


def test_real_criteo_rows_are_scored_by_the_stated_rule(shared_data, tmp_path):
    """Case 30: short rows are padded with blanks; every line has a score, and the CSV with a header as well."""
    schema = Schema.load("criteo")
    examples = pa.Table.from_pylist([{"I1": 1.0, "C1": "68fd1e64"}, {}], schema=schema.arrow_schema(labels=False))
    bundle = write_small_bundle(tmp_path / "bundle", schema=schema, examples=examples)
    result = run(bundle, [shared_data / "criteo_raw_1000.tsv"], tmp_path / "raw.parquet")
    scores = pq.read_table(tmp_path / "raw.parquet").column("score")
    assert result["rows"] == 1000 and result["bad_rows"] == scores.null_count == 0
    sample = run(bundle, [shared_data / "criteo_sample_200.csv"], tmp_path / "sample.parquet", rule="null")
    assert sample["rows"] == 200


# ---- the output ----------------------------------------------------------------------------------------------------


def test_what_is_there_is_kept_unless_it_may_be_replaced(bundle, tmp_path):
    pq.write_table(small_table(5), tmp_path / "a.parquet")
    out = tmp_path / "scores.parquet"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists") as caught:
        run(bundle, [tmp_path / "a.parquet"], out)
    assert "--overwrite" in caught.value.remedy and out.read_text() == "mine"
    run(bundle, [tmp_path / "a.parquet"], out, overwrite=True)
    assert len(pq.read_table(out)) == 5
    with pytest.raises(ConfigError, match="is one of the inputs"):
        run(bundle, [tmp_path / "a.parquet"], tmp_path / "a.parquet", overwrite=True)
    with pytest.raises(ConfigError, match="is a folder"):
        run(bundle, [tmp_path / "a.parquet"], tmp_path, overwrite=True)
    for name in ("manifest.json", "examples.parquet", "tables/x.parquet"):
        with pytest.raises(ConfigError, match="is inside the bundle"):
            run(bundle, [tmp_path / "a.parquet"], bundle / name, overwrite=True)
    assert len(pq.read_table(tmp_path / "a.parquet")) == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
def test_an_interruption_leaves_the_old_scores_and_nothing_else(bundle, tmp_path, monkeypatch, error):
    monkeypatch.setattr(parquet_rows.read_parquet, "__defaults__", (None, 10))
    pq.write_table(small_table(50), tmp_path / "a.parquet")
    out = tmp_path / "scores.parquet"
    out.write_text("old")
    predict, calls = Bundle.predict, []

    def interrupted(self, columns):
        calls.append(1)
        if len(calls) == 4:  # the first call is for the bundle's own examples
            raise error("stop")
        return predict(self, columns)

    monkeypatch.setattr(Bundle, "predict", interrupted)
    with pytest.raises(error):
        run(bundle, [tmp_path / "a.parquet"], out, overwrite=True)
    assert out.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.parquet", "scores.parquet"]


def test_a_bundle_that_does_not_score_its_examples_scores_nothing(bundle, tmp_path, monkeypatch):
    pq.write_table(small_table(30), tmp_path / "a.parquet")
    predict = Bundle.predict
    monkeypatch.setattr(Bundle, "predict", lambda self, columns: predict(self, columns) * np.float32(0.99))
    with pytest.raises(BundleError, match="in training"):
        run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")


# ---- the command ---------------------------------------------------------------------------------------------------


def _command(*words):
    child = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", "score", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return child.returncode, child.stdout, child.stderr


@pytest.mark.multiprocess
def test_the_command_prints_one_object(bundle, tmp_path):
    pq.write_table(small_table(30), tmp_path / "a.parquet")
    code, out, err = _command(
        bundle, tmp_path / "a.parquet", tmp_path / "scores.parquet", "--keys", "slot,ad", "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert {"rows", "rows_per_second", "path"} <= set(result) and result["rows"] == 30
    assert pq.read_table(result["path"]).column_names == ["slot", "ad", "score"]


def test_too_few_words_are_wrong_usage(bundle):
    assert _command(bundle, "only-one")[0] == 2
    assert _command(bundle, "in", "out", "--engine", "spark")[0] == 2


# ---- Ray -----------------------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_ray_writes_the_same_file(strict_bundle, tmp_path):
    _with_bad_rows(tmp_path / "a.parquet")
    pq.write_table(small_table(500, seed=4), tmp_path / "b.parquet", row_group_size=60)
    pq.write_table(small_table(0), tmp_path / "c.parquet")
    places = [tmp_path / name for name in ("b.parquet", "a.parquet", "c.parquet")]
    local = run(strict_bundle, places, tmp_path / "local.parquet", rule="null", engine="local")
    ray = run(strict_bundle, places, tmp_path / "ray.parquet", rule="null", engine="ray")
    one, other = pq.read_table(tmp_path / "local.parquet"), pq.read_table(tmp_path / "ray.parquet")
    assert one.schema.equals(other.schema, check_metadata=True)
    assert one.column("request").equals(other.column("request"))
    scores = [table.column("score").to_numpy() for table in (one, other)]
    np.testing.assert_allclose(*scores, atol=1e-6, rtol=0)  # NaN where null, in the same places
    assert one.column("score").null_count == 3
    for key in ("rows", "bad_rows", "ids", "model", "warnings"):
        assert ray[key] == local[key], key
    assert ray["engine"] == "ray"


@pytest.mark.ray
def test_a_bad_row_met_by_ray_ends_the_job_as_it_does_without(strict_bundle, tmp_path):
    _with_bad_rows(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: row 3 \(from 0\): column 'slot'"):
        run(strict_bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", engine="ray")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_without_ray_its_engine_names_the_extra_and_leaves_nothing(bundle, tmp_path, monkeypatch):
    """Case 37."""
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    pq.write_table(small_table(5), tmp_path / "a.parquet")
    with pytest.raises(MissingExtra, match="--engine ray needs 'ray'") as caught:
        run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", engine="ray")
    assert "pip install 'tpurec[ray]'" in caught.value.remedy
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_auto_takes_ray_only_for_much_data(bundle, tmp_path, monkeypatch):
    import pipelines.scoring_ray

    pq.write_table(small_table(30), tmp_path / "a.parquet")
    monkeypatch.setattr(pipelines.scoring_ray, "score_ray", lambda *arguments: (piece for piece in ()))
    monkeypatch.setattr(scoring, "RAY_BYTES", 1)
    assert run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet")["engine"] == "ray"
    monkeypatch.setattr(scoring, "find_spec", lambda name: None)
    again = run(bundle, [tmp_path / "a.parquet"], tmp_path / "scores.parquet", overwrite=True)
    assert again["engine"] == "local" and again["rows"] == 30
