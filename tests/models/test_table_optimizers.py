"""What a recipe's [tables] says about the optimizer, and what the planner counts for it."""

import pytest

from tpurec.config import from_mapping
from tpurec.embeddings import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from tpurec.errors import ConfigError
from tpurec.models import TablesConfig, table_optimizer
from tpurec.sharding.tables import FeatureSpec, TableSpec


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"optimizer": "sgd", "max_gradient_norm": 2.0}, SGD(0.05, max_gradient_norm=2.0)),
        ({"optimizer": "adagrad", "weight_decay": 0.1}, Adagrad(0.05, weight_decay=0.1)),
        ({}, RowWiseAdagrad(0.05)),
        ({"optimizer": "adam", "betas": [0.8, 0.9], "learning_rate": 0.1}, Adam(0.1, (0.8, 0.9))),
        (
            {"optimizer": "row_wise_adam", "decoupled_weight_decay": True, "rounding_seed": 0},
            RowWiseAdam(0.05, decoupled_weight_decay=True, rounding_seed=0),
        ),
    ],
)
def test_recipe_to_optimizer(tables, expected):
    assert table_optimizer(from_mapping(TablesConfig, tables, "recipe [tables]")) == expected


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"optimizer": "lamb"}, "optimizer"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm"),
        ({"rounding_seed": 2**31}, "rounding_seed"),
    ],
)
def test_values_that_make_no_sense_are_named(tables, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(TablesConfig, tables, "recipe [tables]")


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("sgd", 0), ("row_wise_adagrad", 400), ("adagrad", 3200), ("row_wise_adam", 3600), ("adam", 6400)],
)
def test_the_planner_counts_the_state_of_every_optimizer_that_a_recipe_can_name(optimizer, state_bytes):
    spec = TableSpec("t", 100, 8, (FeatureSpec("f"),), optimizer=optimizer)
    assert spec.state_bytes == state_bytes
