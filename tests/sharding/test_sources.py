"""Where tables come from besides a list: a recipe, a data set, a TorchRec model."""

import pytest

from tests.sharding.conftest import SCHEMA
from tpurec.errors import ConfigError
from tpurec.sharding.sources import read_source


def test_a_recipe_is_planned_by_its_schema_and_dense_part(tmp_path, parquet):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\ntrain = "{parquet}"\n[tables]\nembedding_dim = 32\noptimizer = "adagrad"\n[train]\nbatch_size = 512\n'
    )
    found = read_source(str(recipe))
    assert [(table.name, table.num_embeddings, table.embedding_dim) for table in found.tables] == [
        ("user_id", 1000, 32),
        ("tags", 50, 32),
    ]
    assert found.tables[0].optimizer == "adagrad" and found.batch_size == 512
    assert found.assumptions.dense_parameters < 100_000, "the recipe's own MLPs, not the default's 16 million"
    assert read_source(str(recipe), ["tables.embedding_dim=64"]).tables[0].embedding_dim == 64


def test_a_data_set_is_measured_instead_of_assumed(parquet):
    found = {table.name: table for table in read_source(str(parquet), embedding_dim=16).tables}
    assert found["user_id"].ids_per_example == 1 and found["user_id"].unique_share == pytest.approx(10 / 100)
    assert found["tags"].ids_per_example == pytest.approx(1.5) and found["tags"].unique_share_ids == 150
    assert found["tags"].unique_share == pytest.approx(3 / 150)


def test_a_torchrec_model_is_planned_by_its_collections(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "from torchrec import EmbeddingBagCollection, EmbeddingBagConfig\n"
        "from torchrec.models.dlrm import DLRM\n"
        "def make():\n"
        "    table = EmbeddingBagConfig(name='t', num_embeddings=100, embedding_dim=8, feature_names=['a', 'b'])\n"
        "    tables = EmbeddingBagCollection(tables=[table], device=torch.device('meta'))\n"
        "    return DLRM(tables, 3, [8, 8], [4, 1], dense_device=torch.device('meta'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_source("own_model:make")
    assert [(t.name, t.num_embeddings, t.embedding_dim, len(t.features)) for t in found.tables] == [("t", 100, 8, 2)]
    # DLRM: (3*8+8) + (8*8+8) dense, (8 + 3 pairs)*4+4 and 4+1 over.
    assert found.assumptions.dense_parameters == 32 + 72 + 48 + 5


def test_tables_of_one_name_in_two_collections_are_refused(tmp_path, monkeypatch):
    (tmp_path / "twice_model.py").write_text(
        "import torch\n"
        "from torchrec import EmbeddingBagCollection as Bags, EmbeddingBagConfig as Config\n"
        "def bags(rows):\n"
        "    return Bags(tables=[Config(name='t', num_embeddings=rows, embedding_dim=8, feature_names=[f'f{rows}'])],\n"
        "                device=torch.device('meta'))\n"
        "def make():\n"
        "    return torch.nn.ModuleList([bags(100), bags(200)])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="two collections have different tables of the name 't'"):
        read_source("twice_model:make")


def test_a_factory_that_makes_no_model_is_named():
    with pytest.raises(ConfigError, match=r"os:getcwd: gives a str, not a torch module"):
        read_source("os:getcwd")


def test_what_a_factory_raises_is_named_as_the_factorys():
    with pytest.raises(ConfigError, match=r"os:chdir: calling it raised TypeError"):
        read_source("os:chdir")


def test_a_data_set_or_model_takes_assumptions_by_set(parquet):
    found = read_source(str(parquet), ["assumptions.dense_parameters=1000"], embedding_dim=16)
    assert found.assumptions.dense_parameters == 1000 and found.assumptions.dense_input_bytes == 4 * 1 + 5
    with pytest.raises(ConfigError, match=r"--set assumptions: unknown key 'dense'"):
        read_source(str(parquet), ["assumptions.dense=1"], embedding_dim=16)


def test_a_run_and_its_checkpoint_are_planned_also_without_the_data(tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a checkpoint outside of a RUN"):
        read_source(str(checkpoint))
    (run / "recipe.toml").write_text('[data]\ntrain = "moved/away"\n[tables]\nembedding_dim = 24\n')
    (run / "schema.toml").write_text(SCHEMA)
    for source in (run, checkpoint):
        found = read_source(str(source))
        assert [(table.name, table.embedding_dim) for table in found.tables] == [("user_id", 24), ("tags", 24)]
    with pytest.raises(ConfigError, match="'gone' does not exist"):
        read_source(str(run), ["data.train=gone"])
