"""The plan of a run: given and checked, kept for a resumption, or made; errors name table and field."""

import dataclasses
import json

import pytest

from pipelines.planning import choose_plan, keep_plan
from pipelines.recipe import read_recipe
from pipelines.run import Run
from pipelines.source import find_data
from tpurec.errors import ConfigError
from tpurec.sharding.plan import Plan


@pytest.fixture
def settle(recipe_file, tmp_path):
    """Settle the plan of one RUN, with overrides of the recipe."""
    run = Run(tmp_path / "run")
    run.path.mkdir()

    def of(*overrides, change=lambda recipe: recipe):
        recipe = change(read_recipe(recipe_file, list(overrides)))
        plan = choose_plan(run, recipe, find_data(recipe).schema)
        keep_plan(run, plan, lambda line: None)
        return plan

    of.run = run
    return of


def test_without_a_plan_one_is_made_for_the_workers_and_kept(settle):
    found = settle("sharding.num_workers=4")
    assert found.slice == "cpu-4" and found.batch_size == 128
    assert Plan.load(settle.run.plan_file) == found
    assert {placed.name for placed in found.tables} == {"user", "item", "tags"}


def test_a_batch_that_the_workers_cannot_share_evenly_is_padded(settle):
    assert settle("sharding.num_workers=3").batch_size == 129


def test_the_kept_plan_is_used_again_until_workers_constraints_or_assumptions_differ(settle):
    made = settle("sharding.num_workers=2")
    altered = dataclasses.replace(made, plan_seconds=99.0)  # so that we see whether it is this one
    altered.save(settle.run.plan_file)
    assert settle("sharding.num_workers=2").plan_seconds == 99.0
    assert (
        settle("sharding.num_workers=2", "sharding.constraints.user.pin=row_wise").table("user").sharding == "row_wise"
    )
    changed = settle("sharding.num_workers=2", "sharding.assumptions.zipf_exponent=0.5")
    assert changed.assumptions.zipf_exponent == 0.5
    assert settle("sharding.num_workers=4").slice == "cpu-4"
    settle.run.plan_file.write_text("{}")
    assert settle("sharding.num_workers=4").slice == "cpu-4"


def edited(plan: Plan, tmp_path, edit) -> str:
    body = json.loads(plan.to_json())
    edit(body)
    path = tmp_path / "given.json"
    path.write_text(json.dumps(body))
    return str(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda b: b["tables"][0]["table"].update(num_embeddings=7),
            r"table 'user': num_embeddings is 7 in the plan, 50",
        ),
        (lambda b: b["tables"][0]["table"].update(optimizer="sgd"), r"table 'user': optimizer is 'sgd' in the plan"),
        (lambda b: b["tables"][1]["table"].update(pooling="mean"), r"table 'item': pooling is 'mean'"),
        (
            lambda b: b["tables"][0]["table"]["features"][0].update(name="usr"),
            r"table 'user': features\.name is \['usr'\]",
        ),
        (lambda b: b["tables"][2]["table"]["features"][0].update(weighted=False), r"'tags': features\.weighted"),
        (lambda b: b["tables"].pop(1), r"table 'item' of the recipe is not in the plan"),
        (lambda b: b["tables"][0]["table"].update(name="people"), r"table 'user' of the recipe is not in the plan"),
        (lambda b: b["tables"][0]["shards"][0].update(ranks=[5]), r"table 'user': rank 5 is not on the slice"),
    ],
)
def test_a_given_plan_for_other_tables_is_refused_with_table_and_field(settle, tmp_path, edit, message):
    pins = [f"sharding.constraints.{name}.pin=table_wise" for name in ("user", "item", "tags")]
    given = edited(settle("sharding.num_workers=2", *pins), tmp_path, edit)
    with pytest.raises(ConfigError, match=message):
        settle("sharding.num_workers=2", f"sharding.plan={given}")


def test_a_given_plan_for_another_number_of_workers_is_refused_and_one_that_fits_is_used(settle, tmp_path):
    """case 20: the plan's ranks are those that run."""
    given = edited(settle("sharding.num_workers=2"), tmp_path, lambda body: None)
    with pytest.raises(ConfigError, match=r"the plan is for cpu-2 with 2 ranks, there are 4 workers.*--workers 2"):
        settle("sharding.num_workers=4", f"sharding.plan={given}")
    assert settle("sharding.num_workers=2", f"sharding.plan={given}") == Plan.load(given)


def test_ranks_that_own_no_table_are_named_before_anything_runs(recipe_file, tmp_path):
    """case 20"""
    run, lines = Run(tmp_path), []
    pins = [
        f"sharding.constraints.{name}.{key}"
        for name in ("user", "item", "tags")
        for key in ("pin=table_wise", "pin_ranks=[1]")
    ]
    recipe = read_recipe(recipe_file, ["sharding.num_workers=4", *pins])
    keep_plan(run, choose_plan(run, recipe, find_data(recipe).schema), lines.append)
    assert lines == ["plan for cpu-4: 3 tables (3 table_wise); 3 ranks own no table"]


def on_tpu(recipe):
    return dataclasses.replace(recipe, device=dataclasses.replace(recipe.device, kind="tpu", execution="compile"))


def test_a_tpu_takes_columns_of_rows_that_are_stepped_as_a_whole_but_not_every_plan_for_cpus(settle, tmp_path):
    workers = ("sharding.num_workers=4", "tables.optimizer=row_wise_adagrad")
    pin = ("sharding.constraints.user.pin=column_wise", "tables.embedding_dim=32")
    found = settle(*workers, *pin, "tables.max_gradient_norm=1.0", change=on_tpu)
    assert len(found.table("user").shards) > 1
    for dim, dtype, message in (
        (12, "float32", r"table 'user', columns 0 to 12: embedding_dim 12: .*Use 8 or 16"),
        (16, "float16", r"table 'user', columns 0 to 16: dtype 'float16'.*Use bfloat16"),
    ):
        tables = (f"tables.embedding_dim={dim}", f"tables.dtype={dtype}")
        whole = [f"sharding.constraints.{name}.pin=table_wise" for name in ("user", "item", "tags")]
        settle(*workers, *tables, *whole).save(tmp_path / "cpu.json")
        given = f"sharding.plan={tmp_path / 'cpu.json'}"
        settle(*workers, *tables, given)
        with pytest.raises(ConfigError, match=message):
            settle(*workers, *tables, given, change=on_tpu)
