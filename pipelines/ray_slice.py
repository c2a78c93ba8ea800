"""What a slice is called in Ray, and whether the cluster has it. Facts as of Ray 2.60 (`ray.util.tpu`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpurec.errors import ConfigError, TpurecError
from tpurec.topology.slices import SliceTopology

SLICE_NAME, WORKER_ID = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
POD_TYPE, TOPOLOGY = "ray.io/tpu-pod-type", "ray.io/tpu-topology"
_GENERATIONS = {"v5e": "TPU-V5LITEPOD", "v5p": "TPU-V5P", "v6e": "TPU-V6E", "7x": "TPU-V7X"}


@dataclass(frozen=True)
class SliceRequest:
    """A slice in Ray's words.

    Args:
        topology: the slice.
    """

    topology: SliceTopology

    @property
    def accelerator_type(self) -> str:
        """Such as `TPU-V6E`."""
        chip = self.topology.chip
        assert chip is not None, "a CPU slice is no TPU"
        return _GENERATIONS[chip.name]

    @property
    def pod_type(self) -> str:
        """The label `ray.io/tpu-pod-type` of its nodes, such as `v6e-16`; v5p and 7x count TensorCores."""
        chip = self.topology.chip
        assert chip is not None, "a CPU slice is no TPU"
        cores = chip.num_tensor_cores if self.accelerator_type in ("TPU-V5P", "TPU-V7X") else 1
        return f"{self.accelerator_type.removeprefix('TPU-').lower()}-{self.topology.num_chips * cores}"

    def scaling(self) -> dict[str, Any]:
        """Arguments for Ray Train's ScalingConfig: one worker per torch device, not one per host as is its default.

        Returns:
            Keyword arguments.
        """
        return {
            "num_workers": self.topology.num_ranks,
            "use_tpu": True,
            "topology": self.topology.shape,
            "accelerator_type": self.accelerator_type,
            "resources_per_worker": {"TPU": 1, "CPU": 1},
        }

    def wanted(self) -> str:
        """Describe it for people.

        Returns:
            A clause.
        """
        slice_ = self.topology
        return (
            f"{slice_.num_hosts} nodes of one slice with {slice_.ranks_per_host} TPUs each, "
            f"{POD_TYPE} = {self.pod_type!r}, {TOPOLOGY} = {slice_.shape!r}"
        )


def check_cluster(request: SliceRequest, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a cluster that lacks the slice; else Ray would wait for it without a word.

    Args:
        request: the slice.
        nodes: of `ray.nodes()`.

    Raises:
        TpurecError: what is wanted, and what the cluster has.
    """
    slices = slices_of(nodes)
    wanted = request.topology.num_ranks
    for found in slices:
        fits = (found.pod_type, found.topology) == (request.pod_type, request.topology.shape)
        if fits and found.num_tpus == wanted and found.num_nodes == request.topology.num_hosts:
            return
    has = "; ".join(map(str, slices)) if slices else "no node with a TPU"
    raise TpurecError(
        f"this Ray cluster lacks the slice {request.topology.name}: wanted are {request.wanted()}; it has {has}.",
        "Start the cluster on that slice, or set sharding.slice to one that is there.",
    )


@dataclass(frozen=True)
class FoundSlice:
    """TPU nodes of a cluster that belong together.

    Args:
        name: of the slice.
        pod_type: as the nodes are labelled.
        topology: as the nodes are labelled.
        num_nodes: nodes that are alive.
        num_tpus: their TPU resources.
    """

    name: str
    pod_type: str
    topology: str
    num_nodes: int
    num_tpus: int

    def __str__(self) -> str:
        kind = f"{self.pod_type or 'of unknown type'}, {self.topology or 'of unknown topology'}"
        return f"slice {self.name!r} ({kind}): {self.num_nodes} nodes with {self.num_tpus} TPUs in all"


def slices_of(nodes: Iterable[Mapping[str, Any]]) -> list[FoundSlice]:
    """Group the TPU nodes of a cluster by slice.

    Args:
        nodes: of `ray.nodes()`.

    Returns:
        The slices, by name; a node without a slice's name is one of its own.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        if node["Alive"] and node["Resources"].get("TPU"):
            groups.setdefault(node["Labels"].get(SLICE_NAME) or node["NodeID"][:8], []).append(node)
    found = []
    for name, members in sorted(groups.items()):
        labels = members[0]["Labels"]
        tpus = int(sum(node["Resources"]["TPU"] for node in members))
        found.append(FoundSlice(name, labels.get(POD_TYPE, ""), labels.get(TOPOLOGY, ""), len(members), tpus))
    return found


def check_devices_per_chip(topology: SliceTopology, per_chip: int) -> None:
    """Refuse to count chips where devices are meant: Ray would take twice the slices.

    Args:
        topology: the slice.
        per_chip: TPU resources that Ray counts per chip, `ray._private.accelerators.tpu.get_tpu_resource_per_chip()`.

    Raises:
        ConfigError: Ray counts otherwise.
    """
    if per_chip != topology.ranks_per_chip:
        raise ConfigError(
            f"a chip of {topology.name} has {topology.ranks_per_chip} torch devices, but Ray counts {per_chip} TPU per "
            "chip.",
            f"Set RAY_TPU_RESOURCE_PER_CHIP={topology.ranks_per_chip} on every node before `ray start`, and here.",
        )
