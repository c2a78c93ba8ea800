"""Models by name: TorchRec's own, with logits out, TorchRec's names, and weights that follow from the seed."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from tpurec.embeddings import RowWiseAdagrad, fused_optimizer_state_dict
from tpurec.errors import ConfigError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature
from tpurec.models import ModelConfig, TableOverride, TablesConfig, build_model, table_optimizer, table_specs
from tpurec.models.build import embedding_bag_configs

SCHEMA = Schema(
    "little",
    LabelColumn("label"),
    (DenseFeature("price"), DenseFeature("age")),
    (SparseFeature("user", 10), SparseFeature("item", 20), SparseFeature("last_item", 20, table="item")),
)
KEYS = ["user", "item", "last_item"]


def a_batch(batch_size: int = 5) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(1)
    dense = torch.rand(batch_size, 2, generator=generator)
    lengths = torch.randint(0, 3, (3 * batch_size,), generator=generator)
    values = torch.randint(0, 10, (int(lengths.sum()),), generator=generator)
    return dense, KeyedJaggedTensor(KEYS, values, lengths=lengths)


def torchrec_model(name: str, specs) -> nn.Module:
    collection = EmbeddingBagCollection(embedding_bag_configs(specs))
    if name == "dlrm":
        return DLRM(collection, 2, [64, 16], [128, 64, 1])
    if name == "dlrm_dcn":
        return DLRM_DCN(collection, 2, [64, 16], [128, 64, 1], dcn_num_layers=3, dcn_low_rank_dim=32)
    return SimpleDeepFMNN(2, collection, 64, 64)


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn", "deepfm"])
def test_the_output_is_the_logit_of_torchrecs_own_model(name):
    ours = build_model(ModelConfig(name), TablesConfig(), SCHEMA)
    theirs = torchrec_model(name, table_specs(TablesConfig(), SCHEMA))
    theirs.load_state_dict(ours.state_dict())  # strict: the names are TorchRec's
    logits = ours(*a_batch())
    expected = theirs(*a_batch()).squeeze(1)
    assert logits.shape == (5,)
    torch.testing.assert_close(torch.sigmoid(logits) if name == "deepfm" else logits, expected)


def test_weights_follow_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = (build_model(ModelConfig(), TablesConfig(), SCHEMA, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [list(model.state_dict().values()) for model in (one, two, other)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn", "deepfm"])
def test_one_backward_pass_trains_the_rows_looked_up_and_no_others(name):
    tables = TablesConfig(learning_rate=0.1)
    model = build_model(ModelConfig(name), tables, SCHEMA, optimizer=table_optimizer(tables))
    key = next(key for key in model.state_dict() if key.endswith("embedding_bags.user.weight"))
    before = model.state_dict()[key].clone()
    dense, kjt = a_batch()
    model(dense, kjt).sum().backward()
    moved = (model.state_dict()[key] != before).any(1).nonzero().squeeze(1).tolist()
    assert moved == sorted(set(kjt["user"].values().tolist()))
    assert set(fused_optimizer_state_dict(model)) == {
        key.replace("user.weight", f"{table}.sum") for table in ("user", "item")
    }


def test_a_schema_without_dense_features_trains_a_constant():
    schema = Schema("ids", LabelColumn("y"), (), (SparseFeature("user", 10), SparseFeature("item", 20)))
    model = build_model(ModelConfig("dlrm"), TablesConfig(), schema)
    kjt = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    assert torch.isfinite(model(torch.empty(1, 0), kjt)).all()


def test_overrides_change_one_table_and_unknown_tables_are_refused():
    config = TablesConfig(embedding_dim=8, overrides={"item": TableOverride(embedding_dim=4, pooling="mean")})
    user, item = table_specs(config, SCHEMA)
    assert (user.embedding_dim, user.pooling, user.features) == (8, "sum", ("user",))
    assert (item.embedding_dim, item.pooling, item.features) == (4, "mean", ("item", "last_item"))
    assert (item.num_embeddings, item.optimizer) == (20, "row_wise_adagrad")
    with pytest.raises(ConfigError, match="no table 'itm'"):
        table_specs(TablesConfig(overrides={"itm": TableOverride(embedding_dim=4)}), SCHEMA)
    with pytest.raises(ConfigError, match="'user' has 8, 'item' has 4"):
        build_model(ModelConfig("dlrm"), config, SCHEMA)


def test_models_that_pool_refuse_tables_of_sequences_by_name():
    tables = TablesConfig(overrides={"item": TableOverride(pooling="none")})
    with pytest.raises(ConfigError, match="model 'dlrm' takes one vector a bag, and table 'item' has pooling 'none'"):
        build_model(ModelConfig("dlrm"), tables, SCHEMA)


class TwoTower(nn.Module):
    def __init__(self, tables, schema, hidden=4):
        super().__init__()
        self.collection = EmbeddingBagCollection(tables)
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables) + len(schema.dense)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense, kjt):
        return self.mlp(torch.cat([dense, self.collection(kjt).values()], dim=1))


class ThreeOutputs(TwoTower):
    def forward(self, dense, kjt):
        return super().forward(dense, kjt).expand(-1, 3)


def returns_nothing(tables, schema):
    return None


def test_an_own_factory_gets_tables_schema_and_options_and_its_tables_are_fused():
    name = f"{__name__}:TwoTower"
    model = build_model(ModelConfig(name, options={"hidden": 7}), TablesConfig(), SCHEMA, optimizer=RowWiseAdagrad(0.1))
    assert model.mlp[0].out_features == 7
    assert model(*a_batch()).shape == (5,)
    assert "collection.embedding_bags.user.sum" in fused_optimizer_state_dict(model)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:f", None, "No module named 'no_such_module'"),
        (f"{__name__}:absent", None, "has no attribute 'absent'"),
        (f"{__name__}:TwoTower", {"width": 3}, "unexpected keyword argument 'width'"),
        (f"{__name__}:returns_nothing", None, "returned NoneType"),
    ],
)
def test_a_factory_that_does_not_fit_is_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(name, options=options), TablesConfig(), SCHEMA)


def test_an_output_that_is_no_logit_is_refused():
    model = build_model(ModelConfig(f"{__name__}:ThreeOutputs"), TablesConfig(), SCHEMA)
    with pytest.raises(ConfigError, match=r"output of shape \[5, 3\]"):
        model(*a_batch())


def test_bad_values_name_the_key_and_the_choices():
    for values, message in [
        ({"name": "dlrm2"}, "no model 'dlrm2'; choose dlrm, dlrm_dcn, deepfm"),
        ({"name": "dlrm", "dcn_num_layers": 3}, "dcn_num_layers is not used by the model 'dlrm'"),
        ({"name": "dlrm", "over_hidden_sizes": []}, "over_hidden_sizes is empty"),
        ({"name": "deepfm", "hidden_layer_size": 0}, "sizes must be 1 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**values)
    for values in ({"embedding_dim": 0}, {"learning_rate": 0.0}, {"eps": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(values))):
            TablesConfig(**values)


def test_the_planner_reads_tables_without_torch():
    code = "import sys; import tpurec.models; assert not {'torch', 'torchrec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
