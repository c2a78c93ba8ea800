"""`embedding_update` on the SparseCores of v5p, v6e and 7x: unique rows are stepped where they lie in HBM.

The TensorCore sorts the ids (`dedup.unique_rows`). Then every vector subcore takes a run of blocks of unique rows. Per
block, with a ring of two blocks:

    row and start lists  HBM -> VMEM, a block ahead of their use
    rows, accumulators   HBM -> VMEM by indirect DMA, while the block before is stepped
    gradients            one row of `grads` per occurrence, by indirect DMA in chunks, added up in VMEM
    step                 in VMEM
    rows, accumulators   VMEM -> HBM by indirect DMA, while the next block adds up its gradients

If the gradients of all bags fit, every SparseCore first copies them to its shared memory, and the row per occurrence
comes from there: a bag's gradient then crosses HBM once per SparseCore, not once per id.

No two rows of a call are the same, so nothing orders one subcore's writes after another's. Row-wise accumulators are
single words; those of neighbouring rows share a 32-byte granule and may be written by different subcores.

Legend: B bags, D dim, W words per row, N ids (capacity), P parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpurec.kernels.dedup import UniqueRows, unique_rows
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.limits import MAX_TENSOR_BYTES
from tpurec.kernels.moments import MOMENT_NAMES, step_scalars
from tpurec.kernels.optimizer_state import by_array
from tpurec.kernels.optimizers import ACCUMULATORS, RowOptimizer
from tpurec.kernels.sparsecore_rows import RowMath
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import Chip

_LIST_SLOTS = 4  # lists of block t + 2 arrive while block t is written back
_INDEX_SLOTS = 4  # bag numbers of a chunk must outlive the DMA that reads them
_GRADIENT_SLOTS = 2
_GROUP = 16  # registers that add up one row's columns at a time
_RESERVED_BYTES = 8192  # of a subcore's memory: semaphores and what the compiler needs itself
_MAX_STAGED_SHARE = 0.75  # of a SparseCore's memory that the staged gradients may take


@dataclass(frozen=True)
class Config:
    """What may be tuned; 0 or `auto` lets `layout` choose the largest that fits the vector subcore's memory.

    Args:
        rows_per_block: unique rows that are stepped together, a multiple of the lanes.
        ids_per_chunk: gradients fetched by one indirect DMA, a multiple of 8 up to 128.
        gradients: `shared` copies the bags' gradients to the SparseCore's shared memory first, `hbm` reads them from
            HBM for each id, `auto` is `shared` if they fit.
    """

    rows_per_block: int = 0
    ids_per_chunk: int = 0
    gradients: str = "auto"


@dataclass(frozen=True)
class Layout:
    """How a shape is cut to the memory of a chip.

    Args:
        rows_per_block: unique rows per block.
        ids_per_chunk: gradients per indirect DMA.
        block_slots: 2 if a block's rows are fetched during the block before; 1 if there is no room for that.
        shared_gradients: they are staged in shared memory.
    """

    rows_per_block: int
    ids_per_chunk: int
    block_slots: int
    shared_gradients: bool


def layout(shape: Shape, chip: Chip, config: Config) -> Layout | None:
    """Choose block, chunk and staging.

    Args:
        shape: storage, sizes and optimizer.
        chip: its memory decides.
        config: what is fixed already.

    Returns:
        The first that fits, in the order of preference; None if nothing does.
    """
    core = chip.sparse_core
    pool = core.num_subcores * core.vmem_bytes
    staged_bytes = shape.num_bags * shape.storage.dim * 4
    for shared in (True, False):
        if config.gradients != "auto" and shared != (config.gradients == "shared"):
            continue
        if shared and staged_bytes > pool * _MAX_STAGED_SHARE:
            continue
        # Shared memory and the subcores' own memories are one pool.
        room = core.vmem_bytes - _RESERVED_BYTES - (-(-staged_bytes // core.num_subcores) if shared else 0)
        for slots in (2, 1):
            for rows in [config.rows_per_block] if config.rows_per_block else (32, 16, 8):
                for ids in [config.ids_per_chunk] if config.ids_per_chunk else (128, 64, 32, 16, 8):
                    found = Layout(rows, ids, slots, shared)
                    if rows % core.num_lanes == 0 and _scratch_bytes(shape, chip, found) <= room:
                        return found
    return None


def _scratch_bytes(shape: Shape, chip: Chip, cut: Layout) -> int:
    """Bytes of `_scratch` for one vector subcore."""
    lanes, dim = chip.sparse_core.num_lanes, shape.storage.dim
    block = cut.block_slots * shape.storage.row_words + dim
    per_row = {"element": cut.block_slots * dim, "row": cut.block_slots + lanes + 1}
    kinds = ACCUMULATORS[shape.optimizer]
    arrays = 1 + kinds.count("element")
    lists = _LIST_SLOTS * (2 * cut.rows_per_block + lanes) + cut.block_slots * cut.rows_per_block * arrays * 8
    chunks = _INDEX_SLOTS * cut.ids_per_chunk * 2 + _GRADIENT_SLOTS * cut.ids_per_chunk * dim
    return 4 * (cut.rows_per_block * (block + sum(per_row[kind] for kind in kinds)) + lists + chunks + 6 * lanes)


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """What it cannot take.

    Args:
        shape: storage, sizes and optimizer.
        chip: the TPU.
        config: tuning.

    Returns:
        The limit in words, or None.
    """
    if chip is None or chip.sparse_core is None:
        return f"{chip.name if chip else 'no TPU'} has no SparseCore"
    if shape.plain_only:
        return f"{shape.plain_only}: in plain JAX only"
    if shape.storage.max_part_bytes > MAX_TENSOR_BYTES:
        return f"a SparseCore kernel takes at most 16 GiB per tensor, not {shape.storage.max_part_bytes} bytes"
    if shape.storage.num_parts > 8:
        return f"it takes up to 8 parts, the storage has {shape.storage.num_parts}"
    if layout(shape, chip, config) is None:
        return (
            f"{config} of dim {shape.storage.dim} and {shape.num_bags} bags does not fit a vector subcore's "
            f"{chip.sparse_core.vmem_bytes} bytes, or its rows are no multiple of {chip.sparse_core.num_lanes} lanes"
        )
    return None


def hbm_bytes(shape: Shape, chip: Chip, config: Config, num_used: int, num_unique: int, weighted: bool) -> int:
    """HBM traffic of the kernel, from the DMAs that it issues; `dedup.sort_hbm_bytes` comes on top.

    Args:
        shape: storage, sizes and optimizer.
        chip: a chip with SparseCores.
        config: tuning.
        num_used: ids that count.
        num_unique: different rows among them.
        weighted: occurrences have factors: per-id weights, or a mean.

    Returns:
        Bytes; at most one chunk per vector subcore more than is moved, and every piece at least a DMA granule.
    """
    core, cut, storage = chip.sparse_core, layout(shape, chip, config), shape.storage
    blocks = math.ceil(num_unique / cut.rows_per_block)
    workers = min(core.num_workers, blocks)
    per_kind = {"element": storage.dim * 4, "row": max(4, core.dma_granule_bytes)}
    state = sum(per_kind[kind] for kind in ACCUMULATORS[shape.optimizer])
    rows = 2 * num_unique * (storage.row_bytes + state)
    lists = blocks * (2 * cut.rows_per_block + core.num_lanes) * 4
    gradient = storage.dim * 4
    occurrences = num_used + workers * (cut.ids_per_chunk + 7)
    per_occurrence = 4 * (2 if weighted else 1) + (0 if cut.shared_gradients else gradient)
    staged = core.num_cores * shape.num_bags * gradient if cut.shared_gradients else 0
    scalars = core.num_workers * (6 if shape.optimizer in MOMENT_NAMES else 4) * core.num_lanes * 4
    return rows + lists + occurrences * per_occurrence + staged + scalars


def run(
    parts: Sequence[jax.Array],
    state: Sequence[jax.Array],
    grads_BD: jax.Array,
    ids_N: jax.Array,
    offsets: jax.Array,
    weights_N: jax.Array | None,
    lr: jax.Array,
    *,
    shape: Shape,
    optimizer: RowOptimizer,
    chip: Chip,
    config: Config,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Sort on the TensorCore, then step the unique rows in place on the SparseCores.

    Args:
        parts: the storage's parts; aliased with the result if they are donated.
        state: as of `optimizers.pack_state`; likewise.
        grads_BD: float32 `[B, D]`.
        ids_N: int32 `[N]`.
        offsets: int32 `[B + 1]`.
        weights_N: float32 `[N]` or None.
        lr: float32 scalar.
        shape: storage, sizes, pooling and optimizer.
        optimizer: the rule.
        chip: a chip with SparseCores.
        config: tuning.
        interpret: interpreter parameters, in tests.

    Returns:
        New parts and new state.
    """
    unique = unique_rows(ids_N, offsets, weights_N, shape.storage.num_rows, shape.pooling)
    *state, count = (*state, None) if not optimizer.counts_steps else (*state[:-1], state[-1] + 1)
    part_refs, state_refs = [jax.new_ref(part) for part in parts], [jax.new_ref(one) for one in state]
    update_unique(
        part_refs,
        state_refs,
        grads_BD,
        unique,
        step_scalars(optimizer, lr, count),
        shape=shape,
        optimizer=optimizer,
        chip=chip,
        cut=layout(shape, chip, config),
        interpret=interpret,
    )
    counted = () if count is None else (count,)
    return tuple(ref[...] for ref in part_refs), (*(ref[...] for ref in state_refs), *counted)


def update_unique(
    part_refs: Sequence[Any],
    state_refs: Sequence[Any],
    grads_BD: jax.Array,
    unique: UniqueRows,
    scalars: Sequence[jax.Array],
    *,
    shape: Shape,
    optimizer: RowOptimizer,
    chip: Chip,
    cut: Layout,
    interpret: Any = False,
) -> None:
    """The SparseCore kernel.

    Args:
        part_refs: refs of the storage's parts, changed in place.
        state_refs: refs of the accumulators, changed in place; a step count is not among them.
        grads_BD: float32 `[B, D]`.
        unique: sorted unique rows.
        scalars: of `optimizers.step_scalars`.
        shape: storage, sizes and optimizer.
        optimizer: the rule.
        chip: a chip with SparseCores.
        cut: of `layout`.
        interpret: interpreter parameters, in tests.
    """
    core = chip.sparse_core
    block, chunk, lanes = cut.rows_per_block, cut.ids_per_chunk, core.num_lanes
    num_ids = unique.rows_N.shape[0]
    padded = -(-num_ids // block) * block
    inputs = {
        "grads": grads_BD,
        "rows": jnp.pad(unique.rows_N, (0, padded - num_ids), constant_values=-1),
        "starts": jnp.pad(unique.starts_N, (0, padded + lanes - num_ids - 1), mode="edge"),
        "bags": jnp.pad(unique.bags_N, (0, chunk + 8)),
        "count": jnp.full((lanes,), unique.count, jnp.int32),
        "scalars": jnp.repeat(jnp.stack(scalars).astype(jnp.float32), lanes),
    }
    if unique.factors_N is not None:
        inputs["factors"] = jnp.pad(unique.factors_N, (0, chunk + 8))
    scratch = _scratch(shape, optimizer, core, cut, unique.factors_N is not None, len(scalars))
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=core.num_cores, num_subcores=core.num_subcores
    )
    names = list(inputs)
    kernel = pl.kernel(
        partial(_kernel, names, shape, optimizer, core, cut, len(part_refs), len(state_refs)),
        out_type=(),
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(
            use_tc_tiling_on_sc=False, needs_layout_passes=False, disable_bounds_checks=True
        ),
        scratch_types=scratch,
        name=f"embedding_update_{optimizer.name}",
        interpret=interpret,
    )
    kernel(*part_refs, *state_refs, *inputs.values())


def _scratch(
    shape: Shape, optimizer: RowOptimizer, core: Any, cut: Layout, factors: bool, num_scalars: int
) -> dict[str, Any]:
    storage, block, chunk, lanes = shape.storage, cut.rows_per_block, cut.ids_per_chunk, core.num_lanes
    of_state = optimizer.state_storage(storage)
    kinds = ACCUMULATORS[optimizer.name]
    lists = _num_lists(storage.num_parts)
    lists += kinds.count("element") * (_num_lists(of_state.num_parts) if of_state else 0)
    found = {
        "row_list": pltpu.VMEM((_LIST_SLOTS, block), jnp.int32),
        "start_list": pltpu.VMEM((_LIST_SLOTS, block + lanes), jnp.int32),
        "part_list": pltpu.VMEM((cut.block_slots * max(lists, 1), block), jnp.int32),
        "scalar": pltpu.VMEM((2, lanes), jnp.int32),
        "rate": pltpu.VMEM((num_scalars * lanes,), jnp.float32),
        "table": pltpu.VMEM((cut.block_slots, block, storage.row_words), storage.word_dtype),
        "sums": pltpu.VMEM((block, storage.dim), jnp.float32),
        "bag_list": pltpu.VMEM((_INDEX_SLOTS, chunk), jnp.int32),
        "gradients": pltpu.VMEM((_GRADIENT_SLOTS, chunk, storage.dim), jnp.float32),
        "list_sem": pltpu.SemaphoreType.DMA((_LIST_SLOTS,)),
        "fetch_sem": pltpu.SemaphoreType.DMA((cut.block_slots,)),
        "write_sem": pltpu.SemaphoreType.DMA((cut.block_slots,)),
        "bag_sem": pltpu.SemaphoreType.DMA((_INDEX_SLOTS,)),
        "gradient_sem": pltpu.SemaphoreType.DMA((_GRADIENT_SLOTS,)),
    }
    if factors:
        found["factor_list"] = pltpu.VMEM((_INDEX_SLOTS, chunk), jnp.float32)
    if cut.shared_gradients:
        found["shared"] = pltpu.VMEM_SHARED((shape.num_bags, storage.dim), jnp.float32)
    for number, kind in enumerate(kinds):
        row = (storage.dim,) if kind == "element" else ()
        found[f"state{number}"] = pltpu.VMEM((cut.block_slots, block, *row), jnp.float32)
    if "row" in kinds:
        found["squares"] = pltpu.VMEM((block, lanes), jnp.float32)
        found["scale"] = pltpu.VMEM((block,), jnp.float32)
    return found


def _num_lists(num_parts: int) -> int:
    """A single part is addressed by the global rows themselves."""
    return num_parts if num_parts > 1 else 0


def _kernel(names, shape, optimizer, core, cut, num_parts, num_states, *refs, **scratch):
    storage, of_state = shape.storage, optimizer.state_storage(shape.storage)
    parts = [ref.reshape(storage.rows_per_part, storage.row_words) for ref in refs[:num_parts]]
    arrays = [_Array(storage, parts, "table")]
    groups = by_array(optimizer, tuple(refs[num_parts : num_parts + num_states]), storage)
    for number, (kind, group) in enumerate(zip(ACCUMULATORS[optimizer.name], groups, strict=False)):
        if kind == "element":
            group = [ref.reshape(of_state.rows_per_part, of_state.row_words) for ref in group]
        arrays.append(_Array(of_state if kind == "element" else None, group, f"state{number}"))
    inputs = dict(zip(names, refs[num_parts + num_states :], strict=True))
    scratch = type("Scratch", (), scratch)
    if cut.shared_gradients:
        _stage(inputs["grads"], scratch.shared, core)
    # Each worker takes a run of blocks.
    pltpu.sync_copy(inputs["count"], scratch.scalar.at[0])
    pltpu.sync_copy(inputs["scalars"], scratch.rate)
    count = scratch.scalar[0, pl.ds(0, core.num_lanes)][0]
    num_blocks = (count + cut.rows_per_block - 1) // cut.rows_per_block
    per_worker = (num_blocks + core.num_workers - 1) // core.num_workers
    worker = lax.axis_index("core") * core.num_subcores + lax.axis_index("subcore")
    first = jnp.minimum(worker * per_worker, num_blocks)
    last = jnp.minimum(first + per_worker, num_blocks)
    blocks = _Blocks(arrays, inputs, scratch, cut, core, last)
    stream = _Gradients(inputs, scratch, cut, core, storage.dim, first, last)
    rows = RowMath(storage, optimizer, core.num_lanes, cut.rows_per_block, scratch)

    @pl.when(first < last)
    def _():
        blocks.start_lists(first)
        if cut.block_slots == 2:
            blocks.start_fetch(first)

    def step_block(t, ready):
        def finish_previous():
            pl.when(t > first)(lambda: blocks.wait_write(t - 1))

        if cut.block_slots == 1:
            finish_previous()
            blocks.start_fetch(t)
        ready = stream.add_up(t, ready)
        if cut.block_slots == 2:
            finish_previous()
            pl.when(t + 1 < last)(lambda: blocks.start_fetch(t + 1))
        blocks.wait_fetch(t)
        rows.step(lax.rem(t, cut.block_slots))
        blocks.start_write(t)
        return ready

    lax.fori_loop(first, last, step_block, jnp.int32(0))
    pl.when(first < last)(lambda: blocks.wait_write(last - 1))


def _stage(grads, shared, core) -> None:
    """Every subcore copies its share of the gradients to the memory that its SparseCore shares."""
    num_bags = grads.shape[0]
    share = -(-num_bags // core.num_subcores)
    full, rest = divmod(num_bags, share)
    subcore = lax.axis_index("subcore")

    @pl.when(subcore < full)
    def _():
        here = pl.ds(subcore * share, share)
        pltpu.sync_copy(grads.at[here], shared.at[here])

    if rest:

        @pl.when(subcore == full)
        def _():
            here = pl.ds(full * share, rest)
            pltpu.sync_copy(grads.at[here], shared.at[here])

    plsc.subcore_barrier()


@dataclass(frozen=True)
class _Array:
    """The table or an accumulator.

    Args:
        storage: of its rows; None for a word per row, which is one part.
        refs: its parts.
        buffer: name of the scratch that holds a block of it.
    """

    storage: Storage | None
    refs: Sequence[Any]
    buffer: str


class _Blocks:
    """Lists, rows and accumulators of blocks of unique rows, between HBM and VMEM."""

    def __init__(self, arrays, inputs, scratch, cut, core, last):
        self.arrays = arrays
        self.rows, self.starts, self.scratch = inputs["rows"], inputs["starts"], scratch
        self.block, self.slots, self.lanes, self.last = cut.rows_per_block, cut.block_slots, core.num_lanes, last

    def _list_copies(self, t):
        slot, start = lax.rem(t, _LIST_SLOTS), pl.multiple_of(t * self.block, 8)
        scratch, sem = self.scratch, self.scratch.list_sem.at[slot]
        return [
            pltpu.make_async_copy(self.rows.at[pl.ds(start, self.block)], scratch.row_list.at[slot], sem),
            pltpu.make_async_copy(
                self.starts.at[pl.ds(start, self.block + self.lanes)], scratch.start_list.at[slot], sem
            ),
        ]

    def start_lists(self, t):
        for copy in self._list_copies(t):
            copy.start()

    def _local_lists(self, t):
        """Rows of each part within the part; -1, which the DMA skips, for rows of the others."""
        slot, k = lax.rem(t, _LIST_SLOTS), lax.rem(t, self.slots) * self._lists_per_slot()
        for array in self._split():
            for part in range(len(array.refs)):
                for g in range(self.block // self.lanes):
                    lanes = pl.ds(g * self.lanes, self.lanes)
                    local = self.scratch.row_list[slot, lanes] - part * array.storage.rows_per_part
                    here = (local >= 0) & (local < array.storage.rows_per_part)
                    self.scratch.part_list[k, lanes] = jnp.where(here, local, -1)
                k += 1

    def _split(self):
        """Arrays of several parts."""
        return [array for array in self.arrays if len(array.refs) > 1]

    def _lists_per_slot(self):
        return sum(len(array.refs) for array in self._split())

    def _row_copies(self, t, write):
        slot, lists = lax.rem(t, self.slots), lax.rem(t, _LIST_SLOTS)
        k = slot * self._lists_per_slot()
        sem = (self.scratch.write_sem if write else self.scratch.fetch_sem).at[slot]
        copies = []
        for array in self.arrays:
            for ref in array.refs:
                index = self.scratch.row_list.at[lists]
                if len(array.refs) > 1:
                    index, k = self.scratch.part_list.at[k], k + 1
                hbm = ref.at[plsc.Indices(index, ignored_value=-1)]
                vmem = getattr(self.scratch, array.buffer).at[slot]
                copies.append(pltpu.make_async_copy(*((vmem, hbm) if write else (hbm, vmem)), sem))
        return copies

    def start_fetch(self, t):
        """The lists of block t were started; read its rows, and start the next lists."""
        for copy in self._list_copies(t):
            copy.wait()
        self._local_lists(t)
        for copy in self._row_copies(t, write=False):
            copy.start()
        pl.when(t + 1 < self.last)(lambda: self.start_lists(t + 1))

    def wait_fetch(self, t):
        for copy in self._row_copies(t, write=False):
            copy.wait()

    def start_write(self, t):
        for copy in self._row_copies(t, write=True):
            copy.start()

    def wait_write(self, t):
        for copy in self._row_copies(t, write=True):
            copy.wait()


class _Gradients:
    """The gradients of the occurrences, in order, in chunks; each unique row adds up its own run of them."""

    def __init__(self, inputs, scratch, cut, core, dim, first, last):
        self.bags, self.factors, self.scratch = inputs["bags"], inputs.get("factors"), scratch
        self.source = scratch.shared if cut.shared_gradients else inputs["grads"]
        self.block, self.chunk, self.lanes, self.dim = cut.rows_per_block, cut.ids_per_chunk, core.num_lanes, dim
        start = self._start_of(inputs["starts"], first * self.block)
        end = self._start_of(inputs["starts"], last * self.block)
        self.base = start // 8 * 8  # a DMA starts at a granule
        self.num_chunks = jnp.where(last > first, (end - self.base + self.chunk - 1) // self.chunk, 0)
        for c in range(2):
            pl.when(c < self.num_chunks)(partial(self._start_lists, jnp.int32(c)))
        pl.when(self.num_chunks > 0)(partial(self._start_rows, jnp.int32(0)))

    def _start_of(self, starts, row):
        aligned = pl.multiple_of(row // 8 * 8, 8)
        pltpu.sync_copy(starts.at[pl.ds(aligned, self.lanes)], self.scratch.scalar.at[1])
        return self.scratch.scalar[1, pl.ds(0, self.lanes)][0]

    def _list_copies(self, c):
        slot = lax.rem(c, _INDEX_SLOTS)
        here = pl.ds(pl.multiple_of(self.base + c * self.chunk, 8), self.chunk)
        sem = self.scratch.bag_sem.at[slot]
        copies = [pltpu.make_async_copy(self.bags.at[here], self.scratch.bag_list.at[slot], sem)]
        if self.factors is not None:
            copies.append(pltpu.make_async_copy(self.factors.at[here], self.scratch.factor_list.at[slot], sem))
        return copies

    def _start_lists(self, c):
        for copy in self._list_copies(c):
            copy.start()

    def _rows(self, c):
        slot = lax.rem(c, _GRADIENT_SLOTS)
        bags = self.scratch.bag_list.at[lax.rem(c, _INDEX_SLOTS)]
        source = self.source.at[plsc.Indices(bags)]
        return pltpu.make_async_copy(source, self.scratch.gradients.at[slot], self.scratch.gradient_sem.at[slot])

    def _start_rows(self, c):
        for copy in self._list_copies(c):
            copy.wait()
        self._rows(c).start()

    def _advance(self, c):
        """Make chunk c readable, with chunk c + 1 and the lists of chunk c + 2 on their way."""
        pl.when(c + 2 < self.num_chunks)(lambda: self._start_lists(c + 2))
        pl.when(c + 1 < self.num_chunks)(lambda: self._start_rows(c + 1))
        self._rows(c).wait()

    def add_up(self, t, ready):
        """Fill `sums` for block t; `ready` counts the chunks that were waited for."""
        self._zero()
        lists = lax.rem(t, _LIST_SLOTS)

        def row(j, ready):
            run = self.scratch.start_list[lists, pl.ds(j, self.lanes)]
            return self._add_run(j, run[0], run[1], ready)

        return lax.fori_loop(0, self.block, row, ready)

    def _zero(self):
        full, tail = divmod(self.dim, self.lanes)
        lane = lax.iota(jnp.int32, self.lanes)
        nothing = jnp.zeros(self.lanes, jnp.float32)

        @pl.loop(0, self.block)
        def _(j):
            for q in range(full):
                self.scratch.sums[j, pl.ds(q * self.lanes, self.lanes)] = nothing
            if tail:
                column = jnp.minimum(full * self.lanes + lane, self.dim - 1)
                plsc.store_scatter(self.scratch.sums, [jnp.full(self.lanes, j), column], nothing, mask=lane < tail)

    def _add_run(self, j, start, end, ready):
        first = (start - self.base) // self.chunk
        last = jnp.where(end > start, (end - self.base + self.chunk - 1) // self.chunk, first)

        def piece(c, ready):
            pl.when(c >= ready)(lambda: self._advance(c))
            begin = self.base + c * self.chunk
            self._add_piece(j, c, jnp.maximum(start - begin, 0), jnp.minimum(end - begin, self.chunk))
            return jnp.maximum(ready, c + 1)

        return lax.fori_loop(first, last, piece, ready)

    def _add_piece(self, j, c, low, high):
        """Add rows low to high of chunk c to row j."""
        full, tail = divmod(self.dim, self.lanes)
        lane = lax.iota(jnp.int32, self.lanes)
        slot, lists = lax.rem(c, _GRADIENT_SLOTS), lax.rem(c, _INDEX_SLOTS)
        last_columns = jnp.minimum(full * self.lanes + lane, self.dim - 1)

        def load(r, q):
            if q < full:
                return self.scratch.gradients[slot, r, pl.ds(q * self.lanes, self.lanes)]
            rows = self.scratch.gradients.at[slot]
            return plsc.load_gather(rows, [jnp.full(self.lanes, r), last_columns], mask=lane < tail)

        num_registers = full + (tail > 0)
        for group in range(0, num_registers, _GROUP):
            columns = list(range(group, min(group + _GROUP, num_registers)))

            def add(r, sums, columns=columns):
                if self.factors is None:
                    return [x + load(r, q) for x, q in zip(sums, columns, strict=True)]
                factor = plsc.load_gather(self.scratch.factor_list.at[lists], [jnp.full(self.lanes, r)])
                return [x + load(r, q) * factor for x, q in zip(sums, columns, strict=True)]

            nothing = [jnp.zeros(self.lanes, jnp.float32) for _ in columns]
            sums = plsc.parallel_loop(low, high, unroll=4, carry=nothing)(add)
            for x, q in zip(sums, columns, strict=True):
                if q < full:
                    plsc.addupdate(self.scratch.sums.at[j, pl.ds(q * self.lanes, self.lanes)], x)
                else:
                    where = [jnp.full(self.lanes, j), last_columns]
                    plsc.addupdate_scatter(self.scratch.sums, where, x, mask=lane < tail)
