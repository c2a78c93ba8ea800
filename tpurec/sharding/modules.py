"""`shard`: put a model's fused tables where a plan says, over the ranks of a process group."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType

from tpurec.embeddings.fuse import FusedCollection, fused_collections
from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.embeddings.sequence import FusedEmbeddingCollection
from tpurec.errors import ConfigError
from tpurec.sharding.exchange import Exchange
from tpurec.sharding.initial_values import load_initial_values
from tpurec.sharding.pieces import TensorPiece, pieces_of
from tpurec.sharding.placement import ShardedTable, make_stacks, tables_of
from tpurec.sharding.plan import Plan
from tpurec.sharding.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from tpurec.sharding.tables import OPTIMIZER_STATE
from tpurec.sharding.wire import Wire


def shard(
    model: nn.Module,
    plan: Plan,
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    wire_dtype: torch.dtype = torch.float32,
    host_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Replace every fused collection of a model by a sharded one; every rank must call it.

    The tables keep their values and optimizer state. A collection whose tables are on `meta` (build the model inside
    `tpurec.embeddings.deferred_tables`) gets the values that the unsharded model would have, without any
    rank ever holding a whole table. At world size 1 the fused collections stay, so that results are the same to the
    bit.

    Args:
        model: with fused collections; changed in place, and the same on every rank.
        plan: for as many ranks as the group has.
        process_group: None for the default one. Rank r of the group is rank r of the plan.
        device: of the tables; by default where the model's are, or the CPU for tables on `meta`.
        wire_dtype: of vectors and gradients between ranks: float32, or bfloat16 (half the bytes; each is rounded to 8
            bits once, see `docs/sharded_training.md`). Tables of float64 send float64.
        host_group: for KeyedJaggedTensors that the model is given directly; None makes one when it is needed.

    Returns:
        The model; or the sharded collection, if `model` is itself a collection.

    Raises:
        ConfigError: no fused collection, a plan for another number of ranks, other tables or an optimizer with less
            state, or another wire_dtype.

    Example:
        >>> model = shard(fuse(model, RowWiseAdagrad(lr=0.1)), Plan.load("plan.json"))
        >>> router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    """
    collections = [collection for _, collection in fused_collections(model)]
    if not collections:
        raise ConfigError(f"{type(model).__name__} contains no fused collection to shard.", "Fuse it first.")
    if wire_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"wire_dtype = {wire_dtype}.", "Use torch.float32 or torch.bfloat16.")
    num_ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if plan.topology.num_ranks != num_ranks:
        raise ConfigError(
            f"the plan is for {plan.topology.num_ranks} ranks ({plan.slice}), the process group has {num_ranks}.",
            f"Plan for {num_ranks} ranks, or start {plan.topology.num_ranks} processes.",
        )
    tables = tables_of(plan, [_described(collection) for collection in collections])
    for table in tables:
        _check_state(table, collections[table.collection].optimizer)
    given = collections[0].device
    device = torch.device(device or ("cpu" if given.type == "meta" else given))
    if num_ranks == 1:
        for collection in collections:
            load_initial_values(collection, device)
        return model
    stacks = make_stacks(tables, [collection.optimizer for collection in collections], num_ranks)
    limit = plan.assumptions.max_tensor_bytes
    exchange = Exchange(tables, stacks, len(collections), Wire(process_group), device, wire_dtype, limit)
    sharded: dict[int, ShardedCollection] = {}
    for number, collection in enumerate(collections):
        replacement: ShardedCollection
        if isinstance(collection, FusedEmbeddingCollection):
            replacement = ShardedEmbeddingCollection(collection, exchange, number)
        else:
            replacement = ShardedEmbeddingBagCollection(collection, exchange, number)
        replacement.set_learning_rate(collection.learning_rate if given.type != "meta" else collection.optimizer.lr)
        load_initial_values(collection, device, replacement)
        sharded[id(collection)] = replacement
    result = _replaced(model, sharded)
    _give_router(result, host_group)
    return result


def _described(collection: FusedCollection) -> tuple[list[EmbeddingBagConfig], list[torch.dtype], list[bool]]:
    if isinstance(collection, FusedEmbeddingCollection):
        bags = collection.bag_collection
        configs = [dataclasses.replace(one, pooling=PoolingType.NONE) for one in bags.embedding_bag_configs()]
    else:
        bags = collection
        configs = bags.embedding_bag_configs()
    weights = [bags.embedding_bags[config.name].weight for config in configs]
    return configs, [weight.dtype for weight in weights], [not weight.requires_grad for weight in weights]


def _check_state(table: ShardedTable, optimizer: EmbeddingOptimizer) -> None:
    """Refuse an optimizer with more state than the plan has room for; less is as good."""
    planned, kinds = table.placed.table.optimizer, [kind for _, kind in optimizer.states]
    dim, (per_row, per_element) = table.config.embedding_dim, OPTIMIZER_STATE[planned]
    held, counted = kinds.count("row") + kinds.count("element") * dim, per_row + per_element * dim
    if held > counted:
        raise ConfigError(
            f"table {table.config.name!r}: the plan has room for {counted} numbers of optimizer state a row "
            f"(optimizer = {planned!r}), {type(optimizer).__name__} keeps {held}: ranks may run out of memory.",
            "Plan the table with the optimizer that the model is fused with.",
        )


def _replaced(model: nn.Module, sharded: dict[int, ShardedCollection]) -> nn.Module:
    if id(model) in sharded:
        return sharded[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in sharded:
                setattr(parent, name, sharded[id(child)])
    return model


def _give_router(model: nn.Module, host_group: dist.ProcessGroup | None) -> None:
    """Let the collections share a router for KeyedJaggedTensors, which is made when the first one comes."""
    from tpurec.sharding.batch_router import BatchRouter

    made: list[BatchRouter] = []
    collections = sharded_collections(model)

    def router() -> BatchRouter:
        if not made:
            made.append(BatchRouter.of_collections(collections, host_group))
        return made[0]

    for collection in collections:
        collection.give_router(router)


def sharded_collections(model: nn.Module) -> list[ShardedCollection]:
    """The sharded collections of a model.

    Args:
        model: any module.

    Returns:
        Each once, in the order of their numbers.
    """
    found = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return sorted(found, key=lambda collection: collection.number)


def exchange_of(model: nn.Module) -> Exchange | None:
    """The exchange of a model.

    Args:
        model: of `shard`.

    Returns:
        It; None at world size 1, where nothing is exchanged.

    Raises:
        ConfigError: the model has no tables that `shard` has seen.
    """
    collections = sharded_collections(model)
    if collections:
        return collections[0].exchange
    if next(fused_collections(model), None) is None:
        raise ConfigError(f"{type(model).__name__} has no sharded collection.", "Call shard first.")
    return None


def exchange_stats(model: nn.Module) -> dict[str, Any]:
    """Count what the collectives of a model carried, measured where they are called.

    Args:
        model: of `shard`.

    Returns:
        steps; exchange_bytes_per_step, the mean that left this rank; bytes_per_step and collectives_per_kind by kind;
        collectives_per_step.
    """
    exchange = exchange_of(model)
    counts = None if exchange is None else exchange.wire.counts
    steps = counts.steps if counts else 0
    per_step = max(steps, 1)
    bytes_by_kind = {kind: size / per_step for kind, size in counts.bytes.items()} if counts else {}
    calls = {kind: number / per_step for kind, number in counts.collectives.items()} if counts else {}
    return {
        "steps": steps,
        "exchange_bytes_per_step": sum(bytes_by_kind.values()),
        "bytes_per_step": bytes_by_kind,
        "collectives_per_kind": calls,
        "collectives_per_step": sum(calls.values()),
    }


def checkpoint_pieces(model: nn.Module) -> list[TensorPiece]:
    """What this rank holds of a model's tables and their optimizer state, as views.

    Args:
        model: of `shard`, or unsharded.

    Returns:
        Pieces under the unsharded model's names: `model.PATH.embedding_bags.NAME.weight` and
        `optimizer.PATH.embedding_bags.NAME.sum`.
    """
    return pieces_of(model, "model.", "optimizer.")
