"""A stream of rows into one vector subcore: id lists and the rows that they name, kept in flight in rings.

Chunk c is ids `[c * C, (c + 1) * C)`. While chunk c is worked on, the rows of the next `ring - 1` chunks and one more
list of ids are on their way. Everything here runs inside a SparseCore kernel.
Legend: C rows of a chunk, W words of a row, L lanes, P parts, S slots of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tpurec.kernels.storage import Storage
from tpurec.topology.chips import SparseCore

INT32, FLOAT32 = jnp.int32, jnp.float32
SKIP = -1  # the DMA engine fetches nothing for this index
_RAW_SLOTS = 2  # one list being prepared, one on its way


def subcore_mesh(core: SparseCore) -> plsc.VectorSubcoreMesh:
    """All vector subcores of one device.

    Args:
        core: the chip's facts.

    Returns:
        The mesh for `pl.kernel`, with the axes `core` and `subcore`.
    """
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=core.num_cores, num_subcores=core.num_subcores
    )


def subcore_index(core: SparseCore) -> jax.Array:
    """Inside a kernel: which of `core.num_workers` this subcore is.

    Args:
        core: the chip's facts.

    Returns:
        int32 scalar.
    """
    return lax.axis_index("core") * core.num_subcores + lax.axis_index("subcore")


def scalar_at(source_hbm: Any, index: jax.Array, scratch_v: Any, core: SparseCore) -> jax.Array:
    """Inside a kernel: read one int32 from HBM; a subcore cannot copy HBM to scalar memory, so through a vector.

    Args:
        source_hbm: int32 `[n]`, with a vector's worth of entries behind `index`.
        index: int32 scalar.
        scratch_v: int32 VMEM of at least a vector and 8 entries.
        core: the chip's facts.

    Returns:
        int32 scalar.
    """
    aligned = pl.multiple_of(index // 8 * 8, 8)  # 1-d slices of HBM start at whole granules
    pltpu.sync_copy(source_hbm.at[pl.ds(aligned, core.num_lanes)], scratch_v.at[pl.ds(0, core.num_lanes)])
    return scratch_v[pl.ds(index - aligned, core.num_lanes)][0]


@dataclass(frozen=True)
class RowStream:
    """Shapes of a stream; `scratch` goes to the kernel's scratch, `open` makes it inside the kernel.

    Args:
        storage: the tables that rows are fetched from.
        core: the chip's facts.
        chunk_rows: C, at most 128.
        ring: S, row buffers.
        weighted: a float32 weight comes with each id.
        counted: weights are asked for although there are none: 1 for ids that count.
    """

    storage: Storage
    core: SparseCore
    chunk_rows: int
    ring: int
    weighted: bool
    counted: bool

    def scratch(self) -> dict[str, Any]:
        """What the kernel must allocate.

        Returns:
            Scratch types by name.
        """
        chunk, has_weights = self.chunk_rows, self.weighted or self.counted
        return {
            "raw": pltpu.VMEM((_RAW_SLOTS, chunk), INT32),
            "raw_weights": pltpu.VMEM((_RAW_SLOTS, chunk) if self.weighted else (1, 8), FLOAT32),
            "lists": pltpu.VMEM((self.ring, self.storage.num_parts, chunk), INT32),
            "missing": pltpu.VMEM((self.ring, chunk + self.core.num_lanes), INT32),
            "weights": pltpu.VMEM((self.ring, chunk) if has_weights else (1, 8), FLOAT32),
            "rows": pltpu.VMEM((self.ring, chunk, self.storage.row_words), self.storage.word_dtype),
            "raw_sem": pltpu.SemaphoreType.DMA((_RAW_SLOTS,)),
            "raw_weights_sem": pltpu.SemaphoreType.DMA((_RAW_SLOTS,)),
            "rows_sem": pltpu.SemaphoreType.DMA((self.ring,)),
        }

    def open(
        self, parts_hbm: Sequence[Any], inputs_hbm: Sequence[Any], rings: dict[str, Any], first: Any, end: Any
    ) -> OpenStream:
        """Inside the kernel: the stream of ids `[first, end)`.

        Args:
            parts_hbm: the storage's parts.
            inputs_hbm: ids, and weights if `weighted`; their length is a multiple of C.
            rings: the scratch.
            first: int32 scalar, the first position that counts.
            end: int32 scalar, behind the last.

        Returns:
            The open stream.
        """
        return OpenStream(self, parts_hbm, inputs_hbm, rings, first, end)


class OpenStream:
    """A stream inside of a kernel: `prologue()` once, then `arrive(c)` for each chunk in order."""

    def __init__(self, shapes: RowStream, parts_hbm, inputs_hbm, rings, first, end) -> None:
        storage = shapes.storage
        self.shapes, self.rings, self.first, self.end = shapes, rings, first, end
        self.parts = [part.reshape(storage.rows_per_part, storage.row_words) for part in parts_hbm]
        self.inputs = inputs_hbm
        self.first_chunk = first // shapes.chunk_rows
        self.end_chunk = jnp.where(end > first, (end + shapes.chunk_rows - 1) // shapes.chunk_rows, self.first_chunk)

    def slot(self, c) -> jax.Array:
        """Where the rows of a chunk lie; compute it outside of inner loops, where the compiler would leave it.

        Args:
            c: int32 scalar, the chunk.

        Returns:
            int32 scalar, what `weights` and `values` take.
        """
        return lax.rem(c, self.shapes.ring)

    def _copy_ids(self, c) -> list[Any]:
        slot = lax.rem(c, _RAW_SLOTS)
        window = pl.ds(pl.multiple_of(c * self.shapes.chunk_rows, 8), self.shapes.chunk_rows)
        targets = [("raw", "raw_sem"), ("raw_weights", "raw_weights_sem")]
        return [
            pltpu.make_async_copy(source.at[window], self.rings[target].at[slot], self.rings[semaphore].at[slot])
            for source, (target, semaphore) in zip(self.inputs, targets, strict=False)
        ]

    def _copy_rows(self, c) -> list[Any]:
        slot = self.slot(c)
        return [
            pltpu.make_async_copy(
                part.at[plsc.Indices(self.rings["lists"].at[slot, p], ignored_value=SKIP)],
                self.rings["rows"].at[slot],
                self.rings["rows_sem"].at[slot],
            )
            for p, part in enumerate(self.parts)
        ]

    def start_ids(self, c) -> None:
        """Start fetching the ids (and weights) of chunk c."""
        for copy in self._copy_ids(c):
            copy.start()

    def start_rows(self, c) -> None:
        """Await the ids of chunk c, and start fetching their rows."""
        for copy in self._copy_ids(c):
            copy.wait()
        self._prepare(c)
        for copy in self._copy_rows(c):
            copy.start()

    def wait_rows(self, c) -> None:
        """Await the rows of chunk c."""
        for copy in self._copy_rows(c):
            copy.wait()

    def prologue(self) -> None:
        """Fill the rings."""

        @pl.when(self.first_chunk < self.end_chunk)
        def _():
            self.start_ids(self.first_chunk)

        @pl.loop(self.first_chunk, jnp.minimum(self.first_chunk + self.shapes.ring - 1, self.end_chunk))
        def _(c):
            @pl.when(c + 1 < self.end_chunk)
            def _():
                self.start_ids(c + 1)

            self.start_rows(c)

    def arrive(self, c) -> None:
        """Make the rows of chunk c readable, and keep the rings full. Call it once per chunk, in order.

        Args:
            c: int32 scalar, the chunk.
        """
        ahead = c + self.shapes.ring - 1

        @pl.when(ahead + 1 < self.end_chunk)
        def _():
            self.start_ids(ahead + 1)

        @pl.when(ahead < self.end_chunk)
        def _():
            self.start_rows(ahead)

        self.wait_rows(c)
        self._clear_missing(c)

    def _prepare(self, c) -> None:
        """Raw ids to one list per part; what does not count becomes SKIP, and its weight 0."""
        shapes, storage, lanes = self.shapes, self.shapes.storage, self.shapes.core.num_lanes
        slot, raw_slot = self.slot(c), lax.rem(c, _RAW_SLOTS)
        lane = lax.iota(INT32, lanes)

        @plsc.parallel_loop(0, shapes.chunk_rows, step=lanes)
        def _(at):
            here = pl.ds(at, lanes)
            ids = self.rings["raw"][raw_slot, here]
            position = c * shapes.chunk_rows + at + lane
            inside = (position >= self.first) & (position < self.end)
            exists = (ids >= 0) & (ids < storage.num_rows)
            counts = inside & exists
            for p in range(storage.num_parts):
                local = ids - p * storage.rows_per_part
                mine = counts & (local >= 0) & (local < storage.rows_per_part)
                self.rings["lists"][slot, p, here] = jnp.where(mine, local, SKIP)
            self.rings["missing"][slot, here] = jnp.where(inside & ~exists, 1, 0)
            if shapes.weighted:
                self.rings["weights"][slot, here] = jnp.where(counts, self.rings["raw_weights"][raw_slot, here], 0.0)
            elif shapes.counted:
                self.rings["weights"][slot, here] = jnp.where(counts, 1.0, 0.0)

    def _clear_missing(self, c) -> None:
        """Rows of ids that do not exist were not fetched: clear what an earlier chunk left in their place."""
        shapes, lanes = self.shapes, self.shapes.core.num_lanes
        slot = self.slot(c)

        @plsc.parallel_loop(0, shapes.chunk_rows, step=lanes, carry=jnp.zeros((lanes,), INT32))
        def any_missing(at, found):
            return found | self.rings["missing"][slot, pl.ds(at, lanes)]

        @pl.when(jnp.sum(any_missing) > 0)
        def _():
            @pl.loop(0, shapes.chunk_rows)
            def _(row):
                @pl.when(self.rings["missing"][slot, pl.ds(row, lanes)][0] == 1)
                def _():
                    self._clear_row(slot, row)

    def _clear_row(self, slot, row) -> None:
        lanes, words = self.shapes.core.num_lanes, self.shapes.storage.row_words
        zeros = jnp.zeros((lanes,), self.shapes.storage.word_dtype)
        rows = self.rings["rows"].at[slot]
        for start in range(0, words - lanes + 1, lanes):
            rows[row, pl.ds(start, lanes)] = zeros
        if words % lanes:
            lane = lax.iota(INT32, lanes)
            column = jnp.minimum(words // lanes * lanes + lane, words - 1)
            plsc.store_scatter(rows, [jnp.full((lanes,), row), column], zeros, mask=lane < words % lanes)

    def weights(self, slot, at) -> jax.Array:
        """The weights of one vector of ids.

        Args:
            slot: of the chunk.
            at: position in the chunk.

        Returns:
            float32 `[L]`; 0 for ids that do not count.
        """
        return self.rings["weights"][slot, pl.ds(at, self.shapes.core.num_lanes)]

    def values(self, slot, row, first_vector, num_vectors: int) -> list[jax.Array]:
        """Columns of one row, as float32 vectors.

        Args:
            slot: of the chunk, which has arrived.
            row: the row in the chunk.
            first_vector: the first vector of words.
            num_vectors: how many.

        Returns:
            float32: `num_vectors` vectors; for bfloat16 the even columns of each vector, then the odd ones. Words
            behind the end of a row repeat its last one.
        """
        shapes, lanes = self.shapes, self.shapes.core.num_lanes
        rows, words = self.rings["rows"], shapes.storage.row_words
        found = []
        for q in range(num_vectors):
            start = (first_vector + q) * lanes
            if isinstance(start, int) and start + lanes > words:
                column = jnp.minimum(start + lax.iota(INT32, lanes), words - 1)
                found.append(plsc.load_gather(rows.at[slot], [jnp.full((lanes,), row), column]))
            else:
                # One indexing step: through `rows.at[slot]` the compiler no longer sees that loads and stores are of
                # different buffers, and orders them.
                found.append(rows[slot, row, pl.ds(start, lanes)])
        if shapes.storage.columns_per_word == 1:
            return found
        # A bfloat16 is the upper half of a float32.
        even = [plsc.bitcast(lax.shift_left(word, jnp.full((lanes,), 16, INT32)), FLOAT32) for word in found]
        odd = [plsc.bitcast(word & jnp.full((lanes,), -65536, INT32), FLOAT32) for word in found]
        return even + odd
