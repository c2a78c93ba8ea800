"""A bundle gives back the model's scores, and nothing but a whole, unchanged bundle loads."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bundle.small import (
    small_model,
    small_recipe,
    small_rows,
    small_schema,
    small_table,
    write_pooled_bundle,
    write_small_bundle,
)
from tpurec.bundle import Bundle, BundleError, read_manifest, write_bundle
from tpurec.bundle.manifest import file_entry, sealed, version_of
from tpurec.errors import DataError
from tpurec.features import Schema, SparseFeature


@pytest.fixture
def copy(small_bundle, tmp_path):
    return shutil.copytree(small_bundle, tmp_path / "copy")


def _seal(folder):
    """Make the manifest's checksums fit changed files again, as someone who means to deceive would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        entry = file_entry(folder / name)
        manifest["files"][name] = {"bytes": entry.bytes, "sha256": entry.sha256}
    _write_manifest(folder, manifest)


def _write_manifest(folder, manifest):
    from tpurec.bundle.manifest import FileEntry

    manifest["version"] = version_of({name: FileEntry(**entry) for name, entry in manifest["files"].items()})
    (folder / "manifest.json").write_text(sealed(manifest))


# ---- scores --------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model_that_was_exported(small_bundle):
    """Case 36, bundle against the module that training evaluates: raw rows to scores by plain torch and TorchRec."""
    bundle, table = Bundle.load(small_bundle), small_table()
    columns = bundle.transformer(table, labels=False)
    from torchrec import KeyedJaggedTensor

    values, lengths, weights = [], [], []
    for feature in columns.sparse.values():
        values += feature.rows.tolist()
        lengths += feature.lengths.tolist()
        weights += [1.0] * len(feature.rows) if feature.weights is None else feature.weights.tolist()
    kjt = KeyedJaggedTensor(
        list(columns.sparse), torch.tensor(values), weights=torch.tensor(weights), lengths=torch.tensor(lengths)
    )
    with torch.no_grad():
        expected = torch.sigmoid(small_model(small_schema())(torch.from_numpy(columns.dense), kjt)).numpy()
    scores = bundle.score(table)
    assert scores.dtype == np.float32 and scores.shape == (len(table),)
    np.testing.assert_allclose(scores, expected, atol=1e-6, rtol=0)
    assert scores.std() > 0.1


def test_a_score_does_not_depend_on_the_rows_beside_it(small_bundle):
    bundle, table = Bundle.load(small_bundle), small_table(60)
    whole = bundle.score(table)
    alone = np.concatenate([bundle.score(table.slice(row, 1)) for row in range(60)])
    in_sevens = bundle.predict(bundle.transformer(table, labels=False), batch_rows=7)
    np.testing.assert_allclose(alone, whole, atol=1e-6, rtol=0)
    np.testing.assert_allclose(in_sevens, whole, atol=1e-6, rtol=0)
    assert bundle.score(table.take([3, 3, 1])).tolist() == pytest.approx([whole[3], whole[3], whole[1]], abs=1e-6)


def test_no_rows_give_no_scores(small_bundle):
    assert Bundle.load(small_bundle).score(small_table(0)).shape == (0,)


def test_columns_that_the_schema_does_not_name_have_no_effect(small_bundle):
    bundle, table = Bundle.load(small_bundle), small_table()
    more = table.append_column("other", pa.array(["x"] * len(table)))
    assert (bundle.score(more) == bundle.score(table)).all()
    shuffled = table.select(table.column_names[::-1])
    assert (bundle.score(shuffled) == bundle.score(table)).all()


def test_weighted_sum_of_two_ids_is_210(tmp_path):
    """Case 6: E[i] = [i, i, i, i], ids [1, 2], weights [10, 100]."""
    schema = Schema(
        name="weighted",
        sparse=(
            SparseFeature("f", num_embeddings=5, kind="integer", transform="identity", multi_valued=True, weights="w"),
        ),
    )
    example = {"f": [1, 2], "w": [10.0, 100.0], "pooled": 210.0}
    bundle = Bundle.load(write_pooled_bundle(tmp_path / "b", schema, 0.01, example))
    rows = [{"f": [1, 2], "w": [10.0, 100.0]}, {"f": [], "w": []}, {"f": [4], "w": [0.5]}]
    scores = bundle.score(pa.Table.from_pylist(rows, schema=schema.arrow_schema()))
    np.testing.assert_allclose(np.log(scores / (1 - scores)) * 100, [210, 0, 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["error", "skip", "hash"])
def test_an_id_without_a_row_follows_the_policy_and_is_counted(tmp_path, policy):
    """Case 7: num_embeddings itself, -1, 2^31, 2^33 and ids that would wrap onto a real row."""
    strange = [10, -1, 2**31, 2**33, 2**32 + 3, 2**63 - 1, -(2**63)]
    feature = SparseFeature("f", num_embeddings=10, kind="integer", transform="identity")
    schema = Schema(name="ids", sparse=(feature,), id_policy=policy)
    bundle = Bundle.load(write_pooled_bundle(tmp_path / "b", schema, 0.5, {"f": 3, "pooled": 3.0}))
    table = pa.table({"f": pa.array([3, *strange], pa.int64())})
    if policy == "error":
        with pytest.raises(DataError, match=r"row 1 .*'f'.*id 10 is out of range, num_embeddings is 10"):
            bundle.score(table)
        return
    columns = bundle.transformer(table, labels=False)
    assert columns.counts.tables["f"] == {"ids": 8, "out_of_range": 7}
    pooled = np.log(bundle.score(table).astype(np.float64) / (1 - bundle.score(table).astype(np.float64))) / 0.5
    assert pooled[0] == pytest.approx(3, abs=1e-3)
    if policy == "skip":
        np.testing.assert_allclose(pooled[1:], 0, atol=1e-6)
    else:
        rows = columns.sparse["f"].rows
        np.testing.assert_allclose(pooled, rows, atol=2e-3)
        assert len(set(rows[1:].tolist())) > 2  # hashed over the table, not clipped onto one row


# ---- writing -------------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_is_inside(small_bundle):
    manifest = read_manifest(small_bundle)
    assert len(manifest.version) == 16
    assert manifest.metrics == {"auc": 0.75, "calibration": None}
    assert manifest.source == {"step": 12, "epoch": 1}
    assert manifest.counts["tables"] == 4 and manifest.counts["table_rows"] == 88
    found = {str(path.relative_to(small_bundle)) for path in small_bundle.rglob("*") if path.is_file()}
    assert found == {*manifest.files, "manifest.json"}
    assert not any(path.suffix in (".pt", ".pkl", ".bin") for path in small_bundle.rglob("*"))


def test_equal_content_has_an_equal_version_and_other_weights_another(tmp_path, small_bundle):
    again = read_manifest(write_small_bundle(tmp_path / "again"))
    other = read_manifest(write_small_bundle(tmp_path / "other", seed=4))
    assert again.version == read_manifest(small_bundle).version
    assert other.version != again.version


def test_a_bundle_that_is_there_is_replaced_whole(tmp_path):
    path = write_small_bundle(tmp_path / "b")
    first = read_manifest(path).version
    write_small_bundle(path, seed=4)
    assert read_manifest(path).version != first
    Bundle.load(path).check_examples()
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("kind", ["file", "folder", "foreign manifest"])
def test_something_else_at_the_target_is_left_alone(tmp_path, kind):
    path = tmp_path / "b"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / ("manifest.json" if kind == "foreign manifest" else "notes.txt")).write_text('{"mine": 1}')
    with pytest.raises(BundleError, match=str(path)):
        write_small_bundle(path)
    assert (path.read_text() == "mine") if kind == "file" else len(list(path.iterdir())) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bundle, "check_examples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_small_bundle(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch):
    import safetensors

    def full(*_):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(BundleError, match=r"dense.safetensors: cannot be written: .*No space left"):
        write_small_bundle(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_scores_are_not_finite_is_not_exported(tmp_path):
    with pytest.raises(BundleError, match="2 of the model's scores for 3 example rows are not finite"):
        write_bundle(
            tmp_path / "b", model=small_model(small_schema()), schema=small_schema(), recipe_text=small_recipe(),
            examples=small_table(3), expected_scores=np.array([np.nan, 0.5, np.inf], np.float32), metrics={}, source={},
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_scores_that_training_does_not_share_stop_the_export(tmp_path):
    with pytest.raises(BundleError, match=r"row 0 scores .* here, 0\.123000 in training"):
        write_bundle(
            tmp_path / "b", model=small_model(small_schema()), schema=small_schema(), recipe_text=small_recipe(),
            examples=small_table(3), expected_scores=np.full(3, 0.123, np.float32), metrics={}, source={},
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_writing_builds_no_second_model(tmp_path, monkeypatch):
    """Beside a trained model there may be no room for its tables again."""
    import tpurec.models.build

    def refuse(*arguments, **more):
        raise AssertionError("a second model was built")

    monkeypatch.setattr(tpurec.models.build, "build_model", refuse)
    path = write_small_bundle(tmp_path / "b")
    with pytest.raises(AssertionError):
        Bundle.load(path)


def test_a_recipe_that_does_not_say_the_model_stops_the_export(tmp_path):
    with pytest.raises(BundleError, match=r"recipe\.toml \[model\]: unknown key 'nome'"):
        write_bundle(
            tmp_path / "b", model=small_model(small_schema()), schema=small_schema(), recipe_text="[model]\nnome='x'",
            examples=small_table(3), expected_scores=np.full(3, 0.123, np.float32), metrics={}, source={},
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_table_with_a_name_that_is_no_file_name_stays_inside_the_bundle(tmp_path):
    names = ["a/b", "..x", "Käse %2F", "a~2"]
    features = tuple(
        SparseFeature(f"f{i}", num_embeddings=4, kind="integer", transform="identity", table=name.replace(".", "_"))
        for i, name in enumerate(names)
    )
    schema = Schema(name="names", sparse=features)
    example = {"f0": 1, "f1": 2, "f2": 3, "f3": 0, "pooled": 1.0}
    path = write_pooled_bundle(tmp_path / "b", schema, 1.0, example)
    assert {entry.name for entry in tmp_path.iterdir()} == {"b"}
    assert len(list((path / "tables").iterdir())) == 4
    Bundle.load(path).check_examples()


# ---- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["schema.toml", "recipe.toml", "dense.safetensors", "examples.parquet", "tables/ad.safetensors"]
)
@pytest.mark.parametrize("damage", ["missing", "cut off", "one byte", "link", "folder"])
def test_a_damaged_file_is_named(copy, name, damage):
    path = copy / name
    content = path.read_bytes()
    path.unlink()
    if damage == "cut off":
        path.write_bytes(content[:-1])
    elif damage == "one byte":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "link":
        (copy / "elsewhere").write_bytes(content)
        path.symlink_to(copy / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(BundleError) as caught:
        Bundle.load(copy)
    assert str(path) in caught.value.problem and caught.value.remedy


def test_a_manifest_that_is_a_link_is_refused(copy):
    (copy / "manifest.json").rename(copy.parent / "elsewhere.json")
    (copy / "manifest.json").symlink_to(copy.parent / "elsewhere.json")
    with pytest.raises(BundleError, match=r"manifest.json: is a symbolic link"):
        Bundle.load(copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(format_version=3), "format version 3; this software reads versions 1 and 2"),
        (lambda m: m.update(format="zip"), "not the manifest of a tpurec bundle"),
        (lambda m: m.pop("tables"), "'tables' is missing"),
        (lambda m: m.update(surplus=1), "unknown key 'surplus'"),
        (lambda m: m["files"].pop("dense.safetensors"), "does not list dense.safetensors"),
        (lambda m: m["files"].pop("tables/ad.safetensors"), "does not list tables/ad.safetensors"),
        (lambda m: m["tables"].pop("ad"), "tables/ad.safetensors, which is no table's file"),
        (lambda m: m["files"]["schema.toml"].update(sha256="0" * 64), "does not fit the checksums"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0"}}), "'../x', which no bundle has"),
        (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": "0"}}), "'/etc/passwd', which no bundle"),
        (lambda m: m["files"].update({"tables/../../x.safetensors": {"bytes": 1, "sha256": "0"}}), "which no bundle"),
        (lambda m: m["files"].update({"tables/x.pt": {"bytes": 1, "sha256": "0"}}), "'tables/x.pt', which no bundle"),
    ],
)
def test_a_manifest_that_was_tampered_with_is_refused(copy, change, says):
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(sealed(manifest))
    with pytest.raises(BundleError) as caught:
        Bundle.load(copy)
    assert says in caught.value.problem


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["metrics"].update(auc=0.99),
        lambda m: m["source"].update(step=7),
        lambda m: m["tables"]["ad"].update(num_embeddings=51),
        lambda m: m.pop("manifest_sha256"),
    ],
)
def test_a_manifest_that_changed_after_the_export_is_refused_and_one_without_checksum_is_of_version_1(copy, change):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest))  # the same values, laid out otherwise
    Bundle.load(copy)
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"manifest\.json: its contents changed since it was written"):
        Bundle.load(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    path.write_text(json.dumps({**manifest, "format_version": 1}))
    if "manifest_sha256" not in manifest:
        Bundle.load(copy).check_examples()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff", "[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(copy, text):
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.load(copy)


def test_what_is_no_bundle_is_said_to_be_none(tmp_path):
    with pytest.raises(BundleError, match="no such folder"):
        Bundle.load(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"it has no manifest\.json"):
        Bundle.load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda weights: {"weight": weights["weight"][:-1].contiguous()},
            "float32 [49, 4], the model expects float32 [50, 4]",
        ),
        (lambda weights: {"weight": weights["weight"].double()}, "float64 [50, 4], the model expects float32 [50, 4]"),
        (lambda weights: {}, "has no weight 'weight'"),
        (lambda weights: {**weights, "more": torch.ones(1)}, "has a weight 'more'"),
    ],
)
def test_weights_that_do_not_fit_the_recipe_are_refused_even_with_fitting_checksums(copy, change, says):
    path = copy / "tables/ad.safetensors"
    save_file(change(load_file(path)), path)
    _seal(copy)
    with pytest.raises(BundleError) as caught:
        Bundle.load(copy)
    assert str(path) in caught.value.problem and says in caught.value.problem


def test_a_table_that_the_schema_does_not_know_is_refused(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tables"]["ad"]["key"] = "collection.embedding_bags.other.weight"
    _write_manifest(copy, manifest)
    with pytest.raises(BundleError, match=r"has no table .*embedding_bags\.ad\.weight"):
        Bundle.load(copy)


def test_a_table_of_another_size_than_the_schema_says_is_refused(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tables"]["ad"]["num_embeddings"] = 51
    _write_manifest(copy, manifest)
    with pytest.raises(BundleError, match=r"table 'ad' is float32 \[51, 4\], schema and recipe say float32 \[50, 4\]"):
        Bundle.load(copy)


def test_a_schema_that_transforms_otherwise_is_refused_even_with_fitting_checksums(copy):
    text = (copy / "schema.toml").read_text()
    (copy / "schema.toml").write_text(text.replace("mean = 30.0", "mean = 31.0"))
    assert text != (copy / "schema.toml").read_text()
    _seal(copy)
    with pytest.raises(BundleError, match=r"schema\.toml: fingerprint"):
        Bundle.load(copy)


def test_a_pickle_in_place_of_weights_is_never_unpickled(copy, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (copy / "dense.safetensors").write_bytes(pickle.dumps(Bomb()))
    _seal(copy)
    with pytest.raises(BundleError, match=r"dense\.safetensors: cannot be read"):
        Bundle.load(copy)
    assert not (tmp_path / "exploded").exists()


def test_examples_that_do_not_agree_are_found_by_the_self_check(copy):
    path = copy / "examples.parquet"
    table = pq.read_table(path)
    position = table.column_names.index("tpurec.expected_score")
    scores = table.column(position).to_numpy().copy()
    scores[2] += 1e-3
    pq.write_table(table.set_column(position, "tpurec.expected_score", pa.array(scores)), path)
    _seal(copy)
    with pytest.raises(BundleError, match="row 2 scores"):
        Bundle.load(copy).check_examples()


def test_the_self_check_passes_on_an_untouched_bundle(small_bundle):
    assert Bundle.load(small_bundle).check_examples() <= 1e-6


def test_loading_needs_no_training_data_recipe_paths_or_ray(small_bundle):
    code = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        f"from tpurec.bundle import Bundle; b = Bundle.load({str(small_bundle)!r}); b.check_examples()\n"
        "assert 'jax' not in sys.modules and 'torch_tpu' not in sys.modules\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr


def test_rows_of_a_request_and_rows_of_a_table_are_the_same_rows():
    assert small_table().to_pylist() == small_rows()
