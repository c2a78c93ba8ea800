"""`device.check` of a recipe: the run ends with the first value that is wrong, and otherwise gives the same numbers."""

import pytest

from pipelines.recipe import read_recipe
from pipelines.run import Run
from tests.pipelines.test_training import numbers, train
from tpurec.errors import DataError


def run_with(recipe_file, folder, *settings):
    return train(Run(folder), read_recipe(recipe_file, [*settings, "train.max_steps=12"]))


def test_a_sound_run_gives_the_same_numbers_to_the_bit(recipe_file, tmp_path):
    plain = run_with(recipe_file, tmp_path / "plain")
    checked = run_with(recipe_file, tmp_path / "checked", "device.check=true")
    assert numbers(plain) == numbers(checked)


def test_a_run_ends_with_table_feature_and_example(recipe_file, tmp_path):
    """Tables that overflow: the loss alone would say that it is not finite, and not where."""
    settings = ["tables.learning_rate=1e38", "train.warmup_steps=0", "train.decay='none'"]
    message = r"step \d+: feature '\w+', table '\w+': the \w+( vector)? of example \d+ has"
    with pytest.raises(DataError, match=message):
        run_with(recipe_file, tmp_path / "run", "device.check=true", *settings)
