"""What collectives cost on a slice: seconds from bytes, latency, link bandwidth and bisection.

W is one link, one direction. Bytes are per rank; ranks of one chip (7x) share its links. Every time is
`latency + bytes / bandwidth`, with the bandwidth of the busiest link, perfect overlap of the torus dimensions, and
no contention from other traffic. On a chip with two ranks, traffic between the two is counted as if it used no link.

Formulas:
    all-to-all, S bytes per chip, spread evenly over all chips. Dimension-ordered routing; along one dimension of k
    chips the busiest link carries, ring of even k: S k / 8 (each byte travels k/4 links on average, half each way);
    ring of odd k: S (k^2 - 1) / (8 k); line of k: S floor(k/2) ceil(k/2) / k (what crosses the middle). The dimensions
    work side by side, the slowest decides. This is the bisection bound. It is not less than what the links of one
    chip can inject. Source: jax-ml scaling book, "AllToAll" (a ring of k costs a quarter of its all-gather); Dally and
    Towles, Principles and Practices of Interconnection Networks, chapter 3 (channel load of tori and meshes).
    all-gather, V bytes gathered per chip: V (n-1)/n over the links of the least connected chip: two per ring
    dimension, one per line dimension. reduce-scatter: the same backwards. all-reduce: both. Source: scaling book,
    "A deeper dive into TPU communication primitives".
    Latency: launch, and links between the two farthest chips times the time per hop.

CPU slices: processes on one machine over gloo. A full exchange is (n-1) messages through one shared memory bus; figures
in `Links` are defaults to override, not measurements of your machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tpurec.topology.slices import SliceTopology

HOP_SECONDS = 1e-6  # scaling book: about 1 microsecond per hop (v5e: 0.5)
LAUNCH_SECONDS = 2e-6  # entering and leaving one collective; assumed
GLOO_BYTES_PER_SECOND = 2e9  # one rank over loopback TCP; assumed
GLOO_MESSAGE_SECONDS = 5e-5  # one message over loopback TCP; assumed


@dataclass(frozen=True)
class Links:
    """How fast the wires of a slice are; replace fields to model another network.

    Args:
        bytes_per_second: one link, one direction; for CPU slices what one rank can send.
        hop_seconds: latency of one link; for CPU slices of one message.
        launch_seconds: fixed cost of one collective.
    """

    bytes_per_second: float
    hop_seconds: float
    launch_seconds: float

    @classmethod
    def of(cls, slice_: SliceTopology) -> Links:
        """The documented figures of a slice.

        Args:
            slice_: the slice.

        Returns:
            Its links.
        """
        if slice_.chip is None:
            return cls(GLOO_BYTES_PER_SECOND, GLOO_MESSAGE_SECONDS, GLOO_MESSAGE_SECONDS)
        return cls(slice_.chip.ici_link_bytes_per_second, HOP_SECONDS, LAUNCH_SECONDS)


@dataclass(frozen=True)
class CollectiveCost:
    """Seconds of one collective as a linear function of bytes.

    Args:
        latency_seconds: what it costs with no bytes.
        seconds_per_byte: per byte of the argument that the making function names.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one call.

        Args:
            num_bytes: bytes per rank.

        Returns:
            Seconds.
        """
        return self.latency_seconds + self.seconds_per_byte * num_bytes


def all_to_all(
    slice_: SliceTopology, links: Links | None = None, dims: tuple[int, ...] | None = None
) -> CollectiveCost:
    """Even all-to-all; bytes are what one rank holds for all ranks together, its own part included.

    Args:
        slice_: the slice.
        links: its links; by default the documented ones.
        dims: torus dimensions that the group spans; by default all. Other dimensions run groups of their own.

    Returns:
        Cost per byte that one rank sends.

    >>> round(all_to_all(SliceTopology.parse("v6e-256")).seconds_per_byte * 1e12)  # 16 / (8 x 100 GB/s)
    20
    """
    links = links or Links.of(slice_)
    group = _Group(slice_, links, dims)
    if group.num_ranks == 1:
        return CollectiveCost(0.0, 0.0)
    if slice_.chip is None:
        return group.gloo()
    per_chip = slice_.ranks_per_chip
    if group.num_chips == 1:  # two ranks of one chip: no link is used
        return CollectiveCost(links.launch_seconds, 0.0)
    busiest = max(_busiest_link(extent, closed) for extent, closed in group.extents)
    inject = (1 - 1 / group.num_chips) / group.links_of_poorest_chip
    return CollectiveCost(group.diameter_latency, per_chip * max(busiest, inject) / links.bytes_per_second)


def all_gather(
    slice_: SliceTopology, links: Links | None = None, dims: tuple[int, ...] | None = None
) -> CollectiveCost:
    """All-gather; bytes are what every rank holds at the end.

    Args:
        slice_: the slice.
        links: its links; by default the documented ones.
        dims: torus dimensions that the group spans; by default all.

    Returns:
        Cost per gathered byte.
    """
    links = links or Links.of(slice_)
    group = _Group(slice_, links, dims)
    if group.num_ranks == 1:
        return CollectiveCost(0.0, 0.0)
    if slice_.chip is None:
        return group.gloo()
    if group.num_chips == 1:
        return CollectiveCost(links.launch_seconds, 0.0)
    moved = (1 - 1 / group.num_chips) / group.links_of_poorest_chip
    return CollectiveCost(group.diameter_latency, moved / links.bytes_per_second)


def reduce_scatter(
    slice_: SliceTopology, links: Links | None = None, dims: tuple[int, ...] | None = None
) -> CollectiveCost:
    """Reduce-scatter; bytes are what every rank holds at the start. Both ranks of a chip bring theirs.

    Args:
        slice_: the slice.
        links: its links; by default the documented ones.
        dims: torus dimensions that the group spans; by default all.

    Returns:
        Cost per byte that enters.
    """
    return all_gather(slice_, links, dims)


def all_reduce(
    slice_: SliceTopology, links: Links | None = None, dims: tuple[int, ...] | None = None
) -> CollectiveCost:
    """All-reduce: a reduce-scatter and an all-gather.

    Args:
        slice_: the slice.
        links: its links; by default the documented ones.
        dims: torus dimensions that the group spans; by default all.

    Returns:
        Cost per byte of the reduced array.
    """
    half = all_gather(slice_, links, dims)
    return CollectiveCost(2 * half.latency_seconds, 2 * half.seconds_per_byte)


def block_reduce_scatter(slice_: SliceTopology, links: Links | None = None) -> CollectiveCost:
    """Reduce-scatter among the ranks of one host, all hosts at the same time.

    Args:
        slice_: the slice.
        links: its links; by default the documented ones.

    Returns:
        Cost per byte that enters. A host's chips form a small mesh without wraparound.
    """
    links = links or Links.of(slice_)
    block = SliceTopology("host", slice_.chip, slice_.host_dims, slice_.host_dims, (False,) * len(slice_.host_dims))
    return reduce_scatter(block, links)


class _Group:
    """The part of a slice that takes part in one collective."""

    def __init__(self, slice_: SliceTopology, links: Links, dims: tuple[int, ...] | None) -> None:
        self.links = links
        chosen = range(len(slice_.dims)) if dims is None else dims
        self.extents = [(slice_.dims[dim], slice_.wraparound[dim]) for dim in chosen if slice_.dims[dim] > 1]
        self.num_chips = prod(extent for extent, _ in self.extents)
        self.num_ranks = self.num_chips * slice_.ranks_per_chip

    @property
    def links_of_poorest_chip(self) -> int:
        return sum(2 if closed else 1 for _, closed in self.extents)

    @property
    def diameter_latency(self) -> float:
        hops = sum(extent // 2 if closed else extent - 1 for extent, closed in self.extents)
        return self.links.launch_seconds + hops * self.links.hop_seconds

    def gloo(self) -> CollectiveCost:
        others = self.num_ranks - 1
        latency = self.links.launch_seconds + others * self.links.hop_seconds
        return CollectiveCost(latency, others / self.num_ranks / self.links.bytes_per_second)


def _busiest_link(extent: int, closed: bool) -> float:
    """Bytes on the busiest link of one dimension, one direction, per byte that one chip sends to everybody."""
    if not closed:
        return (extent // 2) * ((extent + 1) // 2) / extent
    return extent / 8 if extent % 2 == 0 else (extent * extent - 1) / (8 * extent)
