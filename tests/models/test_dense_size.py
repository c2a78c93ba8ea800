"""The counted dense parameters are those of the model that is built."""

import pytest

from tpurec.features.schema import Schema
from tpurec.models.build import build_model
from tpurec.models.config import ModelConfig, TablesConfig
from tpurec.models.dense_size import dense_parameters

SCHEMA = """
name = "small"
[[dense]]
name = "d1"
transform = "identity"
[[dense]]
name = "d2"
transform = "identity"
""" + "".join(f'[[sparse]]\nname = "s{i}"\nkind = "integer"\nnum_embeddings = 10\n' for i in range(3))


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(name="dlrm", dense_hidden_sizes=[7, 5], over_hidden_sizes=[9]),
        ModelConfig(name="dlrm_dcn", dense_hidden_sizes=[7], over_hidden_sizes=[9, 4], dcn_num_layers=2),
        ModelConfig(name="deepfm", hidden_layer_size=6, deep_fm_dimension=5),
    ],
    ids=lambda model: model.name,
)
def test_counted_equals_built(model):
    tables = TablesConfig(embedding_dim=8)
    built = build_model(model, tables, Schema.from_text(SCHEMA))
    dense = sum(value.numel() for name, value in built.named_parameters() if "embedding_bags" not in name)
    assert dense > 0
    assert dense_parameters(model, 2, 3, 8) == dense


def test_a_factory_cannot_be_counted_without_building_it():
    assert dense_parameters(ModelConfig(name="some.module:factory"), 2, 3, 8) is None
