"""Swap the embedding collections inside an existing TorchRec model for fused ones, and tell the two kinds apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from tpurec.embeddings.deferred import deferred_tables
from tpurec.embeddings.fused import FusedEmbeddingBagCollection
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.embeddings.sequence import FusedEmbeddingCollection
from tpurec.errors import ConfigError, DataError

FusedCollection = FusedEmbeddingBagCollection | FusedEmbeddingCollection


def fuse(model: nn.Module, optimizer: EmbeddingOptimizer) -> nn.Module:
    """Replace every `EmbeddingBagCollection` and `EmbeddingCollection` in a model; weights and outputs stay the same.

    Args:
        model: a TorchRec model or an own one; changed in place. A collection that occurs twice stays shared.
        optimizer: the optimizer of the tables.

    Returns:
        The model; or the fused collection, if `model` is itself a collection.

    Raises:
        ConfigError: the model has no such collection, or one whose weights are not of its tables' data type.

    Example:
        >>> model = fuse(DLRM(EmbeddingBagCollection(tables), 13, [512, 64], [256, 1]), RowWiseAdagrad(lr=0.02))
        >>> dense = torch.optim.Adam(dense_parameters(model), lr=1e-3)
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    if isinstance(model, kinds):
        return _fused_copy(model, optimizer)
    swapped: dict[int, FusedCollection] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, kinds):
                if id(child) not in swapped:
                    swapped[id(child)] = _fused_copy(child, optimizer)
                setattr(parent, name, swapped[id(child)])
    if not swapped:
        raise ConfigError(f"{type(model).__name__} contains no EmbeddingBagCollection or EmbeddingCollection to fuse.")
    return model


def _fused_copy(
    collection: EmbeddingBagCollection | EmbeddingCollection, optimizer: EmbeddingOptimizer
) -> FusedCollection:
    fused: FusedCollection
    with deferred_tables(False):  # the values are there
        if isinstance(collection, EmbeddingCollection):
            fused = FusedEmbeddingCollection(
                collection.embedding_configs(), optimizer, collection.device, collection.need_indices()
            )
            pairs = [(name, one, fused.embeddings[name]) for name, one in collection.embeddings.items()]
        else:
            fused = FusedEmbeddingBagCollection(
                collection.embedding_bag_configs(), optimizer, collection.is_weighted(), collection.device
            )
            pairs = [(name, one, fused.embedding_bags[name]) for name, one in collection.embedding_bags.items()]
    with torch.no_grad():
        for name, before, after in pairs:
            if before.weight.dtype != after.weight.dtype:  # TorchRec makes float16 of bfloat16 here
                raise ConfigError(
                    f"table {name!r}: its weight is {before.weight.dtype}, its data_type {after.weight.dtype}.",
                    "Build the fused collection itself.",
                )
            after.weight.copy_(before.weight)
            after.weight.requires_grad_(before.weight.requires_grad)
    return fused.train(collection.training)


def fused_collections(model: nn.Module) -> Iterator[tuple[str, FusedCollection]]:
    """The fused collections of a model, each once.

    Args:
        model: any module.

    Yields:
        Path (empty if the model is itself a collection) and collection.
    """
    for path, module in model.named_modules():
        if isinstance(module, FusedCollection):
            yield path, module


def named_dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that an ordinary optimizer has to train: all but the tables of fused collections.

    Args:
        model: any module.

    Yields:
        Name and parameter.
    """
    tables = {id(weight) for _, collection in fused_collections(model) for weight in collection.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables:
            yield name, parameter


def dense_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """As `named_dense_parameters`, without the names.

    Args:
        model: any module.

    Yields:
        The parameters.
    """
    for _, parameter in named_dense_parameters(model):
        yield parameter


def set_learning_rate(model: nn.Module, lr: float) -> None:
    """Set the learning rate of every fused collection of a model, sharded ones included.

    Args:
        model: any module.
        lr: finite and >= 0.
    """
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)) and hasattr(
            module, "set_learning_rate"
        ):
            module.set_learning_rate(lr)


def fused_optimizer_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The optimizer state of all fused collections, under their paths.

    Args:
        model: any module.

    Returns:
        `PATH.embedding_bags.NAME.STATE` (of sequences: `PATH.embeddings.NAME.STATE`) to tensor (views).
    """
    return {
        f"{path}.{key}" if path else key: tensor
        for path, collection in fused_collections(model)
        for key, tensor in collection.optimizer_state_dict().items()
    }


def load_fused_optimizer_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `fused_optimizer_state_dict` gave.

    Args:
        model: a model with the same fused collections.
        state: exactly those keys.

    Raises:
        DataError: naming a missing or extra key, or a shape that does not fit.
    """
    expected = fused_optimizer_state_dict(model)
    missing, extra = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or extra:
        parts = [f"missing {sorted(missing)}" if missing else "", f"extra {sorted(extra)}" if extra else ""]
        raise DataError(f"optimizer state: {'; '.join(part for part in parts if part)}.")
    for path, collection in fused_collections(model):
        prefix = f"{path}." if path else ""
        keys = collection.optimizer_state_dict()
        collection.load_optimizer_state_dict({key: state[prefix + key] for key in keys})
