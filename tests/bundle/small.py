"""A small model of its own kind for tests: every kind of feature, exported as a bundle in a second."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from tpurec.bundle import write_bundle
from tpurec.config import to_toml
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature
from tpurec.models import ModelConfig, TablesConfig, build_model

NUM_ROWS = 40


def small_schema(id_policy: str = "hash") -> Schema:
    """Dense, hex, vocabulary, identity, and a multi-valued feature with weights."""
    return Schema(
        name="small",
        label=LabelColumn("label"),
        dense=(DenseFeature("price"), DenseFeature("age", transform="standardize", mean=30.0, std=10.0)),
        sparse=(
            SparseFeature("ad", num_embeddings=50, kind="hex"),
            SparseFeature("city", num_embeddings=8, transform="vocabulary", vocabulary=("rome", "oslo", "lima")),
            SparseFeature("slot", num_embeddings=10, kind="integer", transform="identity"),
            SparseFeature(
                "tags",
                num_embeddings=20,
                kind="integer",
                transform="identity",
                multi_valued=True,
                weights="tag_weights",
            ),
        ),
        id_policy=id_policy,
        keys=("request",),
    )


def small_rows(num_rows: int = NUM_ROWS, seed: int = 0) -> list[dict]:
    """Raw rows as a request has them; some values are blank."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(num_rows):
        tags = random.integers(0, 20, random.integers(0, 4)).tolist()
        rows.append(
            {
                "request": f"r{number}",
                "price": None if number % 7 == 3 else float(np.float32(random.normal(3, 2))),
                "age": float(random.integers(18, 80)),
                "ad": None if number % 11 == 5 else f"{random.integers(0, 2**32):08x}",
                "city": ["rome", "oslo", "lima"][number % 3],
                "slot": int(random.integers(0, 10)),
                "tags": tags,
                "tag_weights": [float(np.float32(weight)) for weight in random.uniform(0, 2, len(tags))],
            }
        )
    return rows


def small_table(num_rows: int = NUM_ROWS, seed: int = 0) -> pa.Table:
    """The same rows as a table."""
    types = small_schema().arrow_schema(labels=False).remove_metadata()
    fields = [pa.field("request", pa.string()), *types]
    return pa.Table.from_pylist(small_rows(num_rows, seed), schema=pa.schema(fields))


def small_model(schema: Schema, seed: int = 3):
    """A DLRM whose scores spread, so that a wrong row or weight shows."""
    model = build_model(
        ModelConfig(dense_hidden_sizes=[8], over_hidden_sizes=[8]), TablesConfig(embedding_dim=4), schema
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.7)
    return model.eval()


def small_recipe() -> str:
    """The recipe text of `small_model`."""
    return to_toml(
        {
            "data": {"train": "train", "test": "test"},
            "model": ModelConfig(dense_hidden_sizes=[8], over_hidden_sizes=[8]).__dict__,
            "tables": TablesConfig(embedding_dim=4).__dict__,
        }
    )


def write_small_bundle(
    path: Path, id_policy: str = "hash", seed: int = 3, schema: Schema | None = None, examples: pa.Table | None = None
) -> Path:
    """Export the small model; expected scores come from the model itself, not from the bundle."""
    from tpurec.embeddings.jagged import to_torch
    from tpurec.features import Ladder, pack
    from tpurec.features.transform import Transformer

    schema = schema or small_schema(id_policy)
    model = small_model(schema, seed)
    table = small_table(5) if examples is None else examples
    columns = Transformer(schema)(table, labels=False)
    batch = to_torch(pack(columns, 64, Ladder.for_batch(64)))  # as training's evaluation does it
    with torch.no_grad():
        expected = torch.sigmoid(model(batch.dense, batch.features)).numpy()[: len(table)]
    write_bundle(
        path,
        model=model,
        schema=schema,
        recipe_text=small_recipe(),
        examples=table,
        expected_scores=expected,
        metrics={"auc": 0.75, "calibration": float("nan")},
        source={"step": 12, "epoch": 1},
    )
    return path


class PooledLogit(torch.nn.Module):
    """Its logit is the first column of the only bag, times `scale`: scores show what a lookup pooled."""

    def __init__(self, collection, scale):
        super().__init__()
        self.collection = collection
        self.scale = scale

    def forward(self, dense, kjt):
        return self.collection(kjt).values()[:, :1] * self.scale


def pooled_logit(tables, schema, scale=1.0):
    """A model factory, as a recipe names it."""
    from torchrec import EmbeddingBagCollection

    weighted = any(feature.weights for feature in schema.sparse)
    return PooledLogit(EmbeddingBagCollection(tables=tables, is_weighted=weighted), scale)


def write_pooled_bundle(path: Path, schema: Schema, scale: float, example: dict) -> Path:
    """Export a `pooled_logit` model with E[i] = [i, i, i, i]; `example` is one raw row."""
    model_config = ModelConfig(name="tests.bundle.small:pooled_logit", options={"scale": scale})
    model = build_model(model_config, TablesConfig(embedding_dim=4), schema)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            assert key.endswith(".weight")
            tensor.copy_(torch.arange(len(tensor)).float().unsqueeze(1).expand_as(tensor))
    examples = pa.Table.from_pylist([example], schema=schema.arrow_schema(labels=False).remove_metadata())
    expected = np.array([1 / (1 + np.exp(-scale * example.pop("pooled")))], dtype=np.float32)
    write_bundle(
        path,
        model=model,
        schema=schema,
        recipe_text=to_toml(
            {"model": {"name": model_config.name, "options": model_config.options}, "tables": {"embedding_dim": 4}}
        ),
        examples=examples,
        expected_scores=expected,
        metrics={},
        source={},
    )
    return path
