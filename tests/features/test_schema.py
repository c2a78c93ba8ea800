"""The schema: it travels unchanged, and refuses what would give one id two rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpurec.errors import ConfigError, DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, TextInput, shipped_schemas

FULL = Schema(
    name="shop",
    label=LabelColumn("rating", threshold=4.0, missing=-1.0),
    dense=(DenseFeature("price"), DenseFeature("age", transform="standardize", mean=30.0, std=9.5, negative="blank")),
    sparse=(
        SparseFeature("item", 100, column="item_id", kind="integer", salt=2**64 - 1),
        SparseFeature(
            "basket", 100, kind="integer", salt=2**64 - 1, table="item", multi_valued=True, separator="|", weights="w"
        ),
        SparseFeature("genre", 8, transform="vocabulary", vocabulary=("é", "b"), id_policy="hash"),
        SparseFeature("shelf", 8, kind="integer", transform="vocabulary", vocabulary=(5, -7)),
    ),
    id_policy="skip",
    keys=("request_id",),
    input=TextInput(("rating", "price"), header=False, delimiter=";", short_rows="blank", min_fields=1),
)


def test_text_and_parquet_metadata_bring_back_an_equal_schema(tmp_path):
    assert Schema.from_text(FULL.to_text()) == FULL
    arrow = FULL.arrow_schema()
    pq.write_table(arrow.empty_table(), tmp_path / "part-0.parquet")
    assert Schema.from_parquet(tmp_path) == FULL
    assert Schema.from_parquet(tmp_path / "part-0.parquet") == FULL


def test_metadata_of_others_is_kept():
    arrow = FULL.with_metadata(pa.schema([("a", pa.int8())], metadata={"pandas": "x"}))
    assert arrow.metadata[b"pandas"] == b"x" and Schema.from_arrow(arrow, "f") == FULL


def test_a_parquet_file_without_schema_is_named_with_the_remedy(tmp_path):
    file = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(DataError, match=r"plain\.parquet.*no tpurec schema.*tpurec data convert"):
        Schema.from_parquet(file)
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"text\.parquet: not a Parquet file"):
        Schema.from_parquet(tmp_path / "text.parquet")
    with pytest.raises(DataError, match="no such file"):
        Schema.from_parquet(tmp_path / "absent.parquet")
    pq.write_table(FULL.arrow_schema().empty_table(), file)
    data = file.read_bytes()
    root = data.index(b"ARROW:schema") + 26  # where Arrow's own schema, in base64, says that it begins
    file.write_bytes(data[:root] + b"/////" + data[root + 5 :])
    with pytest.raises(DataError, match=r"not a Parquet file: Invalid flatbuffers"):
        Schema.from_parquet(file)


def test_storage_types():
    arrow = FULL.arrow_schema()
    assert arrow.names == ["rating", "price", "age", "item_id", "basket", "w", "genre", "shelf"]
    assert arrow.field("price").type == pa.float32()
    assert arrow.field("basket").type == pa.list_(pa.int64())
    assert arrow.field("w").type == pa.list_(pa.float32())
    assert arrow.field("genre").type == pa.string()
    assert "rating" not in FULL.arrow_schema(labels=False).names
    assert FULL.columns(labels=False, keys=True)[-1] == "request_id"


def test_criteo_ships_by_name():
    schema = Schema.load("criteo")
    assert "criteo" in shipped_schemas()
    assert [f.name for f in schema.dense] == [f"I{i}" for i in range(1, 14)]
    assert [f.name for f in schema.sparse] == [f"C{i}" for i in range(1, 27)]
    assert all(f.kind == "hex" for f in schema.sparse)
    assert list(schema.input.columns) == schema.columns()
    with pytest.raises(ConfigError, match=r"critoe: no such schema file.*criteo"):
        Schema.load("critoe")


def test_features_that_share_a_table_must_agree():
    assert FULL.tables == {"item": 100, "genre": 8, "shelf": 8}
    for change in ({"num_embeddings": 7}, {"kind": "text"}, {"salt": 1}):
        features = (
            SparseFeature("a", 9, kind="hex"),
            SparseFeature("b", **{"num_embeddings": 9, "kind": "hex", **change}, table="a"),
        )
        with pytest.raises(ValueError, match=rf"'a' and 'b' share table 'a' but differ in {next(iter(change))}"):
            Schema("s", sparse=features)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[[sparse]]\nname='a'\nnum_embeddings=0", "num_embeddings of sparse feature 'a' is 0"),
        ("[[sparse]]\nname='a'\nnum_embeddings=2147483648", "from 1 to 2147483647"),
        ("[[sparse]]\nname='a'\nnum_embeddings=5\ntransform='identity'", "identity.*needs kind"),
        ("[[sparse]]\nname='a'\nnum_embeddings=5\nseparator='|'", "multi_valued = true"),
        ("[[sparse]]\nname='a'\nnum_embeddings=5\ntransform='vocabulary'", "non-empty vocabulary"),
        ("[[sparse]]\nname='a'\nnum_embeddings=1\ntransform='vocabulary'\nvocabulary=['x','y']", "2 entries"),
        ("[[sparse]]\nname='a'\nnum_embeddings=4\ntransform='vocabulary'\nvocabulary=['x','x']", "an entry twice"),
        (
            "[[sparse]]\nname='a'\nnum_embeddings=4\nkind='integer'\ntransform='vocabulary'\nvocabulary=['x']",
            "'x' must be a number",
        ),
        ("[[sparse]]\nname='a'\nnum_embeddings=4\nsalt=-1", "salt"),
        ("[[sparse]]\nname='a'\nnum_embedings=4", "num_embeddings"),
        ("[[dense]]\nname='a'\n[[sparse]]\nname='a'\nnum_embeddings=4", "feature 'a' is there twice"),
        ("[[dense]]\nname='a'\nstd=0.0\ntransform='standardize'", "std"),
        ("[[dense]]\nname='a'\nmean=2.0", "belong to transform"),
        ("id_policy='drop'\n[[dense]]\nname='a'", "id_policy"),
        (
            "[[dense]]\nname='a'\n[[sparse]]\nname='b'\ncolumn='a'\nnum_embeddings=4",
            "column 'a' cannot be number .*and text",
        ),
        (
            "[[sparse]]\nname='a'\nnum_embeddings=4\nmulti_valued=true\n[[sparse]]\nname='b'\ncolumn='a'\nnum_embeddings=4",
            "column 'a' cannot be list of text .*and text",
        ),
        ("[[sparse]]\nname='a'\nnum_embeddings=4\nweights='a'", "column 'a' cannot be text .*and weight"),
        ("version=2\n[[dense]]\nname='a'", "version 2"),
        ("", "no feature"),
        ("[[dense]]\nname=", "not valid TOML"),
        (
            "id_policy='hash'\n[[sparse]]\nname='a'\nnum_embeddings=1\ntransform='vocabulary'\nvocabulary=['x']",
            "raise num_embeddings",
        ),
    ],
)
def test_bad_schemas_are_refused_with_the_key(toml, message):
    with pytest.raises(ConfigError, match=message):
        Schema.from_text(f"name = 's'\n{toml}")


def test_the_recipe_policy_overrides_schema_and_features():
    changed = FULL.with_id_policy("error")
    assert {changed.policy_of(feature) for feature in changed.sparse} == {"error"}
    assert FULL.with_id_policy(None) is FULL
    with pytest.raises(ConfigError, match="Use error, skip or hash"):
        FULL.with_id_policy("drop")


def test_the_fingerprint_follows_the_numbers_and_nothing_else():
    import dataclasses

    same = dataclasses.replace(FULL, name="other", keys=(), input=TextInput())
    assert same.fingerprint() == FULL.fingerprint() and len(FULL.fingerprint()) == 16
    assert FULL.with_id_policy("error").fingerprint() != FULL.fingerprint()
    salted = dataclasses.replace(FULL, sparse=FULL.sparse[:1])
    assert salted.fingerprint() != FULL.fingerprint()


def test_a_vocabulary_file_is_read_into_the_schema(tmp_path):
    (tmp_path / "v.json").write_text('["x", "y"]')
    (tmp_path / "s.toml").write_text(
        "name='s'\n[[sparse]]\nname='a'\nnum_embeddings=4\ntransform='vocabulary'\nvocabulary='v.json'\n"
    )
    schema = Schema.load(tmp_path / "s.toml")
    assert schema.sparse[0].vocabulary == ("x", "y")
    assert Schema.from_text(schema.to_text()) == schema
    (tmp_path / "v.json").unlink()
    with pytest.raises(ConfigError, match=r"v\.json: no such vocabulary file"):
        Schema.load(tmp_path / "s.toml")
