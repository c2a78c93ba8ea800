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


def test_assumptions_of_a_recipe_come_before_what_it_says_of_itself(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[data]\nschema = "criteo"\n[sharding.assumptions]\nzipf_exponent = 0.5\ndense_input_bytes = 99\n'
    )
    own = read_source(str(recipe)).assumptions
    assert (own.zipf_exponent, own.dense_input_bytes) == (0.5, 99) and own.dense_parameters < 16_000_000
    changed = read_source(str(recipe), ["sharding.assumptions.zipf_exponent=1.5"]).assumptions
    assert changed.zipf_exponent == 1.5


def test_the_wire_of_a_recipe_is_planned_with_and_its_activations_stay_float32(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nschema = "criteo"\n[train]\nbatch_size = 65536\n')
    plans = []
    for wire in ("float32", "bfloat16"):
        found = read_source(str(recipe), [f"sharding.wire_dtype={wire}"])
        plans.append(plan(found.tables, "v6e-16", found.batch_size, found.assumptions))
    assert [made.assumptions.vector_bytes for made in plans] == [4, 2]
    wide, narrow = (made.estimates for made in plans)
    assert narrow.step_parts["exchange_vectors"] < 0.6 * wide.step_parts["exchange_vectors"]
    assert narrow.hbm_parts["activations"] == wide.hbm_parts["activations"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zipf_exponnt = 1.0", "unknown key 'zipf_exponnt'. Did you mean 'zipf_exponent'"),
        ("rung_padding = 0", "rung_padding = 0: must be greater than 0"),
        ("id_bytes = 2.5", "id_bytes = 2.5"),
    ],
)
def test_an_assumption_that_a_recipe_cannot_have_is_named(tmp_path, line, message):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[data]\nschema = "criteo"\n[sharding.assumptions]\n{line}\n')
    with pytest.raises(ConfigError, match=r"recipe\.toml \[sharding\]") as caught:
        read_source(str(recipe))
    assert message in str(caught.value)
