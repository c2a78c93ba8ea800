"""Build the TorchRec model that a recipe names, with fused tables and logits as its output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.types import DataType

from tpurec.embeddings import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingOptimizer,
    FusedEmbeddingBagCollection,
    RowWiseAdagrad,
    RowWiseAdam,
    fuse,
)
from tpurec.embeddings.fuse import fused_collections
from tpurec.errors import ConfigError
from tpurec.features.schema import Schema
from tpurec.models.config import ModelConfig, TablesConfig
from tpurec.models.factory import load_factory
from tpurec.models.tables import TableSpec, table_specs

# TorchRec asks torch.fx whether it is tracing, in a way that torch 2.13 logs a warning about; users can do nothing.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

DATA_TYPES = {"float32": DataType.FP32, "bfloat16": DataType.BF16, "float16": DataType.FP16}
POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN, "none": PoolingType.NONE}
# For scoring: a fused collection without optimizer state, whose tables would not move.
FROZEN = SGD(lr=0.0)


def build_model(
    model: ModelConfig,
    tables: TablesConfig,
    schema: Schema,
    *,
    seed: int = 0,
    optimizer: EmbeddingOptimizer | None = None,
) -> nn.Module:
    """Build a model with freshly initialised weights.

    Args:
        model: which model, and its sizes.
        tables: the tables' columns, pooling and dtype.
        schema: features and the tables' rows.
        seed: of the initial weights; the global random state is left alone.
        optimizer: trains the tables in the backward pass; None for a model that only scores.

    Returns:
        A module: `forward(dense float32 [B, num_dense], kjt) -> logits float32 [B]`, with TorchRec's names in its
        state_dict.

    Raises:
        ConfigError: sizes or tables that the model cannot have, or a factory that cannot be called as documented.
    """
    specs = table_specs(tables, schema)
    if not specs:
        raise ConfigError(f"schema {schema.name!r} has no sparse feature; the models here need one or more.")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A schema without dense features gives Linear layers without inputs, that is, a trained constant.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors is a no-op")
        torch.manual_seed(seed)
        if ":" in model.name:
            built = _from_factory(model, specs, schema, optimizer or FROZEN)
        else:
            _check_one_dim(model.name, specs)
            _check_pooled(model.name, specs)
            is_weighted = any(feature.weights for feature in schema.sparse)
            collection = FusedEmbeddingBagCollection(embedding_bag_configs(specs), optimizer or FROZEN, is_weighted)
            built = _BUILDERS[model.name](model, collection, len(schema.dense), specs[0].embedding_dim)
    built.register_forward_hook(_logits)
    return built


def table_optimizer(tables: TablesConfig) -> EmbeddingOptimizer:
    """Return the optimizer that [tables] names.

    Args:
        tables: the recipe's section.

    Returns:
        `SGD`, `Adagrad`, `RowWiseAdagrad`, `Adam` or `RowWiseAdam` of `tpurec.embeddings`.
    """
    common = {
        "lr": tables.learning_rate,
        "weight_decay": tables.weight_decay,
        "decoupled_weight_decay": tables.decoupled_weight_decay,
        "max_gradient_norm": tables.max_gradient_norm or None,
        "rounding_seed": tables.rounding_seed if tables.rounding_seed >= 0 else None,
    }
    if tables.optimizer == "sgd":
        return SGD(**common)
    if tables.optimizer in ("adam", "row_wise_adam"):
        kind = Adam if tables.optimizer == "adam" else RowWiseAdam
        return kind(eps=tables.eps, betas=tuple(tables.betas), **common)
    return (RowWiseAdagrad if tables.optimizer == "row_wise_adagrad" else Adagrad)(eps=tables.eps, **common)


def embedding_bag_configs(specs: list[TableSpec]) -> list[EmbeddingBagConfig]:
    """Return TorchRec's form of the tables.

    Args:
        specs: the tables.

    Returns:
        One configuration a table.
    """
    return [
        EmbeddingBagConfig(
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=spec.embedding_dim,
            feature_names=list(spec.features),
            pooling=POOLINGS[spec.pooling],
            data_type=DATA_TYPES[spec.dtype],
        )
        for spec in specs
    ]


def _dlrm(model: ModelConfig, collection: FusedEmbeddingBagCollection, num_dense: int, dim: int) -> nn.Module:
    return DLRM(collection, num_dense, [*model.dense_hidden_sizes, dim], [*model.over_hidden_sizes, 1])


def _dlrm_dcn(model: ModelConfig, collection: FusedEmbeddingBagCollection, num_dense: int, dim: int) -> nn.Module:
    return DLRM_DCN(
        collection,
        num_dense,
        [*model.dense_hidden_sizes, dim],
        [*model.over_hidden_sizes, 1],
        dcn_num_layers=model.dcn_num_layers,
        dcn_low_rank_dim=model.dcn_low_rank_dim,
    )


def _deepfm(model: ModelConfig, collection: FusedEmbeddingBagCollection, num_dense: int, dim: int) -> nn.Module:
    built = SimpleDeepFMNN(num_dense, collection, model.hidden_layer_size, model.deep_fm_dimension)
    # TorchRec's over arch is Linear, Sigmoid; we train on logits, and the sigmoid has no parameters.
    last = len(built.over_arch.model) - 1
    if not isinstance(built.over_arch.model[last], nn.Sigmoid):
        raise ConfigError("this TorchRec's SimpleDeepFMNN does not end in a sigmoid.", "Install torchrec==1.9.2.")
    built.over_arch.model[last] = nn.Identity()
    return built


_BUILDERS: dict[str, Callable[[ModelConfig, FusedEmbeddingBagCollection, int, int], nn.Module]] = {
    "dlrm": _dlrm,
    "dlrm_dcn": _dlrm_dcn,
    "deepfm": _deepfm,
}


def _from_factory(
    model: ModelConfig, specs: list[TableSpec], schema: Schema, optimizer: EmbeddingOptimizer
) -> nn.Module:
    factory = load_factory(model.name, f"model.name = {model.name!r}")
    try:
        built = factory(embedding_bag_configs(specs), schema, **(model.options or {}))
    except TypeError as error:
        raise ConfigError(
            f"model.name = {model.name!r}: {error}.", "It is called as factory(tables, schema, **model.options)."
        ) from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model.name = {model.name!r}: returned {type(built).__name__}, a torch module is expected.")
    return built if any(fused_collections(built)) else fuse(built, optimizer)


def _check_one_dim(name: str, specs: list[TableSpec]) -> None:
    for spec in specs[1:]:
        if spec.embedding_dim != specs[0].embedding_dim:
            raise ConfigError(
                f"model {name!r} needs one embedding_dim for all tables: {specs[0].name!r} has "
                f"{specs[0].embedding_dim}, {spec.name!r} has {spec.embedding_dim}.",
                "Give them the same tables.overrides, or none.",
            )


def _check_pooled(name: str, specs: list[TableSpec]) -> None:
    for spec in specs:
        if spec.pooling == "none":
            raise ConfigError(
                f"model {name!r} takes one vector a bag, and table {spec.name!r} has pooling 'none'.",
                "Use sum or mean, or a module:factory of your own with an EmbeddingCollection.",
            )


def _logits(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook: TorchRec's models give [B, 1], ours [B]. A hook leaves the names in the state_dict alone."""
    if output.dim() == 2 and output.shape[1] == 1:
        output = output.squeeze(1)
    if output.dim() != 1:
        raise ConfigError(
            f"{type(module).__name__} gave an output of shape {list(output.shape)}.", "Logits [B] or [B, 1] are needed."
        )
    return output.float()
