"""Plans to and from TorchRec's `ShardingPlan`. TorchRec is imported only when a function here runs.

What TorchRec's form cannot say: the exchange of a table, and the modulo rule (its row-wise shards are blocks of
consecutive rows). So a plan that comes back has the cheaper exchange (unless told) and the shifts of our own rule,
and the same shardings, owners and columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from tpurec.errors import ConfigError
from tpurec.sharding.assemble import Assembly, placement_of
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.plan import PlacedTable, Plan, Shard
from tpurec.sharding.planner import make_space
from tpurec.sharding.tables import SHARDINGS, TableSpec
from tpurec.topology.slices import SliceTopology

if TYPE_CHECKING:
    from torchrec.distributed.types import ParameterSharding, ShardingPlan


def to_torchrec(plan: Plan, module_path: str = "", compute_kernel: str = "fused", device: str = "cpu") -> ShardingPlan:
    """Write a plan in TorchRec's form.

    Args:
        plan: the plan.
        module_path: where the embedding collection is in the model, such as `model.sparse_arch`.
        compute_kernel: of sharded tables; replicated ones always get `dense`, the only kernel TorchRec takes for them.
        device: in the placements: `rank:3/cpu`.

    Returns:
        TorchRec's plan for that module.
    """
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    tables: dict[str, ParameterSharding] = {}
    for placed in plan.tables:
        replicated = placed.sharding == "data_parallel"
        blocks = [] if replicated else _blocks(placed, device)
        tables[placed.name] = ParameterSharding(
            sharding_type=placed.sharding,
            compute_kernel="dense" if replicated else compute_kernel,
            ranks=[rank for shard in placed.shards for rank in shard.ranks],
            sharding_spec=None if replicated else EnumerableShardingSpec(blocks),
        )
    return ShardingPlan({module_path: EmbeddingModuleShardingPlan(tables)})


def _blocks(placed: PlacedTable, device: str) -> list:
    from torch.distributed._shard.sharding_spec import ShardMetadata

    found = []
    for shard in placed.shards:
        start, stop = shard.columns
        rows = placed.table.num_embeddings
        block = ceil(rows / len(shard.ranks))  # TorchRec's rule: equal blocks, the last ranks get what is left
        for position, rank in enumerate(shard.ranks):
            first = min(position * block, rows)
            size = min(block, rows - first)
            found.append(
                ShardMetadata(
                    shard_offsets=[first, start],
                    shard_sizes=[size, stop - start],
                    placement=f"rank:{rank}/{device}",
                )
            )
    return found


def from_torchrec(
    sharding: ShardingPlan,
    tables: Sequence[TableSpec],
    slice_: SliceTopology | str,
    batch_size: int,
    assumptions: Assumptions | None = None,
    exchanges: Mapping[str, str] | None = None,
) -> Plan:
    """Read a TorchRec plan, check it and cost it.

    Args:
        sharding: TorchRec's plan; its modules' tables are taken together.
        tables: what the tables are: TorchRec's plan does not say how often they are used.
        slice_: the slice or its name.
        batch_size: global examples per step.
        assumptions: by default all defaults.
        exchanges: `unique_rows` or `partial_pools` per row-wise table; where not given, the cheaper one is taken.

    Returns:
        The plan with estimates (and no lower bound); compare `estimates.hbm_bytes_max` with `hbm_bytes_budget`.

    Raises:
        ConfigError: a table is missing, a sharding is not one of ours, or shards do not own every row and column once.
    """
    slice_ = SliceTopology.parse(slice_) if isinstance(slice_, str) else slice_
    placed = [
        dataclasses.replace(entry, exchange=(exchanges or {}).get(entry.name, entry.exchange))
        for entry in placed_from_torchrec(sharding, tables, slice_)
    ]
    space = make_space(tables, slice_, batch_size, assumptions or Assumptions())
    assembly = Assembly(space, placement_of(space, placed))
    return Plan(
        slice=slice_.name,
        batch_size=batch_size,
        tables=assembly.placed([table.name for table in tables]),
        stacks=assembly.stacks(),
        rungs=assembly.rungs(),
        assumptions=space.model.assume,
        estimates=assembly.estimates(0.0, "none"),
    )


def placed_from_torchrec(
    sharding: ShardingPlan, tables: Sequence[TableSpec], slice_: SliceTopology
) -> list[PlacedTable]:
    """Read where TorchRec puts each table.

    Args:
        sharding: TorchRec's plan.
        tables: the tables.
        slice_: for the number of ranks.

    Returns:
        Entries whose exchange is `none`: TorchRec does not say it.

    Raises:
        ConfigError: see `from_torchrec`.
    """
    entries: dict[str, ParameterSharding] = {}
    for module in sharding.plan.values():
        if not isinstance(module, Mapping):
            raise ConfigError(f"the TorchRec plan has a module plan of type {type(module).__name__}, not a mapping.")
        entries.update(module)
    found = []
    for table in tables:
        if table.name not in entries:
            raise ConfigError(f"the TorchRec plan has no table {table.name!r}.", f"It has: {', '.join(entries)}.")
        found.append(_placed(table, entries[table.name], slice_.num_ranks))
    return found


def _placed(table: TableSpec, entry: ParameterSharding, num_ranks: int) -> PlacedTable:
    way = entry.sharding_type
    if way not in SHARDINGS:
        raise ConfigError(
            f"table {table.name!r}: TorchRec's sharding type {way!r} is not known here.",
            f"Known: {', '.join(SHARDINGS)}.",
        )
    everyone = tuple(range(num_ranks))
    whole = (0, table.embedding_dim)
    if way == "data_parallel":
        return PlacedTable(table, way, "none", (Shard(everyone, "replicated", whole),))
    blocks = getattr(entry.sharding_spec, "shards", None)
    if not blocks:
        raise ConfigError(f"table {table.name!r}: the TorchRec plan lists no shards for {way}.")
    owners = [_rank(block.placement) for block in blocks]
    _check_cover(table, blocks)
    if way in ("table_wise", "column_wise"):
        shards = [
            Shard((rank,), "all", (block.shard_offsets[1], block.shard_offsets[1] + block.shard_sizes[1]))
            for rank, block in zip(owners, blocks, strict=True)
        ]
        return PlacedTable(table, way, "bags", tuple(shards))
    return PlacedTable(table, way, "none", (Shard(tuple(owners), "modulo", whole),))


def _check_cover(table: TableSpec, blocks: Sequence) -> None:
    area = sum(block.shard_sizes[0] * block.shard_sizes[1] for block in blocks)
    corners = {(block.shard_offsets[0], block.shard_offsets[1]) for block in blocks if block.shard_sizes[0] > 0}
    filled = sum(1 for block in blocks if block.shard_sizes[0] > 0)
    inside = all(
        block.shard_offsets[0] + block.shard_sizes[0] <= table.num_embeddings
        and block.shard_offsets[1] + block.shard_sizes[1] <= table.embedding_dim
        for block in blocks
    )
    if area != table.num_embeddings * table.embedding_dim or len(corners) != filled or not inside:
        raise ConfigError(
            f"table {table.name!r}: the TorchRec plan's shards do not own its {table.num_embeddings} rows x "
            f"{table.embedding_dim} columns exactly once."
        )


def _rank(placement: object) -> int:
    text = str(placement)
    head = text.split("/", 1)[0]
    if not head.startswith("rank:"):
        raise ConfigError(f"the TorchRec plan's placement {text!r} is not understood.", "Expected rank:N/device.")
    return int(head.removeprefix("rank:"))
