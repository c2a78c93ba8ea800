"""Slices: which shapes there are, how many ranks they have, and where each rank sits on the torus.

Sources:
    docs     Cloud TPU documentation, pages v5e, v5p, v6e, tpu7x, types-topologies (read 2026-11-30): v5e and v6e shapes
             1x1 to 16x16; v5p and 7x shapes AxBxC, A <= B <= C, either all at most 4 (parts of one cube of 4x4x4) or
             all multiples of 4 (whole cubes); the largest v5p slice is 96 cubes (16x16x24), a 7x pod is 144 cubes.
    xpk      google/xpk system_characteristics.py: v5p-N and tpu7x-N count TensorCores; which shape a number means
    book     jax-ml scaling book, "TPU networking": wraparound only on axes of 16 chips (v5e, v6e) or from 4x4x4 on
             (v5p, 7x)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from tpurec.errors import ConfigError
from tpurec.topology.chips import CHIPS, Chip, chip

_PLANE_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))  # docs
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # docs, xpk
_MAX_SLICE_CHIPS = {"v5p": 6144, "7x": 9216}  # docs; a whole v5p pod (8960) cannot be had as one slice
_LONGEST_AXIS = {"v5p": 244, "7x": 244}  # xpk: the longest axis in its list of shapes
MAX_CPU_RANKS = 1024


@dataclass(frozen=True)
class SliceTopology:
    """A slice: chips wired to a torus or mesh, seen as ranks (torch devices).

    Ranks are host-major, then chip-major: the ranks of one host are consecutive, and so are the two of one 7x chip.
    Hosts, and the chips inside one, are counted with the first coordinate running fastest.

    Args:
        name: canonical name, such as `v6e-64`, `v5p-128` or `tpu7x:4x4x4`.
        chip: facts of its generation; None for CPU slices, whose ranks are processes that talk through gloo.
        dims: chips along each torus dimension; `(num_ranks,)` for CPU slices.
        host_dims: chips of one host along each dimension.
        wraparound: whether each dimension closes to a ring.
    """

    name: str
    chip: Chip | None
    dims: tuple[int, ...]
    host_dims: tuple[int, ...]
    wraparound: tuple[bool, ...]

    @classmethod
    def parse(cls, text: str) -> SliceTopology:
        """Read a slice name.

        Args:
            text: `v6e-64`, `v5e-16` (chips), `v5p-128`, `tpu7x-128` (TensorCores, two a chip), `v6e:8x8`,
                `tpu7x:4x4x4` (a shape), or `cpu-4` (ranks). `v5litepod-16` is understood as `v5e-16`.

        Returns:
            The slice.

        Raises:
            ConfigError: no such generation, number or shape; the text names the nearest ones that exist.

        >>> SliceTopology.parse("v5p-128").dims
        (4, 4, 4)
        """
        match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)*))", text.strip().lower())
        if match is None:
            raise ConfigError(
                f"slice {text!r} is not understood.", "Write it like v6e-64, v5p-128, tpu7x:4x4x4 or cpu-4."
            )
        generation, number, shape = match.groups()
        if generation == "cpu":
            return cls._cpu(text, number)
        try:
            facts = chip("v5e" if generation in ("v5litepod", "v5lite") else generation)
        except ConfigError as error:
            raise ConfigError(f"slice {text!r}: {error.problem}", f"{error.remedy} Write it like v6e-64.") from None
        if number is not None:
            return cls._of_number(facts, text, int(number))
        dims = tuple(int(part) for part in shape.split("x"))
        if dims not in _shapes(facts.name):
            raise ConfigError(
                f"slice {text!r}: Google offers no {facts.name} slice of {shape} chips.", _nearest(facts, prod(dims))
            )
        return cls._of_shape(facts, dims)

    @classmethod
    def _cpu(cls, text: str, number: str | None) -> SliceTopology:
        if number is None or not 1 <= int(number) <= MAX_CPU_RANKS:
            raise ConfigError(f"slice {text!r}: a CPU slice has 1 to {MAX_CPU_RANKS} ranks.", "Write it like cpu-4.")
        ranks = int(number)
        return cls(f"cpu-{ranks}", None, (ranks,), (ranks,), (False,))

    @classmethod
    def _of_number(cls, facts: Chip, text: str, number: int) -> SliceTopology:
        cores = _cores_in_name(facts)
        dims = _default_shapes(facts.name).get(number // cores) if number % cores == 0 else None
        if dims is None:
            unit = "TensorCores" if cores > 1 else "chips"
            raise ConfigError(
                f"slice {text!r}: Google offers no {facts.name} slice of {number} {unit}.",
                _nearest(facts, number / cores),
            )
        return cls._of_shape(facts, dims)

    @classmethod
    def _of_shape(cls, facts: Chip, dims: tuple[int, ...]) -> SliceTopology:
        chips = prod(dims)
        if facts.torus_dims == 2:
            host = dims if chips <= 8 else (2, 2)  # docs: slices above 8 chips are made of 4-chip VMs
            closed = tuple(extent % facts.wraparound_multiple == 0 for extent in dims)
        else:
            host = dims if chips == 1 else (2, 2, 1)
            whole_cubes = all(extent % facts.wraparound_multiple == 0 for extent in dims)
            closed = (whole_cubes,) * 3  # docs, book: 4x4x4 and larger are full tori, smaller ones have no wraparound
        return cls(_name(facts, dims), facts, dims, host, closed)

    @property
    def num_chips(self) -> int:
        """Chips; for CPU slices the number of ranks."""
        return prod(self.dims)

    @property
    def ranks_per_chip(self) -> int:
        """Torch devices per chip: two on 7x."""
        return self.chip.num_devices if self.chip else 1

    @property
    def num_ranks(self) -> int:
        """Torch devices of the slice, which is the world size."""
        return self.num_chips * self.ranks_per_chip

    @property
    def ranks_per_host(self) -> int:
        """Ranks that one host runs."""
        return prod(self.host_dims) * self.ranks_per_chip

    @property
    def num_hosts(self) -> int:
        """Hosts (VMs) of the slice."""
        return self.num_chips // prod(self.host_dims)

    @property
    def shape(self) -> str:
        """Shape text, such as `8x8`."""
        return "x".join(map(str, self.dims))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank's chip sits on the torus.

        Args:
            rank: 0 to `num_ranks - 1`.

        Returns:
            One coordinate per torus dimension; both ranks of a 7x chip have the same ones.

        Raises:
            ConfigError: there is no such rank.

        >>> SliceTopology.parse("v6e-16").coordinates(5)
        (3, 0)
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is not on {self.name}.", f"It has ranks 0 to {self.num_ranks - 1}.")
        host, inside = divmod(rank // self.ranks_per_chip, prod(self.host_dims))
        hosts = tuple(extent // part for extent, part in zip(self.dims, self.host_dims, strict=True))
        corner = _unravel(host, hosts)
        offset = _unravel(inside, self.host_dims)
        return tuple(c * part + o for c, part, o in zip(corner, self.host_dims, offset, strict=True))

    def host(self, rank: int) -> int:
        """The host that runs a rank.

        Args:
            rank: 0 to `num_ranks - 1`.

        Returns:
            Host number, from 0.
        """
        return rank // self.ranks_per_host

    def lines(self, dim: int) -> list[list[int]]:
        """Ranks of every line of chips along one torus dimension.

        Args:
            dim: torus dimension.

        Returns:
            One list of ranks a line, in the order of the line; a 7x chip contributes both of its ranks.
        """
        lines: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            lines.setdefault(at[:dim] + at[dim + 1 :], []).append((at[dim], rank))
        return [[rank for _, rank in sorted(lines[key])] for key in sorted(lines)]


def offered(generation: str) -> list[str]:
    """Names of all slices of a generation, smallest first.

    Args:
        generation: `v5e`, `v5p`, `v6e` or `7x`.

    Returns:
        Canonical names that `SliceTopology.parse` reads.
    """
    facts = chip(generation)
    return [_name(facts, dims) for dims in sorted(_shapes(facts.name), key=lambda dims: (prod(dims), dims[::-1]))]


def larger(slice_: SliceTopology, count: int = 3) -> list[SliceTopology]:
    """The next larger slices of the same generation, in their usual shapes.

    Args:
        slice_: where to start.
        count: how many at most.

    Returns:
        Up to `count` slices, smallest first; for CPU slices doublings.
    """
    if slice_.chip is None:
        sizes = [slice_.num_ranks * 2**step for step in range(1, count + 1)]
        return [SliceTopology.parse(f"cpu-{size}") for size in sizes if size <= MAX_CPU_RANKS]
    shapes = _default_shapes(slice_.chip.name)
    doubled: list[SliceTopology] = []
    for chips in sorted(shapes):
        if chips >= 2 * (doubled[-1] if doubled else slice_).num_chips and len(doubled) < count:
            doubled.append(SliceTopology._of_shape(slice_.chip, shapes[chips]))
    return doubled


@cache
def _shapes(generation: str) -> frozenset[tuple[int, ...]]:
    facts = CHIPS[generation]
    if facts.torus_dims == 2:
        return frozenset(_PLANE_SHAPES)
    most, longest = _MAX_SLICE_CHIPS[generation], _LONGEST_AXIS[generation]
    axis = range(4, longest + 1, 4)
    cubes = {
        (a, b, c)
        for a, b in product(range(4, 25, 4), range(4, 97, 4))
        if a <= b
        for c in axis
        if b <= c and a * b * c <= most
    }
    single = {(1, 1, 1)} if generation == "7x" else set()  # xpk: tpu7x-standard-1t
    return frozenset(cubes | set(_PARTS_OF_A_CUBE) | single)


@cache
def _default_shapes(generation: str) -> dict[int, tuple[int, ...]]:
    """Chips -> the shape that a plain number means: the most cube-like one (docs, "topology variants")."""
    best: dict[int, tuple[int, ...]] = {}
    for dims in sorted(_shapes(generation)):
        chips = prod(dims)
        if chips not in best or max(dims) - min(dims) < max(best[chips]) - min(best[chips]):
            best[chips] = dims
    return best


def _cores_in_name(facts: Chip) -> int:
    return facts.num_tensor_cores if facts.name_counts_cores else 1


def _name(facts: Chip, dims: tuple[int, ...]) -> str:
    usual = _default_shapes(facts.name)[prod(dims)] == dims
    if usual and facts.num_devices == 1:
        return f"{facts.name}-{prod(dims) * _cores_in_name(facts)}"
    return f"{facts.libtpu_name}:{'x'.join(map(str, dims))}"


def _nearest(facts: Chip, chips: float) -> str:
    shapes = _default_shapes(facts.name)
    smaller = max((count for count in shapes if count <= chips), default=None)
    bigger = min((count for count in shapes if count >= chips), default=None)
    names = [_name(facts, shapes[count]) for count in dict.fromkeys((smaller, bigger)) if count is not None]
    return f"The nearest: {', '.join(names)}."


def _unravel(index: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for extent in dims:
        index, at = divmod(index, extent)
        found.append(at)
    return tuple(found)
