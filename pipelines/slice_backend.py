"""The process group of Ray Train's workers, ranked by where they run, with the environment that torch_tpu needs.

Ray 2.60 orders workers by the name of their slice or the id of their node, not by where they are on the slice. So each
worker says where it runs and is given the rank of that place (`pipelines.slice_ranks`); then all join the group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from pipelines.ray_slice import WORKER_ID
from pipelines.slice_ranks import Place, ranks_of_workers
from pipelines.world import TIMEOUT
from tpurec.errors import TpurecError
from tpurec.topology.slices import SliceTopology

BASE_PORT = 8070  # torch_tpu's own default; one port a device


@dataclass
class SliceConfig(TorchConfig):
    """Ray Train's TorchConfig, for a plan.

    Args:
        slice: the plan's slice; None for CPU workers, whose order does not matter.
    """

    backend: str | None = "gloo"
    timeout_s: int = int(TIMEOUT.total_seconds())
    slice: str | None = None

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray calls at start and end."""
        return SliceBackend


class SliceBackend(Backend):
    """Starts the process group."""

    def on_start(self, worker_group: Any, backend_config: SliceConfig) -> None:
        """Give each worker its rank, and let all join.

        Args:
            worker_group: Ray Train's workers.
            backend_config: how.
        """
        import ray

        workers = worker_group.execute(whereabouts)
        if backend_config.slice is None:
            ranks = list(range(len(workers)))
            hosts: list[str] = []
        else:
            topology = SliceTopology.parse(backend_config.slice)
            places = [Place(worker["host"], worker["device"]) for worker in workers]
            ranks = ranks_of_workers(topology, places)
            by_host = {worker["host"]: worker["address"] for worker in workers}
            hosts = [by_host[number] for number in sorted(by_host)]
        first = workers[ranks.index(0)]
        nodes = [worker["node"] for worker in workers]
        joining = []
        for number, rank in enumerate(ranks):
            place = {
                "rank": rank,
                "num_ranks": len(ranks),
                "processes_here": nodes.count(nodes[number]),
                "init_method": f"tcp://{first['address']}:{first['port']}",
                "backend": backend_config.backend,
                "timeout_s": backend_config.timeout_s,
                "slice": backend_config.slice,
                "host": workers[number]["host"],
                "device": workers[number]["device"],
                "hosts": hosts,
            }
            joining.append(worker_group.execute_single_async(number, join, place))
        ray.get(joining)

    def on_shutdown(self, worker_group: Any, backend_config: SliceConfig) -> None:
        """Leave it to the end of the processes: after a failure, leaving the group would wait for the lost one."""


def whereabouts() -> dict[str, Any]:
    """Say where this worker runs; called in it.

    Returns:
        `node`, `address`, a free `port`, and of a TPU worker `host` (its number within the slice) and `device`.
    """
    import socket

    import ray

    context = ray.get_runtime_context()
    devices = [int(number) for number in context.get_accelerator_ids().get("TPU", [])]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {
        "node": context.get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "port": port,
        "host": int(context.get_node_labels().get(WORKER_ID) or 0),
        "device": devices[0] if devices else 0,
    }


def join(place: dict[str, Any]) -> None:
    """Join the process group; called in each worker.

    Args:
        place: as `SliceBackend.on_start` makes it.
    """
    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = str(place["processes_here"])
    if place["backend"] == "tpu_dist":
        set_environment(place)
        import torch_tpu  # noqa: F401  registers the device and the backend
    dist.init_process_group(
        place["backend"],
        init_method=place["init_method"],
        rank=place["rank"],
        world_size=place["num_ranks"],
        timeout=timedelta(seconds=place["timeout_s"]),
    )


def set_environment(place: dict[str, Any]) -> None:
    """Set what torch_tpu reads (`torch_tpu/_internal/distributed`), and refuse what somebody set otherwise.

    Args:
        place: as `SliceBackend.on_start` makes it.

    Raises:
        TpurecError: a variable has another value already.
    """
    for name, value in launch_environment(place).items():
        found = os.environ.get(name)
        if found not in (None, value):
            raise TpurecError(
                f"worker on host {place['host']}, device {place['device']}: {name} = {found!r}, {value!r} is needed.",
                "Remove it from the environment of the Ray nodes.",
            )
        os.environ[name] = value


def launch_environment(place: dict[str, Any]) -> dict[str, str]:
    """The variables of one worker.

    Args:
        place: as `SliceBackend.on_start` makes it.

    Returns:
        Names and values.
    """
    topology = SliceTopology.parse(place["slice"])
    shape = [*topology.dims, 1][:3]  # torch_tpu writes 4,4,1 for a 4x4
    per_host = topology.ranks_per_host
    addresses = [f"{host}:{BASE_PORT + device}" for host in place["hosts"] for device in range(per_host)]
    return {
        "TORCH_TPU_TOPOLOGY": ",".join(map(str, shape)),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(addresses),
        "NNODES": str(topology.num_hosts),
        "NODE_RANK": str(place["host"]),
        "LOCAL_RANK": str(place["device"]),
        "RANK": str(place["rank"]),
        "WORLD_SIZE": str(place["num_ranks"]),
        "LOCAL_WORLD_SIZE": str(per_host),
    }
