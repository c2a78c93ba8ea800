"""What ranks do for `test_sequence_exchange.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from tests.sharding.exchange_cases import (
    OPTIMIZERS,
    Case,
    batches_of,
    build,
    configs_of,
    cut,
    gathered,
    plan_of,
    sequence_configs_of,
    sum_of_places,
)
from tpurec.embeddings import FusedEmbeddingBagCollection, FusedEmbeddingCollection, deferred_tables
from tpurec.embeddings.fuse import fused_optimizer_state_dict
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.dense_parallel import dense_gradient_reducer
from tpurec.sharding.modules import exchange_stats, shard
from tpurec.sharding.plan import Plan


def outputs(rank: int, case: Case) -> list[str]:
    """What differs between the two collections' outputs for this rank's examples."""
    num_ranks = dist.get_world_size()
    configs = sequence_configs_of(case)
    configs[2].feature_names = ["f2_0", "f0_0"]  # the latter is a feature of two tables

    def make() -> FusedEmbeddingCollection:
        torch.manual_seed(0)
        return FusedEmbeddingCollection(configs, OPTIMIZERS[case.optimizer], need_indices=True).double()

    alone, model = make(), shard(make(), plan_of(case, num_ranks))
    batch = batches_of(case)[0].part(*cut(case, rank, num_ranks)).jagged(True)  # the weights are not looked at
    wanted, found = alone(batch), model(BatchRouter(model).prepare(batch))
    wrong = [] if list(wanted) == list(found) else [f"{list(found)} for {list(wanted)}"]
    for name, one in wanted.items():
        other = found[name]
        parts = ((one.values(), other.values()), (one.lengths(), other.lengths()), (one.weights(), other.weights()))
        for what, (left, right) in zip(("values", "lengths", "ids"), parts, strict=True):
            if left.shape != right.shape or not torch.equal(left, right.to(left.dtype)):
                wrong.append(f"{what} of {name}")
    skipped = {name: (found[name].weights() == -1) for name in found}
    if not any(mask.any() for mask in skipped.values()):
        wrong.append("no id is skipped; the case proves nothing")
    return wrong


class BagsAndSequences(nn.Module):
    """Two collections that read the same features, the first with weights."""

    def __init__(self, bags: nn.Module, sequences: nn.Module) -> None:
        super().__init__()
        self.bags, self.sequences = bags, sequences

    def forward(self, features):
        pooled = self.bags(features).values()
        return (pooled**2).sum() + sum((sum_of_places(one) ** 2).sum() for one in self.sequences(features).values())


def bags_and_sequences(rank: int, case: Case, inline: bool) -> dict:
    """Train both kinds on the same features; how far tables and state are from those of one process."""
    num_ranks = dist.get_world_size()
    sequences = sequence_configs_of(case)
    for config in sequences:
        config.name = f"s{config.name}"

    def make() -> BagsAndSequences:
        torch.manual_seed(3)
        bags = FusedEmbeddingBagCollection(configs_of(case), OPTIMIZERS["adamw"], case.weighted)
        return BagsAndSequences(bags, FusedEmbeddingCollection(sequences, OPTIMIZERS["adam"])).double()

    alone, model = make(), shard(make(), with_sequences(plan_of(case, num_ranks)))
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    start = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    for batch in batches_of(case):
        alone(batch.jagged(case.weighted)).backward()
        mine = batch.part(*cut(case, rank, num_ranks)).jagged(case.weighted)
        model(mine if inline else router.prepare(mine).features).backward()
        reducer.reduce()
    assert all(not torch.equal(start[name], tensor) for name, tensor in alone.state_dict().items())
    wanted = {f"model.{name}": tensor for name, tensor in alone.state_dict().items()}
    wanted |= {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(alone).items()}
    found = gathered(model)
    worst = max((found[name] - tensor).abs().max().item() for name, tensor in wanted.items())
    return {"worst": worst, "collectives": exchange_stats(model)["collectives_per_step"]}


def with_sequences(plan: Plan) -> Plan:
    """A plan with every table twice: for the bags, and as `sNAME` for the sequences."""
    again = []
    for placed in plan.tables:
        features = tuple(replace(feature, name=f"s{feature.name}") for feature in placed.table.features)
        again.append(replace(placed, table=replace(placed.table, name=f"s{placed.name}", features=features)))
    return replace(plan, tables=(*plan.tables, *again))


def deferred(rank: int, case: Case) -> list[str]:
    """Names of tensors that do not start as those of the unsharded model do."""
    with deferred_tables():
        model = build(case)
    found = gathered(shard(model, plan_of(case, dist.get_world_size())))
    alone = build(case)
    wanted = {f"model.{name}": tensor for name, tensor in alone.state_dict().items() if name.startswith("embeddings")}
    wanted |= {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(alone).items()}
    assert wanted.keys() == found.keys()
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor.double())]


def half_frozen(rank: int, case: Case) -> dict:
    """Freeze every other table and train; which keep their bits."""
    num_ranks = dist.get_world_size()
    unsharded = build(case)
    names = [f"t{number}" for number in range(len(case.tables))]
    for name in names[::2]:
        unsharded.embeddings.embeddings[name].weight.requires_grad_(False)
    model = shard(unsharded, plan_of(case, num_ranks))
    router, reducer, before = BatchRouter(model), dense_gradient_reducer(model), gathered(model)
    for batch in batches_of(case):
        routed = router.prepare(batch.part(*cut(case, rank, num_ranks)).jagged(False))
        (model.look_up(routed.features) ** 2).sum().backward()
        reducer.reduce()
    after = gathered(model)
    keys = [f"model.embeddings.embeddings.{name}.weight" for name in names]
    return {"kept": [bool(torch.equal(before[key], after[key])) for key in keys]}
