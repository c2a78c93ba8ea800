"""TorchRec's EmbeddingShardingPlanner on the same problems, and its estimator's opinion of our plans.

For `tpu` TorchRec 1.9.2 counts no HBM. Here, and only here, that is patched by asking for the accounting that it has
for other accelerators (`compute_device="cuda"`), with this slice's memory and bandwidths and one host's ranks as its
"node".
"""

from __future__ import annotations

import time
from typing import Any

from tpurec.sharding.plan import Plan
from tpurec.sharding.planner import evaluate
from tpurec.sharding.tables import TableSpec
from tpurec.sharding.torchrec_plan import placed_from_torchrec
from tpurec.topology.slices import SliceTopology


def run(tables: list[TableSpec], slice_: SliceTopology, batch_size: int, ours: Plan | None) -> dict[str, Any]:
    """Plan with TorchRec, cost its plan by our model, and both plans by its estimator.

    Args:
        tables: the tables.
        slice_: the slice.
        batch_size: global examples per step.
        ours: our plan, for its estimator to judge.

    Returns:
        plan_seconds, error, our model's view of its plan, and its estimator's milliseconds for both.
    """
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    chip = slice_.chip
    assert chip is not None
    topology = Topology(
        world_size=slice_.num_ranks,
        compute_device="cuda",
        hbm_cap=chip.usable_hbm_bytes,
        local_world_size=slice_.ranks_per_host,
        hbm_mem_bw=chip.hbm_bytes_per_second_per_device / 1000,  # its unit is bytes per millisecond
        intra_host_bw=chip.ici_bytes_per_second / 2 / chip.num_devices / 1000,
        inter_host_bw=chip.ici_bytes_per_second / 2 / chip.num_devices / 1000,
    )
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise"],
            compute_kernels=["fused", "dense"],
            pooling_factors=[feature.ids_per_example for feature in table.features],
            min_partition=8,
        )
        for table in tables
    }
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[feature.name for feature in table.features],
        )
        for table in tables
    ]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    local_batch = batch_size // slice_.num_ranks
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=local_batch, constraints=constraints, debug=False)
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    try:
        sharding = planner.plan(module, sharders)
    except PlannerError as error:
        return {"plan_seconds": time.perf_counter() - begun, "error": " ".join(str(error).split())[:200]}
    found["plan_seconds"] = time.perf_counter() - begun
    placed = placed_from_torchrec(sharding, tables, slice_)
    view = evaluate(placed, slice_, batch_size)
    found["our_model"] = {
        "step_seconds": view.step_seconds,
        "hbm_bytes_max": view.hbm_bytes_max,
        "fits": view.hbm_bytes_max <= view.hbm_bytes_budget,
        "idle_ranks": view.idle_ranks,
    }
    options = EmbeddingEnumerator(topology=topology, batch_size=local_batch, constraints=constraints).enumerate(
        module, sharders
    )
    found["its_estimator_ms"] = _judge(options, {p.name: p for p in placed}, slice_.num_ranks)
    if ours is not None:
        found["its_estimator_ms_of_ours"] = _judge(options, {p.name: p for p in ours.tables}, slice_.num_ranks)
    return found


def _judge(options: list[Any], placed: dict[str, Any], num_ranks: int) -> float | None:
    """Milliseconds of the slowest rank by TorchRec's estimator; None if it has no option like one of the shardings."""
    load = [0.0] * num_ranks
    for name, entry in placed.items():
        kernel = "dense" if entry.sharding == "data_parallel" else "fused"
        ranks = [rank for shard in entry.shards for rank in shard.ranks]
        fitting = [
            option
            for option in options
            if (option.name, option.sharding_type, option.compute_kernel) == (name, entry.sharding, kernel)
            and len(option.shards) == len(ranks)
        ]
        if not fitting:
            return None
        for rank, shard in zip(ranks, fitting[0].shards, strict=True):
            load[rank] += shard.perf.total
    return max(load)
