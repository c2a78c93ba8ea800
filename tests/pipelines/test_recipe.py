"""Recipes: everything resolved, nothing unknown, bad values named with what to do."""

import re
import tomllib
from dataclasses import MISSING
from pathlib import Path

import pytest

from pipelines.recipe import read_recipe
from tpurec.config import to_toml
from tpurec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_a_resolved_recipe_reads_back_to_itself(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file, ["tables.overrides.user.pooling=mean", "train.optimizer=adagrad"])
    assert recipe.tables.overrides["user"].pooling == "mean"
    assert recipe.train.optimizer == "adagrad"
    assert recipe.model.over_hidden_sizes == [16]
    again = tmp_path / "resolved.toml"
    again.write_text(to_toml(recipe))
    assert read_recipe(again) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=3", r"unknown key 'train\.batchsize'\. Did you mean 'batch_size'"),
        ("trian.batch_size=3", r"unknown key 'trian'\. Did you mean 'train'"),
        ("train.optimizer=lion", r"train\.optimizer = 'lion': Input should be 'adam', 'adagrad' or 'sgd'"),
        ("train.batch_size=0", r"batch_size = 0: must be 1 or more"),
        ("train.learning_rate=nan", r"learning_rate = nan: must be above 0"),
        ("train.patience=-1", r"patience = -1: must not be negative"),
        ("train.final_factor=2", r"final_factor = 2\.0: must lie between 0 and 1"),
        ("data.validation_share=1.0", r"validation_share = 1\.0"),
        ("data.id_policy=drop", r"data\.id_policy = 'drop'"),
        ("data.reader_workers=0", r"reader_workers must be 1 or more"),
        ("tables.optimizer=lamb", r"tables\.optimizer = 'lamb'"),
        ("tables.overrides.user.dim=3", r"unknown key 'tables\.overrides\.user\.dim'"),
        ("model.name=dlrm3", r"no model 'dlrm3'; choose dlrm, dlrm_dcn, deepfm"),
        ("device.kind=cuda", r"device\.kind = 'cuda'"),
        ("device.threads=-1", r"threads = -1"),
        ("device.threads=1000000", r"threads = 1000000"),  # torch would end the process
        ("train.seed=99999999999999999999", r"seed = 99999999999999999999"),
        ("train.epochs=true", r"train.epochs = True"),
        ('train.batch_size="64"', r"train.batch_size = '64'"),
        ("sharding.num_workers=-1", r"num_workers = -1: must be 0 \(no sharding\), 1 or more"),
        ("sharding.slice=v6e-17", r"slice = 'v6e-17'"),
        ("sharding.wire_dtype=int8", r"sharding\.wire_dtype = 'int8'"),
        ("sharding.constraints.user.pinned=row_wise", r"unknown key 'sharding\.constraints\.user\.pinned'"),
        ("checkpoint.keep_last=0", r"every_steps and keep_last must be 1 or more"),
        ("export.examples=0", r"examples = 0"),
    ],
)
def test_unknown_keys_and_bad_values_are_named(recipe_file, override, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe_file, [override])


def test_a_recipe_without_data_says_so(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match="key 'data' is missing"):
        read_recipe(path)


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines" / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_the_shipped_recipes_are_valid(path):
    recipe = read_recipe(path)
    assert recipe.data.train and recipe.data.test


def test_the_page_about_training_lists_every_key_with_its_default():
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    from pipelines.recipe import Recipe
    from tpurec.models.config import FACTORY_KEYS, MODEL_KEYS

    rows = re.findall(r"^\| `(\w+\.\w+)` \|(.*?)\|", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE)
    written = {key: text for key, text in rows}
    assert len(written) == len(rows)
    model_defaults = {key: value for keys in (*MODEL_KEYS.values(), FACTORY_KEYS) for key, value in keys.items()}
    known = {}
    for section, kind in get_type_hints(Recipe).items():
        assert is_dataclass(kind)
        for field in fields(kind):
            default = None if field.default is MISSING else field.default
            default = field.default_factory() if field.default_factory is not MISSING else default
            known[f"{section}.{field.name}"] = (
                model_defaults.get(field.name, default) if section == "model" else default
            )
    assert written.keys() == known.keys()
    for key, text in written.items():
        value = None if text.strip() in ("", "none") else tomllib.loads(f"value = {text}")["value"]
        assert value == known[key], key


def test_the_workers_must_be_as_many_as_the_slice_has_ranks(recipe_file):
    assert read_recipe(recipe_file, ["sharding.slice=v6e-16"]).sharding.num_ranks == 16
    assert read_recipe(recipe_file, ["sharding.num_workers=3"]).sharding.topology.name == "cpu-3"
    with pytest.raises(ConfigError, match=r"num_workers = 4, but slice = 'v6e-16' has 16 ranks"):
        read_recipe(recipe_file, ["sharding.slice=v6e-16", "sharding.num_workers=4"])
