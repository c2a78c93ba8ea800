"""Which host and device of a slice is which rank of a plan. Plain arithmetic; needs neither Ray nor a TPU.

A plan's rank r sits at `SliceTopology.coordinates(r)`. Hosts of a slice are numbered with x fastest, then y, then z:
torch_tpu 0.2 numbers its nodes so (`_calculate_topological_node_rank`), and the devices of a host are taken to be
numbered alike. On 7x, a chip's two devices are neighbours. Processes are ranked host after host, device after device,
as torch_tpu's own launcher ranks them; the plan is relabelled to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tpurec.errors import TpurecError
from tpurec.sharding.plan import Plan, Shard
from tpurec.topology.slices import SliceTopology


@dataclass(frozen=True)
class Place:
    """A torch device on a slice.

    Args:
        host: number of its host within the slice.
        device: number of the device on its host.
    """

    host: int
    device: int


def place_of(topology: SliceTopology, rank: int) -> Place:
    """Return where a rank of a plan runs.

    Args:
        topology: the slice.
        rank: 0 to `num_ranks - 1`.

    Returns:
        Its host and device.

    >>> [place_of(SliceTopology.parse("v6e-16"), rank) for rank in (0, 1, 4)]
    [Place(host=0, device=0), Place(host=0, device=2), Place(host=2, device=0)]
    """
    coordinates, inside = topology.coordinates(rank), topology.host_dims
    hosts = [extent // part for extent, part in zip(topology.dims, inside, strict=True)]
    host = _x_fastest([at // part for at, part in zip(coordinates, inside, strict=True)], hosts)
    chip = _x_fastest([at % part for at, part in zip(coordinates, inside, strict=True)], inside)
    return Place(host, chip * topology.ranks_per_chip + rank % topology.ranks_per_chip)


def on_devices(plan: Plan) -> Plan:
    """Name the owners of a plan's shards by the ranks of the processes that run on their chips.

    Args:
        plan: by ranks of the slice.

    Returns:
        The same plan, by ranks of processes: host number times devices a host, plus device number.
    """
    topology = plan.topology
    if topology.chip is None:
        return plan
    places = [place_of(topology, rank) for rank in range(topology.num_ranks)]
    processes = [place.host * topology.ranks_per_host + place.device for place in places]

    def moved(shard: Shard) -> Shard:
        return dataclasses.replace(shard, ranks=tuple(processes[rank] for rank in shard.ranks))

    tables = [dataclasses.replace(placed, shards=tuple(map(moved, placed.shards))) for placed in plan.tables]
    return dataclasses.replace(plan, tables=tuple(tables))


def ranks_of_workers(topology: SliceTopology, found: Sequence[Place]) -> list[int]:
    """Return the rank of each worker's process.

    Args:
        topology: the slice.
        found: for each worker where it runs, in any order.

    Returns:
        For each worker its rank.

    Raises:
        TpurecError: the workers are not on all devices of the slice, once each.
    """
    per_host = topology.ranks_per_host
    ranks = {Place(*divmod(rank, per_host)): rank for rank in range(topology.num_ranks)}
    strange = [place for place in found if place not in ranks]
    missing = [place for place in ranks if place not in set(found)]
    if strange or missing or len(found) != len(ranks):
        wrong = f"{len(found)} workers for {len(ranks)} devices"
        if missing:
            wrong = f"no worker runs on host {missing[0].host}, device {missing[0].device}"
        if strange:
            wrong = f"a worker runs on host {strange[0].host}, device {strange[0].device}, which {topology.name} lacks"
        raise TpurecError(
            f"the workers do not cover {topology.name} ({topology.num_hosts} hosts with {per_host} "
            f"devices each): {wrong}.",
            "Is another job on the slice? Are the labels ray.io/tpu-worker-id those of the hosts?",
        )
    return [ranks[place] for place in found]


def _x_fastest(at: Sequence[int], dims: Sequence[int]) -> int:
    index = 0
    for position, extent in zip(reversed(at), reversed(dims), strict=True):
        index = index * extent + position
    return index
