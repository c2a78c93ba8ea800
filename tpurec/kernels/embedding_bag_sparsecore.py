"""`embedding_bag` on the SparseCores of v5p, v6e and 7x.

The bags are cut into blocks, the blocks into one contiguous range per vector subcore, of equal cost. Each subcore reads
its range of the ids as one stream of chunks, whatever the bags in it: id lists, then the rows they name, are kept in
flight in rings while the rows that have arrived are added up.

The rows of a chunk are walked once, in order. Registers hold the running sum of the current bag; each row adds to it
and stores it over the bag's accumulator, so that what the bag's last row stores is the bag's sum. A store issues
together with the next load, so a row costs its loads (`row_words / lanes` bundles) however short the bags are; an
adding store (`vst.add`) would cost a load slot of its own, and a loop per bag its set-up for every bag.

Rows that do not count: positions outside of the block go to a spare accumulator that nobody reads; ids outside of the
table are not fetched, and what is in their place is cleared, which costs nothing where there are none.

Legend: C rows of a chunk, W words of a row, L lanes, P parts, S slots of a ring, A words of an accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpurec.errors import ConfigError
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.sparsecore_stream import RowStream, scalar_at, subcore_index, subcore_mesh
from tpurec.topology.chips import Chip, SparseCore

INT32, FLOAT32 = jnp.int32, jnp.float32
MAX_COLUMN_VECTORS = 16  # running sums held in registers at a time; a subcore has 64
SCALARS_AHEAD = 2  # bag numbers fetched a trip ahead; found by counting bundles for 0 to 4
_COMPILER = pltpu.CompilerParams(use_tc_tiling_on_sc=False, needs_layout_passes=False, disable_bounds_checks=True)


@dataclass(frozen=True)
class Config:
    """Tuning knobs; a 0 is replaced by what fits the memory of a subcore and the length of the bags.

    Args:
        chunk_rows: rows fetched by one DMA; a multiple of `step_rows`, at most 128 (the length of an index list).
        ring: row buffers; `ring - 1` fetches are in flight while one is added up.
        step_rows: rows per trip of the inner loop; a multiple of the lanes.
        block_bags: bags whose accumulators are held at a time; a multiple of 8.
    """

    chunk_rows: int = 0
    ring: int = 0
    step_rows: int = 16
    block_bags: int = 0


@dataclass(frozen=True)
class _Plan:
    """A config with everything decided, and the sizes that follow."""

    core: SparseCore
    chunk_rows: int
    ring: int
    step_rows: int
    block_bags: int
    row_vectors: int  # vectors of one row in memory, the last one may be half padding
    sum_vectors: int  # float32 vectors of one accumulator, without the weight
    has_total: bool  # the last vector of an accumulator is the sum of the bag's weights
    finishes: bool  # accumulators are not what is written out: means and bfloat16
    out_words: int

    @property
    def accumulator_words(self) -> int:
        return (self.sum_vectors + self.has_total) * self.core.num_lanes

    @property
    def accumulator_slots(self) -> int:
        return 1 if self.finishes else 2

    @property
    def vmem_bytes(self) -> int:
        lists = (self.ring * 4 + 6) * self.chunk_rows
        rows = self.ring * self.chunk_rows * self.row_vectors * self.core.num_lanes
        sums = self.accumulator_slots * (self.block_bags + 1) * self.accumulator_words
        finished = 2 * self.block_bags * self.out_words if self.finishes else 0
        return 4 * (lists + rows + sums + finished + 4 * (self.block_bags + 32))


def _plan(shape: Shape, core: SparseCore, config: Config) -> _Plan:
    storage, lanes = shape.storage, core.num_lanes
    row_vectors = math.ceil(storage.row_words / lanes)
    sum_vectors = row_vectors * storage.columns_per_word
    has_total = shape.pooling == "mean"
    finishes = has_total or storage.columns_per_word == 2
    budget = core.vmem_bytes * 3 // 4

    def plan(chunk: int, ring: int, bags: int) -> _Plan:
        step = min(config.step_rows, chunk)
        out_words = sum_vectors * lanes
        return _Plan(core, chunk, ring, step, bags, row_vectors, sum_vectors, has_total, finishes, out_words)

    smallest_chunk = lanes
    length = max(shape.num_ids / max(shape.num_bags, 1), 1.0)
    wanted_bags = 8
    while wanted_bags < 128 and wanted_bags * length < 512 and wanted_bags < shape.num_bags:
        wanted_bags *= 2
    bags, ring, chunk = config.block_bags or wanted_bags, config.ring or 3, config.chunk_rows or 128
    while True:
        found = plan(chunk, ring, bags)
        if found.vmem_bytes <= budget:
            return found
        if not config.chunk_rows and chunk > max(32, smallest_chunk):
            chunk //= 2
        elif not config.block_bags and bags > 8:
            bags //= 2
        elif not config.ring and ring > 2:
            ring -= 1
        elif not config.chunk_rows and chunk > smallest_chunk:
            chunk //= 2
        else:
            return found


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """What of a shape this kernel cannot take.

    Args:
        shape: storage and sizes.
        chip: the TPU compiled for.
        config: tuning knobs.

    Returns:
        The limit in words, or None.
    """
    if chip is None or chip.sparse_core is None:
        return f"{chip.name if chip else 'no TPU'} has no SparseCore"
    core = chip.sparse_core
    plan = _plan(shape, core, config)
    if plan.chunk_rows % plan.step_rows or plan.step_rows % core.num_lanes or plan.chunk_rows > 128:
        return (
            f"chunk_rows {plan.chunk_rows} must be at most 128 and a multiple of step_rows {plan.step_rows}, "
            f"which must be a multiple of {core.num_lanes} lanes"
        )
    if plan.block_bags % 8 or plan.ring < 2:
        return f"block_bags {plan.block_bags} must be a multiple of 8, and ring {plan.ring} at least 2"
    if plan.vmem_bytes > core.vmem_bytes:
        return f"it needs {plan.vmem_bytes} bytes of a subcore's {core.vmem_bytes}; take smaller chunks or blocks"
    return None


def hbm_bytes(shape: Shape, chip: Chip, config: Config, num_used: int) -> int:
    """HBM traffic of a call, from the DMAs that the kernel issues and the copies that XLA makes around it.

    Args:
        shape: storage and sizes.
        chip: a chip with SparseCores.
        config: tuning knobs.
        num_used: ids that count.

    Returns:
        Bytes; at most two chunks of id lists per vector subcore more than is moved.
    """
    storage = shape.storage
    plan = _plan(shape, chip.sparse_core, config)
    is_padded = shape.num_ids % plan.chunk_rows > 0
    padded = 2 * 4 * (shape.num_bags + is_padded * shape.num_ids * (1 + shape.weighted))
    out = shape.num_bags * storage.dim * 4
    tiled = shape.num_bags * math.ceil(storage.dim / 128) * 128 * 4
    return kernel_hbm_bytes(shape, chip, config, num_used) + padded + (out + tiled if storage.dim != 128 else 0)


def kernel_hbm_bytes(shape: Shape, chip: Chip, config: Config, num_used: int) -> int:
    """The part of `hbm_bytes` that the kernel's own DMAs move.

    Args:
        shape: as of `hbm_bytes`.
        chip: as of `hbm_bytes`.
        config: as of `hbm_bytes`.
        num_used: as of `hbm_bytes`.

    Returns:
        Bytes.
    """
    core, storage = chip.sparse_core, shape.storage
    plan = _plan(shape, core, config)
    blocks = math.ceil(shape.num_bags / plan.block_bags)
    workers = min(core.num_workers, blocks)
    rows = num_used * storage.row_bytes
    lists = (num_used + 2 * workers * plan.chunk_rows) * 4 * (1 + shape.weighted)
    windows = blocks * (plan.block_bags + core.num_lanes) * 4 + core.num_workers * 4 * core.num_lanes * 4
    return rows + lists + windows + shape.num_bags * storage.dim * 4


def run(
    parts: Sequence[jax.Array],
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    *,
    shape: Shape,
    chip: Chip | None,
    config: Config = Config(),
    interpret: Any = False,
) -> jax.Array:
    """Launch on all SparseCores of one device.

    Args:
        parts: the storage's parts.
        ids_N: int32 `[N]`.
        offsets: int32 `[num_bags + 1]`.
        weights_N: float32 `[N]` or None.
        shape: storage, sizes and pooling.
        chip: the TPU compiled for.
        config: tuning knobs.
        interpret: interpreter parameters, for tests.

    Returns:
        float32 `[num_bags, dim]`.
    """
    if chip is None or chip.sparse_core is None:
        raise ConfigError("the SparseCore kernel needs the facts of a chip that has SparseCores.")
    plan = _plan(shape, chip.sparse_core, config)
    storage, core = shape.storage, plan.core
    num_bags, block = shape.num_bags, plan.block_bags
    num_blocks = math.ceil(num_bags / block)

    padding = -shape.num_ids % plan.chunk_rows
    ids_N = jnp.pad(ids_N, (0, padding), constant_values=-1)
    stream_inputs = [ids_N] if weights_N is None else [ids_N, jnp.pad(weights_N, (0, padding))]
    offsets = jnp.minimum(offsets, shape.num_ids)
    starts = _block_ranges(offsets, num_blocks, block, core.num_workers)
    starts = jnp.pad(starts, (0, -len(starts) % 8 + core.num_lanes), mode="edge")
    offsets = jnp.pad(offsets, (0, num_blocks * block + core.num_lanes - num_bags), mode="edge")

    stream = RowStream(
        storage=storage,
        core=core,
        chunk_rows=plan.chunk_rows,
        ring=plan.ring,
        weighted=weights_N is not None,
        counted=plan.has_total,
    )
    scratch = [
        pltpu.VMEM((2, block + core.num_lanes), INT32),
        pltpu.VMEM((plan.chunk_rows,), INT32),
        pltpu.VMEM((plan.chunk_rows + plan.step_rows,), INT32),
        pltpu.VMEM((plan.accumulator_slots, block + 1, plan.accumulator_words), FLOAT32),
        pltpu.VMEM((2, block, plan.out_words) if plan.finishes else (1, 1, core.num_lanes), FLOAT32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
        stream.scratch(),
    ]

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((num_bags, storage.dim), FLOAT32),
        mesh=subcore_mesh(core),
        compiler_params=_COMPILER,
        name="embedding_bag_sparsecore",
        scratch_types=scratch,
        interpret=interpret,
    )
    def kernel(*refs):
        parts_hbm, refs = refs[: storage.num_parts], refs[storage.num_parts :]
        inputs_hbm, refs = refs[: len(stream_inputs)], refs[len(stream_inputs) :]
        (offsets_hbm, starts_hbm, out_hbm), refs = refs[:3], refs[3:]
        offsets_v, marks_v, bag_v, sums_v, finished_v, offsets_sem, out_sem, rings = refs
        bags = _Bags(plan, shape, offsets_v, marks_v, bag_v, sums_v, finished_v)
        worker = subcore_index(core)
        first_block = scalar_at(starts_hbm, worker, offsets_v.at[0], core)
        last_block = scalar_at(starts_hbm, worker + 1, offsets_v.at[0], core)
        first_id = scalar_at(offsets_hbm, first_block * block, offsets_v.at[0], core)
        last_id = scalar_at(offsets_hbm, last_block * block, offsets_v.at[0], core)
        rows = stream.open(parts_hbm, inputs_hbm, rings, first_id, last_id)

        def fetch_offsets(t):
            slot = lax.rem(t, 2)
            window = offsets_hbm.at[pl.ds(pl.multiple_of(t * block, 8), block + core.num_lanes)]
            return pltpu.make_async_copy(window, offsets_v.at[slot], offsets_sem.at[slot])

        def write_out(t, wait):
            """Start or await the write of block t; the last block may be short, so its size is another DMA."""
            slot = lax.rem(t, 2)
            source = finished_v if plan.finishes else sums_v
            short = num_bags - (num_blocks - 1) * block
            for size, mine in ((block, t < num_blocks - 1), (short, t == num_blocks - 1)):

                @pl.when(mine)
                def _(size=size):
                    copy = pltpu.make_async_copy(
                        source.at[slot, pl.ds(0, size), pl.ds(0, storage.dim)],
                        out_hbm.at[pl.ds(t * block, size)],
                        out_sem.at[slot],
                    )
                    copy.wait() if wait else copy.start()

        @pl.when(first_block < last_block)
        def _():
            fetch_offsets(first_block).start()

        bags.clear_marks()
        rows.prologue()

        def one_block(t, ready):
            fetch_offsets(t).wait()

            @pl.when(t + 1 < last_block)
            def _():
                fetch_offsets(t + 1).start()

            @pl.when(t - 2 >= first_block)
            def _():
                write_out(t - 2, wait=True)

            ready = bags.add_up(t, rows, ready)
            if plan.finishes:
                bags.finish(t)
            write_out(t, wait=False)
            return ready

        lax.fori_loop(first_block, last_block, one_block, rows.first_chunk)
        for back in (2, 1):

            @pl.when(last_block - back >= first_block)
            def _(back=back):
                write_out(last_block - back, wait=True)

    return kernel(*parts, *stream_inputs, offsets, starts)


def _block_ranges(offsets: jax.Array, num_blocks: int, block: int, num_workers: int) -> jax.Array:
    """The first block of each worker, and the end: ranges of about equal cost, where a bag costs as much as an id."""
    last = offsets.shape[0] - 1
    edges = jnp.minimum(jnp.arange(num_blocks + 1, dtype=INT32) * block, last)
    cost = jnp.maximum(lax.cummax(offsets[edges]) - offsets[0], 0) + edges
    worker = jnp.arange(num_workers + 1, dtype=INT32)
    share, rest = cost[-1] // num_workers, cost[-1] % num_workers
    starts = jnp.searchsorted(cost, worker * share + jnp.minimum(worker, rest), side="left").astype(INT32)
    return jnp.minimum(starts, num_blocks)


class _Bags:
    """The accumulators of one block of bags, inside the kernel."""

    def __init__(self, plan: _Plan, shape: Shape, offsets_v, marks_v, bag_v, sums_v, finished_v) -> None:
        self.plan, self.shape, self.lanes = plan, shape, plan.core.num_lanes
        self.offsets_v, self.marks_v, self.bag_v = offsets_v, marks_v, bag_v
        self.sums_v, self.finished_v = sums_v, finished_v
        self.spare = plan.block_bags  # the accumulator of rows outside of the block

    def clear_marks(self) -> None:
        for start in range(0, self.plan.chunk_rows, self.lanes):
            self.marks_v[pl.ds(start, self.lanes)] = jnp.zeros((self.lanes,), INT32)

    def _slot(self, t):
        return lax.rem(t, self.plan.accumulator_slots)

    def add_up(self, t, rows, ready):
        """Fill the accumulators of block t; returns the number of chunks that have arrived so far."""
        plan, chunk = self.plan, self.plan.chunk_rows
        slot, offsets = self._slot(t), self.offsets_v.at[lax.rem(t, 2)]

        self._zero(slot)
        start = offsets[pl.ds(0, self.lanes)][0]
        end = offsets[pl.ds(plan.block_bags, self.lanes)][0]

        def one_chunk(c, carry):
            ready, last = carry

            @pl.when(c >= ready)
            def _():
                rows.arrive(c)

            low = jnp.maximum(start - c * chunk, 0) // plan.step_rows * plan.step_rows
            high = jnp.minimum(end - c * chunk, chunk)
            steps = (high - low + plan.step_rows - 1) // plan.step_rows
            next_last = self._find_bags(offsets, c * chunk, low, steps, start, end, last)
            self._add_rows(slot, rows, rows.slot(c), low, steps, jnp.where(last < 0, self.spare, last))
            return jnp.maximum(ready, c + 1), next_last

        first_chunk = start // chunk
        end_chunk = jnp.where(end > start, (end + chunk - 1) // chunk, first_chunk)
        ready, _ = lax.fori_loop(first_chunk, end_chunk, one_chunk, (ready, INT32(-1)))
        return ready

    def _zero(self, slot) -> None:
        @plsc.parallel_loop(0, self.plan.block_bags, unroll=2)
        def _(bag):
            for start in range(0, self.plan.accumulator_words, self.lanes):
                self.sums_v[slot, bag, pl.ds(start, self.lanes)] = jnp.zeros((self.lanes,), FLOAT32)

    def _find_bags(self, offsets, base, low, steps, start, end, last):
        """Write the bag of each position of a chunk; returns that of the last one, -1 before the first bag.

        The first position of every bag that is not empty is marked with the bag; a running maximum carries it on.
        """
        plan, lanes, chunk = self.plan, self.lanes, self.plan.chunk_rows
        lane = lax.iota(INT32, lanes)

        @pl.loop(0, plan.block_bags, step=lanes)
        def _(bag):
            begins = offsets[pl.ds(bag, lanes)]
            ends = offsets[pl.ds(bag + 1, lanes)]
            at = begins - base
            marked = (ends > begins) & (at >= 0) & (at < chunk) & (bag + lane < plan.block_bags)
            plsc.store_scatter(self.marks_v, [jnp.clip(at, 0, chunk - 1)], bag + lane + 1, mask=marked)

        def one_vector(i, last):
            at = low + i * lanes
            marks = self.marks_v[pl.ds(at, lanes)]
            self.marks_v[pl.ds(at, lanes)] = jnp.zeros((lanes,), INT32)
            bag = jnp.maximum(plsc.cummax(marks), last + 1) - 1
            position = base + at + lane
            inside = (position >= start) & (position < end)
            self.bag_v[pl.ds(at, lanes)] = jnp.where(inside, bag, self.spare)
            return bag[lanes - 1]

        return lax.fori_loop(0, steps * (plan.step_rows // lanes), one_vector, last)

    def _add_rows(self, slot, rows, ring_slot, low, steps, last):
        """Add the rows of a chunk to their bags, a group of columns at a time."""
        size = self._group_vectors
        whole = self.shape.storage.row_words // self.lanes // size
        rest = self.plan.row_vectors - whole * size

        def columns(first_vector, num_vectors, total=0):
            self._add_columns(slot, rows, ring_slot, low, steps, last, first_vector, num_vectors, total)

        if whole > 1:
            pl.loop(0, whole)(lambda group: columns(group * size, size))
        elif whole:
            columns(0, size)
        if rest:
            columns(whole * size, rest)
        if self.plan.has_total:
            columns(0, 0, total=1)

    @property
    def _group_vectors(self) -> int:
        return MAX_COLUMN_VECTORS // self.shape.storage.columns_per_word

    def _add_columns(self, slot, rows, ring_slot, low, steps, last, first_vector, num_vectors, total):
        plan, lanes, packed = self.plan, self.lanes, self.shape.storage.columns_per_word == 2
        columns = [pl.ds((first_vector + q) * lanes, lanes) for q in range(num_vectors)]
        if packed:  # odd columns lie behind all even ones
            odd = plan.row_vectors * lanes
            columns += [pl.ds(odd + (first_vector + q) * lanes, lanes) for q in range(num_vectors)]
        columns += [pl.ds(plan.sum_vectors * lanes, lanes)] * total

        starts = range(0, plan.step_rows, lanes)

        def load_bags(at):
            """The bags of one trip, and those of its first rows as scalars, which take long to get."""
            vectors = [self.bag_v[pl.ds(at + start, lanes)] for start in starts]
            return vectors, [vectors[0][n] for n in range(SCALARS_AHEAD)]

        def step(i, carry):
            previous, (all_bags, first_bags), running = carry
            at = low + i * plan.step_rows
            next_bags = load_bags(at + plan.step_rows)
            for start, bags in zip(starts, all_bags, strict=True):
                weights = rows.weights(ring_slot, at + start) if self.shape.weighted or total else None
                for n in range(lanes):
                    bag = first_bags[n] if start == 0 and n < SCALARS_AHEAD else bags[n]
                    fresh = bag != previous
                    values = rows.values(ring_slot, at + start + n, first_vector, num_vectors)
                    if self.shape.weighted:
                        values = [value * weights[n] for value in values]
                    if total:
                        values = [jnp.full((lanes,), weights[n])]
                    running = [jnp.where(fresh, 0.0, a) + x for a, x in zip(running, values, strict=True)]
                    for column, value in zip(columns, running, strict=True):
                        self.sums_v[slot, bag, column] = value
                    previous = bag
            return previous, next_bags, running

        running = [self.sums_v[slot, last, column] for column in columns]
        lax.fori_loop(0, steps, step, (last, load_bags(low), running))

    def finish(self, t) -> None:
        """Accumulators to what is written out: divided by the weight, and bfloat16's columns back in order."""
        plan, lanes = self.plan, self.lanes
        slot, out = self._slot(t), self.finished_v.at[lax.rem(t, 2)]
        lane = lax.iota(INT32, lanes)

        @plsc.parallel_loop(0, plan.block_bags)
        def _(bag):
            scale = None
            if plan.has_total:
                total = self.sums_v[slot, bag, pl.ds(plan.sum_vectors * lanes, lanes)]
                scale = jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))
            for q in range(plan.sum_vectors):
                value = self.sums_v[slot, bag, pl.ds(q * lanes, lanes)]
                if scale is not None:
                    value = value * scale
                if self.shape.storage.columns_per_word == 1:
                    out[bag, pl.ds(q * lanes, lanes)] = value
                else:
                    odd, vector = divmod(q, plan.row_vectors)
                    column = 2 * (vector * lanes + lane) + odd
                    plsc.store_scatter(out, [jnp.full((lanes,), bag), column], value)
