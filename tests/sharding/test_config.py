"""The recipe's constraints reach the planner, from `train` and from `plan` alike."""

import pytest

from tpurec.errors import ConfigError
from tpurec.sharding.config import ShardingConfig, TableConstraint
from tpurec.sharding.planner import plan
from tpurec.sharding.sources import read_source
from tpurec.sharding.tables import FeatureSpec, TableSpec

TABLES = [TableSpec("user", 100, 8, (FeatureSpec("user_id"),)), TableSpec("item", 100, 8, (FeatureSpec("item_id"),))]


def test_a_pinned_table_is_placed_as_the_recipe_says():
    config = ShardingConfig(constraints={"user": TableConstraint(pin="table_wise", pin_ranks=[1])})
    placed = plan(config.constrain(TABLES), "cpu-2", 64)
    assert placed.table("user").sharding == "table_wise" and placed.table("user").ranks == (1,)


@pytest.mark.parametrize(
    ("name", "constraint", "message"),
    [
        ("usr", TableConstraint(pin="row_wise"), r"sharding\.constraints\.usr: there is no table 'usr'"),
        ("user", TableConstraint(pin="diagonal"), r"table 'user': pin = 'diagonal'"),
        ("user", TableConstraint(pin="row_wise", forbid=["row_wise"]), r"table 'user': pin = 'row_wise': is forbidden"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_named(name, constraint, message):
    with pytest.raises(ConfigError, match=message):
        ShardingConfig(constraints={name: constraint}).constrain(TABLES)


def test_the_plan_command_reads_the_same_constraints_from_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nschema = "criteo"\ntrain = "x"\n[sharding.constraints.C1]\npin = "row_wise"\n')
    table = next(table for table in read_source(str(recipe)).tables if table.name == "C1")
    assert table.allowed == ("row_wise",)
