"""`embedding_update` on a TensorCore, by manual DMA: for v5e, which has no SparseCore.

A TensorCore moves whole lines of 128 words, and rows may share lines, so rows are stepped in *groups*: the fewest rows
that fill whole lines (1 row of dim 128 or 256; 16 rows in 3 lines for dim 24). The ids come sorted, in chunks; a chunk

    1. starts a DMA for every group in which a run of equal ids ends, and waits for all of them,
    2. adds up gradients occurrence by occurrence, and steps a row when its run ends,
    3. writes the groups back, and waits for all of them, so that the next chunk may read the last group again.

The sum of a run that crosses chunks stays in VMEM. The gradients of all bags stay in VMEM, too.

Legend: B bags, D dim, W words per row, N ids (capacity), G rows of a group, L lines of a group, H numbers per word.
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

from tpurec.kernels.bfloat16_words import halves, word_of
from tpurec.kernels.dedup import sorted_occurrences
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.moments import MOMENT_NAMES, first_moment, moment_rate, second_moment, step_scalars
from tpurec.kernels.optimizers import ACCUMULATORS, RowOptimizer, decayed, rate, shrunk
from tpurec.kernels.storage import LANES, Storage
from tpurec.topology.chips import Chip

_MAX_VMEM_SHARE = 0.75  # of a TensorCore's memory


@dataclass(frozen=True)
class Config:
    """What may be tuned.

    Args:
        ids_per_chunk: ids handled together, a multiple of 128.
    """

    ids_per_chunk: int = 1024


@dataclass(frozen=True)
class _Groups:
    """Whole lines that hold whole rows."""

    rows: int
    lines: int
    words: int  # of a row, padding excluded

    @staticmethod
    def of(storage: Storage) -> _Groups:
        rows = LANES // math.gcd(storage.row_words, LANES)
        return _Groups(rows, rows * storage.row_words // LANES, storage.dim // storage.columns_per_word)

    @property
    def pieces(self) -> int:
        """Lines that the words of one row fill if they start at the first lane."""
        return -(-self.words // LANES)


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """What it cannot take.

    Args:
        shape: storage, sizes and optimizer.
        chip: the TPU.
        config: tuning.

    Returns:
        The limit in words, or None.
    """
    if chip is None:
        return "no TPU is targeted"
    if shape.plain_only:
        return f"{shape.plain_only}: in plain JAX only"
    if shape.storage.num_parts > 1:
        return f"it takes one part, the storage has {shape.storage.num_parts}"
    if "element" in ACCUMULATORS[shape.optimizer] and shape.storage.columns_per_word == 2:
        return f"{shape.optimizer} on a bfloat16 table: table and accumulators do not lie alike"
    if config.ids_per_chunk % LANES:
        return f"ids_per_chunk {config.ids_per_chunk} is no multiple of {LANES}"
    need, most = _vmem_bytes(shape, config), int(chip.tensor_core_vmem_bytes * _MAX_VMEM_SHARE)
    if need > most:
        return (
            f"gradients of {shape.num_bags} bags of dim {shape.storage.dim} need {need} bytes of VMEM, {most} at most"
        )
    return None


def _gradient_words(storage: Storage) -> int:
    return storage.columns_per_word * _Groups.of(storage).pieces * LANES


def _vmem_bytes(shape: Shape, config: Config) -> int:
    groups = _Groups.of(shape.storage)
    state_lines = sum({"element": groups.lines, "row": 1}[kind] for kind in ACCUMULATORS[shape.optimizer])
    lines = config.ids_per_chunk * (groups.lines + state_lines) * LANES
    return 4 * (
        -(-shape.num_bags // 8) * 8 * _gradient_words(shape.storage) + lines + 8 * _gradient_words(shape.storage)
    )


def hbm_bytes(shape: Shape, config: Config, rows: Sequence[int], weighted: bool) -> int:
    """HBM traffic of the kernel, from the DMAs that it issues; the sort comes on top.

    Args:
        shape: storage, sizes and optimizer.
        config: tuning.
        rows: the ids that count, sorted.
        weighted: occurrences have factors: per-id weights, or a mean.

    Returns:
        Bytes.
    """
    groups, chunk = _Groups.of(shape.storage), config.ids_per_chunk
    line = LANES * 4
    lists = math.ceil(shape.num_ids / chunk) * chunk * 4 * (3 if weighted else 2)
    total = lists + shape.num_bags * _gradient_words(shape.storage) * 4
    for start in range(0, len(rows), chunk):
        ends = [
            rows[n] for n in range(start, min(start + chunk, len(rows))) if n + 1 == len(rows) or rows[n] != rows[n + 1]
        ]
        visited = len({row // groups.rows for row in ends})
        total += 2 * visited * groups.lines * line * (1 + ACCUMULATORS[shape.optimizer].count("element"))
        if "row" in ACCUMULATORS[shape.optimizer]:
            total += 2 * len({row // LANES for row in ends}) * line
    return total


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
    """Sort, then step the rows in place.

    Args:
        parts: the storage's only part; aliased with the result if it is donated.
        state: as of `optimizers.pack_state`; likewise.
        grads_BD: float32 `[B, D]`.
        ids_N: int32 `[N]`.
        offsets: int32 `[B + 1]`.
        weights_N: float32 `[N]` or None.
        lr: float32 scalar.
        shape: storage, sizes, pooling and optimizer.
        optimizer: the rule.
        chip: the TPU.
        config: tuning.
        interpret: interpreter parameters, in tests.

    Returns:
        New parts and new state.
    """
    storage, chunk = shape.storage, config.ids_per_chunk
    groups = _Groups.of(storage)
    *state, count = (*state, None) if not optimizer.counts_steps else (*state[:-1], state[-1] + 1)
    found = sorted_occurrences(ids_N, offsets, weights_N, storage.num_rows, shape.pooling)
    padding = (0, -shape.num_ids % chunk)
    lists = [found.rows_N, 2 * found.bags_N + _run_ends(found.rows_N)]
    if found.factors_N is not None:
        lists.append(found.factors_N)
    lists = [jnp.pad(one, padding) for one in lists]
    arrays = [*parts, *(one.reshape(-1, LANES) for one in state)]
    buffers = [pltpu.VMEM((chunk * groups.lines, LANES), storage.word_dtype)]
    for kind in ACCUMULATORS[optimizer.name]:
        buffers.append(pltpu.VMEM((chunk * (groups.lines if kind == "element" else 1), LANES), jnp.float32))
    words = _gradient_words(storage)
    scalars = jnp.stack(step_scalars(optimizer, lr, count))
    results = pl.pallas_call(
        partial(_kernel, storage, optimizer, groups, chunk, found.factors_N is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((shape.num_ids + padding[1]) // chunk,),
            in_specs=[
                *[pl.BlockSpec((chunk,), lambda i, *_: (i,), memory_space=pltpu.SMEM) for _ in lists],
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in range(1 + len(arrays))],
            ],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            scratch_shapes=[
                pltpu.VMEM((shape.num_bags, words), jnp.float32),
                pltpu.VMEM((1, words), jnp.float32),
                [pltpu.SMEM((chunk,), jnp.int32) for _ in buffers],
                buffers,
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays],
        input_output_aliases={3 + len(lists) + i: i for i in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=int(chip.tensor_core_vmem_bytes * _MAX_VMEM_SHARE) + (4 << 20),
            disable_bounds_checks=True,
        ),
        name=f"embedding_update_tensorcore_{optimizer.name}",
        interpret=interpret,
    )(
        found.count[None],
        scalars,
        *lists,
        _lay_out(grads_BD, storage, groups),
        *arrays,
    )
    new_state = [new.reshape(old.shape) for new, old in zip(results[1:], state, strict=True)]
    return tuple(results[:1]), tuple(new_state if count is None else [*new_state, count])


def _run_ends(rows_N: jax.Array) -> jax.Array:
    """Where the next id is another one."""
    return rows_N != jnp.append(rows_N[1:], jnp.int32(-1))


def _lay_out(grads_BD: jax.Array, storage: Storage, groups: _Groups) -> jax.Array:
    """Gradients as the words lie: all first halves of the words, then all second halves, each in whole lines."""
    by_half = grads_BD.reshape(len(grads_BD), groups.words, storage.columns_per_word).transpose(0, 2, 1)
    padded = jnp.pad(by_half, ((0, 0), (0, 0), (0, groups.pieces * LANES - groups.words)))
    return padded.reshape(len(grads_BD), -1)


def _kernel(storage, optimizer, groups, chunk, has_factors, used, scalars, rows, codes, *refs):
    factors, refs = (refs[0], refs[1:]) if has_factors else (None, refs)
    kinds = ACCUMULATORS[optimizer.name]
    num_arrays = 1 + len(kinds)
    grads_hbm, arrays = refs[0], refs[1 + num_arrays : 1 + 2 * num_arrays]
    grads, total, places, buffers, sem = refs[1 + 2 * num_arrays :]
    step = pl.program_id(0)
    here = jnp.clip(used[0] - step * chunk, 0, chunk)

    @pl.when(step == 0)
    def _():
        copy = pltpu.make_async_copy(grads_hbm, grads, sem)
        copy.start()
        copy.wait()
        total[...] = jnp.zeros_like(total)

    windows = [_Window(arrays[0], buffers[0], places[0], sem, groups.rows, groups.lines)]
    for number, kind in enumerate(kinds, start=1):
        size = (groups.rows, groups.lines) if kind == "element" else (LANES, 1)
        windows.append(_Window(arrays[number], buffers[number], places[number], sem, *size))

    def fetch(n, slots):
        ends = codes[n] & 1 == 1
        return [window.visit(rows[n], ends, slot, fetch=True) for window, slot in zip(windows, slots, strict=True)]

    nowhere = [(jnp.int32(-1), jnp.int32(-1))] * num_arrays  # slot, place
    visited = lax.fori_loop(0, here, fetch, nowhere)
    for window, (last, _) in zip(windows, visited, strict=True):
        window.wait(last + 1)

    def add(n, slots):
        code = codes[n]
        ends = code & 1 == 1
        grad = grads[pl.ds(lax.shift_right_logical(code, 1), 1), :]
        total[...] += grad if factors is None else grad * factors[n]
        slots = [window.visit(rows[n], ends, slot, fetch=False) for window, slot in zip(windows, slots, strict=True)]

        @pl.when(ends)
        def _():
            _step_row(storage, optimizer, groups, rows[n], [slot for slot, _ in slots], buffers, total, scalars)
            total[...] = jnp.zeros_like(total)

        return slots

    lax.fori_loop(0, here, add, nowhere)
    for window, (last, _) in zip(windows, visited, strict=True):
        window.write(last + 1)
    for window, (last, _) in zip(windows, visited, strict=True):
        window.wait(last + 1)


class _Window:
    """The places of one array that a chunk touches: `lines` lines for every `rows` rows."""

    def __init__(self, hbm, vmem, places, sem, rows, lines):
        self.hbm, self.vmem, self.places, self.sem, self.rows, self.lines = hbm, vmem, places, sem, rows, lines

    def _ends(self, place, slot):
        # Lines in HBM start anywhere, as their tiles are one line wide each.
        return self.hbm.at[pl.ds(place * self.lines, self.lines)], self.vmem.at[pl.ds(slot * self.lines, self.lines)]

    def visit(self, row, ends, seen, fetch):
        """The slot of a row whose run ends; rows come in order, so a new place is a new slot."""
        slot, last = seen
        place = lax.div(row, jnp.int32(self.rows))
        new = ends & (place != last)
        slot = jnp.where(new, slot + 1, slot)
        if fetch:

            @pl.when(new)
            def _():
                self.places[slot] = place
                pltpu.make_async_copy(*self._ends(place, slot), self.sem).start()

        return slot, jnp.where(ends, place, last)

    def wait(self, count):
        """Await `count` copies of this size."""

        @pl.loop(0, count)
        def _(slot):
            pltpu.make_async_copy(*self._ends(0, slot), self.sem).wait()

    def write(self, count):
        @pl.loop(0, count)
        def _(slot):
            hbm, vmem = self._ends(self.places[slot], slot)
            pltpu.make_async_copy(vmem, hbm, self.sem).start()


def _step_row(storage, optimizer, groups, row, slots, buffers, total, scalars):
    """Step one row where it lies in its group; the rest of the group's words stay."""
    first_word = lax.rem(row, jnp.int32(groups.rows)) * storage.row_words
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    table, base = buffers[0], slots[0] * groups.lines
    placed = [_place(total, half, first_word, groups, lane) for half in range(storage.columns_per_word)]
    masks = [_mine(line, first_word, groups, lane) for line in range(groups.lines)]
    olds = [table[pl.ds(base + line, 1), :] for line in range(groups.lines)]
    values = [list(halves(old, lax.bitcast_convert_type)) if storage.columns_per_word == 2 else [old] for old in olds]
    grads = [
        [decayed(optimizer, placed[half][line], value) for half, value in enumerate(values[line])]
        for line in range(groups.lines)
    ]
    moments, rowwise = optimizer.name in MOMENT_NAMES, "row" in ACCUMULATORS[optimizer.name]
    scale = scalars[0]
    if rowwise:
        squares = sum(
            jnp.where(mask, grad * grad, 0.0) for mask, of_line in zip(masks, grads, strict=True) for grad in of_line
        )
        mean = jnp.sum(squares) * (1.0 / storage.dim)
        scale = _grow_rowwise(optimizer, buffers[-1], slots[-1], row, mean, scalars, lane)
    elements = [(buffer, slot * groups.lines) for buffer, slot in zip(buffers[1:], slots[1:], strict=True)]

    def grow(number, line, grown_of):
        """Grow the accumulators of one line where they are the row's."""
        buffer, first_line = elements[number]
        at = pl.ds(first_line + line, 1)
        old = buffer[at, :]
        grown = grown_of(old)
        buffer[at, :] = jnp.where(masks[line], grown, old)
        return grown

    for line in range(groups.lines):
        moved = grads[line]
        if moments:
            grad = grads[line][0]
            moved = [grow(0, line, lambda old, grad=grad: first_moment(optimizer, old, grad))]
            if not rowwise:
                second = grow(1, line, lambda old, grad=grad: second_moment(optimizer, old, grad * grad))
                scale = moment_rate(optimizer, second, scalars[1], scalars[2])
        elif optimizer.name == "adagrad":
            grad = grads[line][0]
            scale = rate(optimizer, grow(0, line, lambda old, grad=grad: old + grad * grad), scalars[0])
        new = [
            shrunk(optimizer, value, scalars[0]) - scale * move for value, move in zip(values[line], moved, strict=True)
        ]
        word = word_of(*new, lax.bitcast_convert_type) if len(new) == 2 else new[0]
        table[pl.ds(base + line, 1), :] = jnp.where(masks[line], word, olds[line])


def _mine(line, first_word, groups, lane):
    word = line * LANES + lane
    return (word >= first_word) & (word < first_word + groups.words)


def _place(total, half, first_word, groups, lane):
    """The row's gradient shifted to where the row lies in its group, a `[1, 128]` per line."""
    pieces = [total[:, pl.ds((half * groups.pieces + p) * LANES, LANES)] for p in range(groups.pieces)]
    if groups.rows == 1:
        return pieces
    first_line, shift = lax.div(first_word, jnp.int32(LANES)), lax.rem(first_word, jnp.int32(LANES))
    turned = [pltpu.roll(piece, shift, 1) for piece in pieces]
    placed = []
    for line in range(groups.lines):
        value = jnp.zeros((1, LANES), jnp.float32)
        for p, piece in enumerate(turned):
            starts_here = (first_line + p == line) & (lane >= shift)
            spills_here = (first_line + p + 1 == line) & (lane < shift)
            value = jnp.where(starts_here | spills_here, value + piece, value)
        placed.append(value)
    return placed


def _grow_rowwise(optimizer, state, slot, row, mean_square, scalars, lane):
    """Grow the row's accumulator in its line of 128; returns the factor of what the row moves along."""
    at = pl.ds(slot, 1)
    mine = lane == lax.rem(row, jnp.int32(LANES))
    old = state[at, :]
    if optimizer.name in MOMENT_NAMES:
        grown = jnp.where(mine, second_moment(optimizer, old, mean_square), old)
        factor = moment_rate(optimizer, grown, scalars[1], scalars[2])
    else:
        grown = jnp.where(mine, old + mean_square, old)
        factor = rate(optimizer, grown, scalars[0])
    state[at, :] = grown
    return jnp.sum(jnp.where(mine, factor, 0.0))
