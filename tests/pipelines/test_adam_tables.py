"""Tables that train with Adam through a recipe: their step count is part of what a run resumes from."""

import pytest

from pipelines.recipe import read_recipe
from pipelines.run import Run
from tests.pipelines.test_training import Killed, numbers, train
from tpurec.sharding.checkpoint import list_checkpoints, read_manifest


@pytest.mark.parametrize(
    "tables",
    [
        ["tables.optimizer=adam", "tables.decoupled_weight_decay=true", "tables.weight_decay=0.01"],
        ["tables.optimizer=row_wise_adam", "tables.dtype=bfloat16", "tables.rounding_seed=3"],
    ],
    ids=["adam", "row_wise_adam_rounded"],
)
def test_a_killed_run_ends_in_the_same_numbers_to_the_bit(tables, recipe_file, tmp_path):
    recipe = read_recipe(recipe_file, [*tables, "tables.learning_rate=0.01"])
    expected = train(Run(tmp_path / "whole"), recipe)
    run = Run(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, recipe, kill_at=23)
    names = {name for name in read_manifest(list_checkpoints(run.checkpoints)[-1]).tensors if "user" in name}
    state = {name.rpartition(".")[2] for name in names if name.startswith("optimizer.")}
    assert state == {"exp_avg", "exp_avg_sq", "step"}
    assert numbers(train(run, recipe)) == numbers(expected)
    assert expected["auc"] > 0.75
