"""`embedding_bag` on a TensorCore, by manual DMA: for v5e, which has no SparseCore.

Plain XLA would lay out a table whose rows are not one line anew on every call. Here each id fetches the lines that its
row touches, as they lie, one DMA a line (Mosaic takes more lines at once only from multiples of 8), and rotates the row
to the front of its registers. A chunk of ids is worked on in pieces: while one piece is added up, the lines of the next
are on their way. The accumulators of all bags stay in VMEM.

Legend: B bags, N ids (capacity), K lines that one row may touch, Q lines of one accumulated half row, H halves of a
word (1 for float32, 2 for bfloat16), A lines of one accumulator.
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

from tpurec.errors import ConfigError
from tpurec.kernels.bfloat16_words import halves
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.embedding_bag import bag_of_ids, divide_by_weight
from tpurec.kernels.storage import LANES, SUBLANES, Storage, line_window
from tpurec.topology.chips import Chip

_MAX_VMEM_SHARE = 0.75  # of a TensorCore's memory
_NO_BAG = -1


@dataclass(frozen=True)
class Config:
    """What may be tuned.

    Args:
        ids_per_chunk: ids whose numbers are in scalar memory at a time, a multiple of 1,024.
        ids_per_piece: ids whose lines are fetched together; two pieces are in VMEM.
    """

    ids_per_chunk: int = 1024
    ids_per_piece: int = 128


def _accumulator_lines(shape: Shape) -> int:
    """Lines of one accumulator: Q for each half of a word, and one for the sum of the weights of a mean."""
    per_half = math.ceil(shape.storage.row_words / LANES)
    return per_half * shape.storage.columns_per_word + (shape.pooling == "mean")


def _vmem_bytes(shape: Shape, config: Config) -> int:
    bags = math.ceil(shape.num_bags / SUBLANES) * SUBLANES
    sums = 2 * bags * _accumulator_lines(shape) * LANES * 4  # the pipeline holds an output block twice
    return sums + 2 * config.ids_per_piece * shape.storage.lines_per_row * LANES * 4


def limit(shape: Shape, chip: Chip | None, config: Config) -> str | None:
    """What of a shape this kernel cannot take.

    Args:
        shape: storage and sizes.
        chip: the TPU compiled for.
        config: tuning.

    Returns:
        The limit in words, or None.
    """
    if chip is None:
        return "no TPU is targeted"
    if config.ids_per_chunk % 1024 or config.ids_per_chunk % config.ids_per_piece:
        return f"ids_per_chunk {config.ids_per_chunk} must be a multiple of 1024 and of {config.ids_per_piece}"
    needed, most = _vmem_bytes(shape, config), int(chip.tensor_core_vmem_bytes * _MAX_VMEM_SHARE)
    if needed > most:
        return f"the accumulators of {shape.num_bags} bags and the buffers need {needed} bytes of VMEM, of {most}"
    return None


def hbm_bytes(shape: Shape, config: Config, rows: Sequence[int]) -> int:
    """HBM traffic of a call, from the DMAs that the kernel issues and the lists that XLA makes for it.

    Args:
        shape: storage and sizes.
        config: tuning.
        rows: the ids that count.

    Returns:
        Bytes.
    """
    storage = shape.storage
    begins = [row % LANES * storage.row_words % LANES for row in range(LANES)]
    touched = [math.ceil((begin + storage.row_words) / LANES) for begin in begins]
    lines = sum(touched[row % LANES] for row in rows)
    num_lists = 3 + (storage.num_parts > 1) + shape.weighted
    padded_ids = math.ceil(shape.num_ids / config.ids_per_chunk) * config.ids_per_chunk
    sums = shape.num_bags * _accumulator_lines(shape) * LANES * 4
    # XLA reads the ids, writes the lists, and reads the accumulators once more to put columns in order.
    return lines * LANES * 4 + 2 * num_lists * padded_ids * 4 + shape.num_ids * 4 + 2 * sums + sums


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
    """Launch on one TensorCore.

    Args:
        parts: the storage's parts.
        ids_N: int32 `[N]`.
        offsets: int32 `[num_bags + 1]`.
        weights_N: float32 `[N]` or None.
        shape: storage, sizes and pooling.
        chip: the TPU compiled for.
        config: tuning.
        interpret: interpreter parameters, for tests.

    Returns:
        float32 `[num_bags, dim]`.
    """
    if chip is None:
        raise ConfigError("the TensorCore kernel needs the facts of a chip.")
    storage = shape.storage
    bags = math.ceil(shape.num_bags / SUBLANES) * SUBLANES
    sums_shape = (_accumulator_lines(shape), bags, LANES)
    bag_N, counts_N = bag_of_ids(ids_N, offsets, storage.num_rows)
    bag_N = jnp.where(counts_N, bag_N, _NO_BAG)
    part_N, local_N = ids_N // storage.rows_per_part, ids_N % storage.rows_per_part
    lines_NK, start_N = line_window(jnp.where(counts_N, local_N, 0), storage)
    lists = [lines_NK[:, 0], start_N, bag_N] + ([part_N] if storage.num_parts > 1 else [])
    lists += [] if weights_N is None else [weights_N]
    padding = (0, -shape.num_ids % config.ids_per_chunk)
    lists = [jnp.pad(one, padding, constant_values=_NO_BAG) for one in lists]
    window = (2, config.ids_per_piece * storage.lines_per_row, LANES)
    pooled = pl.pallas_call(
        partial(_kernel, shape, config, weights_N is not None),
        grid=(len(lists[0]) // config.ids_per_chunk,),
        in_specs=[
            *[pl.BlockSpec((config.ids_per_chunk,), lambda i: (i,), memory_space=pltpu.SMEM) for _ in lists],
            *[pl.BlockSpec(memory_space=pl.ANY) for _ in parts],
        ],
        out_specs=pl.BlockSpec(sums_shape, lambda i: (0, 0, 0)),
        scratch_shapes=[pltpu.VMEM(window, storage.word_dtype), pltpu.SemaphoreType.DMA((2,))],
        out_shape=jax.ShapeDtypeStruct(sums_shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=int(chip.tensor_core_vmem_bytes * _MAX_VMEM_SHARE) + (4 << 20),
            disable_bounds_checks=True,
        ),
        name="embedding_bag_tensorcore",
        interpret=interpret,
    )(*lists, *parts)
    return _columns_in_order(pooled[:, : shape.num_bags], shape)


def _columns_in_order(pooled_AB: jax.Array, shape: Shape) -> jax.Array:
    """Accumulators, a line each, to `[num_bags, dim]`: halves of words back in turn, means divided."""
    storage, num_bags = shape.storage, shape.num_bags
    per_half = math.ceil(storage.row_words / LANES)
    halves_HBW = pooled_AB[: per_half * storage.columns_per_word].reshape(-1, per_half, num_bags, LANES)
    halves_HBW = halves_HBW.transpose(0, 2, 1, 3).reshape(-1, num_bags, per_half * LANES)[:, :, : storage.row_words]
    found = jnp.moveaxis(halves_HBW, 0, 2).reshape(num_bags, -1)[:, : storage.dim]
    return divide_by_weight(found, pooled_AB[-1, :, 0]) if shape.pooling == "mean" else found


def _kernel(shape: Shape, config: Config, weighted: bool, *refs) -> None:
    storage = shape.storage
    several = storage.num_parts > 1
    first, start, bag, *refs = refs
    (part, *refs) = refs if several else (None, *refs)
    (weights, *refs) = refs if weighted else (None, *refs)
    parts, (sums, window, semaphores) = refs[: storage.num_parts], refs[storage.num_parts :]
    num_lines, piece_ids = storage.lines_per_row, config.ids_per_piece

    @pl.when(pl.program_id(0) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def copies(piece, action) -> None:
        """Start or await the lines of every id that counts in a piece."""
        slot = lax.rem(piece, 2)

        @pl.loop(0, piece_ids)
        def _(n):
            at = piece * piece_ids + n
            for p, part_hbm in enumerate(parts):
                mine = bag[at] != _NO_BAG
                if several:
                    mine &= part[at] == p
                lines_touched = (start[at] + storage.row_words + LANES - 1) // LANES
                for k in range(num_lines):

                    @pl.when(mine & (k < lines_touched))
                    def _(part_hbm=part_hbm, k=k):
                        source = part_hbm.at[pl.ds(first[at] + k, 1)]
                        target = window.at[slot, pl.ds(n * num_lines + k, 1)]
                        action(pltpu.make_async_copy(source, target, semaphores.at[slot]))

    num_pieces = config.ids_per_chunk // piece_ids
    copies(jnp.int32(0), _start)

    @pl.loop(0, num_pieces)
    def _(piece):
        @pl.when(piece + 1 < num_pieces)
        def _():
            copies(piece + 1, _start)

        copies(piece, _wait)
        slot = lax.rem(piece, 2)

        @pl.loop(0, piece_ids)
        def _(n):
            at = piece * piece_ids + n

            @pl.when(bag[at] != _NO_BAG)
            def _():
                lines = [window[slot, pl.ds(n * num_lines + k, 1), :] for k in range(num_lines)]
                words = _row_in_front(lines, start[at], storage)
                values = words if storage.columns_per_word == 1 else _halves(words)
                if weighted:
                    values = [value * weights[at] for value in values]
                if shape.pooling == "mean":
                    values.append(jnp.full((1, LANES), weights[at] if weighted else 1.0, jnp.float32))
                for q, value in enumerate(values):
                    here = pl.ds(bag[at], 1)
                    sums[q, here, :] = sums[q, here, :] + value


def _start(copy) -> None:
    copy.start()


def _wait(copy) -> None:
    copy.wait()


def _halves(words: list[jax.Array]) -> list[jax.Array]:
    """All even columns, then all odd ones."""
    both = [halves(word, lax.bitcast_convert_type) for word in words]
    return [even for even, _ in both] + [odd for _, odd in both]


def _row_in_front(lines: list[jax.Array], start: jax.Array, storage: Storage) -> list[jax.Array]:
    """The row that starts at word `start` of the first line, moved to word 0; behind its end anything may follow."""
    wanted = math.ceil(storage.row_words / LANES)
    if storage.row_words % LANES == 0:
        return lines[:wanted]
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    turned = [pltpu.roll(line, lax.rem(LANES - start, LANES), 1) for line in lines]
    turned += turned[-1:]  # a row that fits its lines has nothing in one behind them
    return [jnp.where(lane < LANES - start, turned[q], turned[q + 1]) for q in range(wanted)]
