"""What one table costs under one sharding: seconds by part of the step, and bytes of memory.

A training step is a chain of parts that all ranks go through together, because collectives make them wait:

    exchange_ids      even, padded all-to-all of ids to the owners
    rows              at the owners: rows read and pooled; and, after the dense part, duplicates combined and one
    optimizer
                      step on the rows touched. No rank waits between the update of a step and the lookup of the next
                      (ids are exchanged one batch ahead), so the two are one part
    reduce_host, reduce_line, reduce_plane   partial pools summed inside each host, or line or plane of the torus
    reduce_all        partial pools summed over the whole slice
    exchange_vectors  even all-to-all of rows or pooled vectors to the requesters, and of gradients back
    pool              rows pooled by the requesters, or copied to ids of sequences, and their gradients summed per row
    all_reduce        gradients of replicated tables and of the dense model
    dense             dense model, forward and backward

A part takes as long as on its slowest rank, so a step takes the sum over parts of the maximum over ranks. No overlap
between parts is assumed. The loads of a choice are `uniform` (the same on every rank) and `lump` (on each of the ranks
that own a shard). Memory adds up in columns too: one per stack, whose rows are equal on all ranks (`design`: all ranks
run one program), so a stack takes everywhere what it takes on its fullest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.skew import exponent_of, hottest_share, unique_rows
from tpurec.sharding.tables import OPTIMIZER_STATE, TableSpec
from tpurec.topology import collectives
from tpurec.topology.slices import SliceTopology

PARTS = (
    "exchange_ids",
    "rows",
    "reduce_host",
    "reduce_line",
    "reduce_plane",
    "exchange_vectors",
    "pool",
    "reduce_all",
    "all_reduce",
)
GROUP_PARTS = {"host": "reduce_host", "line": "reduce_line", "plane": "reduce_plane"}
LATENCY_FLAGS = ("exchange", "reduce_all", "reduce_host", "reduce_line", "reduce_plane", "squares")


@dataclass(frozen=True)
class Stack:
    """Rows of one shape that share a storage: tables, or column shards of them, of one width, dtype and optimizer.

    Args:
        width: elements of a row: the shard's columns. Rows follow one another without gaps.
        dtype: of the weights.
        optimizer: which state the rows carry.
    """

    width: int
    dtype: str
    optimizer: str


class CostModel:
    """Costs on one slice with one batch size; every method returns seconds or bytes of one rank.

    Args:
        slice_: the slice.
        batch_size: global examples per step.
        assumptions: with no None left (`Assumptions.on`).
    """

    def __init__(self, slice_: SliceTopology, batch_size: int, assumptions: Assumptions) -> None:
        self.slice, self.batch_size, self.assume = slice_, batch_size, assumptions
        self.num_ranks = slice_.num_ranks
        self.local_batch = batch_size / self.num_ranks
        links = assumptions.links()
        self.all_to_all = collectives.all_to_all(slice_, links)
        self.reduce_all = collectives.reduce_scatter(slice_, links)
        self.all_reduce = collectives.all_reduce(slice_, links)
        self.groups = _groups(slice_)
        self.group_reduce = {
            kind: collectives.block_reduce_scatter(slice_, links)
            if kind == "host"
            else collectives.reduce_scatter(slice_, links, dims)
            for kind, (dims, _) in self.groups.items()
        }
        self.latency = {
            "exchange": 3 * self.all_to_all.latency_seconds,  # ids, vectors, gradients
            "reduce_all": 2 * self.reduce_all.latency_seconds,  # forward, and its mirror image backward
            "squares": self.all_to_all.latency_seconds,
            **{GROUP_PARTS[kind]: 2 * cost.latency_seconds for kind, cost in self.group_reduce.items()},
        }
        core = slice_.chip.sparse_core if slice_.chip else None
        self._lanes = core.num_lanes if core else 0
        self._bundles_per_second = core.num_workers * assumptions.sparse_core_hertz if core else 0.0
        self._granule = (
            core.dma_granule_bytes if core else (512 if slice_.chip else 64)
        )  # TensorCore line; CPU cache line
        self._random = assumptions.hbm_bytes_per_second * assumptions.gather_efficiency
        self._stream = assumptions.hbm_bytes_per_second * assumptions.stream_efficiency

    def read_seconds(self, num_rows: float, width: int, element_bytes: int) -> float:
        """Read rows one by one and add them up, as the lookup does.

        Args:
            num_rows: rows read, duplicates included.
            width: elements of a row.
            element_bytes: bytes of an element.

        Returns:
            The longer of moving the bytes and issuing the inner loop's bundles.
        """
        moving = num_rows * max(width * element_bytes, self._granule) / self._random
        return max(moving, self._issue(num_rows, width, 1.0, self.assume.row_bundles))

    def stream_seconds(self, num_bytes: float) -> float:
        """Read or write memory in order.

        Args:
            num_bytes: how much.

        Returns:
            Seconds.
        """
        return num_bytes / self._stream

    def update_seconds(self, table: TableSpec, num_gradients: float, num_rows: float, width: int) -> float:
        """Sort and combine gradients, and step the rows they touch.

        Args:
            table: for its dtype and optimizer.
            num_gradients: gradient vectors that come in, duplicates included.
            num_rows: distinct rows.
            width: elements of a row.

        Returns:
            Seconds.
        """
        assume = self.assume
        per_row, per_element = OPTIMIZER_STATE[table.optimizer]
        sort = num_gradients * assume.sort_cycles / assume.tensor_core_hertz
        combine = max(
            num_gradients * max(width * assume.vector_bytes, self._granule) / self._random,
            self._issue(num_gradients, width, assume.combine_bundles, assume.row_bundles),
        )
        stored = max(width * table.element_bytes, self._granule)
        state = (self._granule if per_row else 0) + (per_element * max(4 * width, self._granule))
        step = max(
            2 * num_rows * (stored + state) / self._random,
            self._issue(num_rows, width, assume.optimizer_bundles, assume.row_bundles),
        )
        return sort + combine + step

    def _issue(self, count: float, width: int, per_vector: float, per_row: float) -> float:
        if not self._bundles_per_second:
            return 0.0  # no SparseCore: memory decides
        return count * (per_vector * ceil(width / self._lanes) + per_row) / self._bundles_per_second

    def row_bytes(self, table: TableSpec, columns: int) -> float:
        """Memory of one stored row: weights and optimizer state.

        Args:
            table: the table.
            columns: columns of the shard.

        Returns:
            Bytes.
        """
        per_row, per_element = OPTIMIZER_STATE[table.optimizer]
        return columns * table.element_bytes + 4 * (per_row + per_element * columns)

    def stored_rows(self, rows: int) -> int:
        """Rows that a shard takes in its stack.

        Args:
            rows: rows that it owns.

        Returns:
            Padded to the alignment.
        """
        return ceil(rows / self.assume.row_alignment) * self.assume.row_alignment

    def constant_seconds(self, tables: list[TableSpec]) -> dict[str, float]:
        """What the step takes beside the embeddings.

        Args:
            tables: not used by the dense model's cost, which the assumptions give.

        Returns:
            Seconds of the parts `dense` and `all_reduce`.
        """
        assume = self.assume
        flops = self.local_batch * assume.dense_flops
        return {
            "dense": flops / (assume.matmul_flops_per_second * assume.matmul_efficiency),
            "all_reduce": self.all_reduce.seconds(4.0 * assume.dense_parameters) if self.num_ranks > 1 else 0.0,
        }

    def constant_bytes(self, tables: list[TableSpec]) -> dict[str, float]:
        """Memory that every rank needs beside tables and exchange buffers.

        Args:
            tables: all tables.

        Returns:
            Bytes by use: dense_model, activations, inputs, program.
        """
        assume = self.assume
        pooled = 4 * sum(table.vectors_per_example * table.embedding_dim for table in tables)  # float32 off the wire
        ids = sum(table.ids_per_example for table in tables)
        bags = sum(len(table.features) for table in tables)
        weights = sum(f.ids_per_example for table in tables for f in table.features if f.weighted)
        example = assume.dense_input_bytes + assume.rung_padding * (4 * ids + 4 * weights) + 4 * bags
        return {
            "dense_model": float(assume.dense_parameters * assume.dense_state_bytes),
            "activations": self.local_batch * (assume.activation_copies * pooled + assume.activation_bytes),
            "inputs": assume.input_buffers * self.local_batch * example,
            "program": float(assume.program_bytes),
        }

    @property
    def capacity_bytes(self) -> float:
        """Memory that a plan may fill: what libtpu gives, less the reserve."""
        return self.assume.hbm_bytes * (1 - self.assume.reserve_share)


class TableTraffic:
    """How many ids, bags and distinct rows one table has in a step.

    Args:
        table: the table.
        model: for batch size and ranks.
    """

    def __init__(self, table: TableSpec, model: CostModel) -> None:
        rows = table.num_embeddings
        self.exponent = exponent_of(table, model.assume.zipf_exponent)
        self.ids = model.batch_size * table.ids_per_example
        self.local_ids = self.ids / model.num_ranks
        self.vectors = model.batch_size * table.vectors_per_example
        self.unique = unique_rows(rows, self.exponent, self.ids)
        self.local_unique = unique_rows(rows, self.exponent, self.local_ids)
        self.hottest = hottest_share(rows, self.exponent)

    def fullest_share(self, num_owners: int) -> float:
        """Share of all ids, duplicates included, that the owner of the hottest row gets under modulo.

        Args:
            num_owners: ranks that own rows.

        Returns:
            At least 1 / num_owners.
        """
        return self.hottest + (1 - self.hottest) / num_owners


def _groups(slice_: SliceTopology) -> dict[str, tuple[tuple[int, ...], list[list[int]]]]:
    """Sets of ranks that reduce among themselves: hosts, lines of the longest dimension, planes of the two longest.

    Only those that are larger than one rank and smaller than the slice, and of different sizes.
    """
    if slice_.chip is None:
        return {}
    found: dict[str, tuple[tuple[int, ...], list[list[int]]]] = {}
    sizes = {1, slice_.num_ranks}
    order = sorted(range(len(slice_.dims)), key=lambda dim: (-slice_.dims[dim], -dim))
    ways: list[tuple[str, tuple[int, ...]]] = [("host", ()), ("line", tuple(order[:1]))]
    if len(order) == 3:
        ways.append(("plane", tuple(sorted(order[:2]))))
    for kind, dims in ways:
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(slice_.num_ranks):
            at = slice_.coordinates(rank)
            key = (slice_.host(rank),) if kind == "host" else tuple(at[d] for d in range(len(at)) if d not in dims)
            members.setdefault(key, []).append(rank)
        ranks = [members[key] for key in sorted(members)]
        if len(ranks[0]) not in sizes:
            sizes.add(len(ranks[0]))
            found[kind] = (dims, ranks)
    return found
