"""How tables of one dim lie in memory, so that no kernel and no compiler ever moves a table to use it.

A TPU tiles the two minor dimensions of an array. `[rows, dim]` with dim other than 128, and any bfloat16 table, would
be laid out anew, in full, on every call of a SparseCore kernel. What is never laid out anew is a 32-bit array with 128
columns: its tiled and its linear layout are the same bytes. So a table is stored as *lines* of 128 32-bit *words*:

- float32: a row is `dim` words, rows follow one another without gaps. Row r starts at word `r * row_words`, which may
  be in the middle of a line (dim 24, 288). Nothing is padded but the end of the table.
- bfloat16: two neighbouring columns are one int32 word, the even column in the low half: exactly the bytes of a
  row-major bfloat16 `[rows, dim]`. Rows are padded to whole 32-byte DMA granules, because DMAs address those:
  dim 8 costs 2x, 24 costs 1.33x, any multiple of 16 costs nothing.

A SparseCore kernel takes at most 16 GiB per tensor, so larger storages are split into *parts* of equal shape.
Legend: L lines, W words per row, R rows, D dim, N ids, K lines that one row may touch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpurec.errors import ConfigError
from tpurec.kernels.limits import MAX_DIM, MAX_TENSOR_BYTES, num_tensors, rows_per_tensor

LANES = 128
SUBLANES = 8
WORD_BYTES = 4
GRANULE_WORDS = 8  # 32 bytes, what a SparseCore DMA addresses
_COLUMNS_PER_WORD = {"float32": 1, "bfloat16": 2}


@dataclass(frozen=True)
class Storage:
    """Shapes of one storage: one table, or several of the same dim below one another.

    Args:
        num_rows: rows of all its tables together; global rows are int32, so at most 2**31 - 1.
        dim: columns, a multiple of 8 up to 1,280.
        dtype: `float32` or `bfloat16`.
        max_part_bytes: a part is at most this large; the 16 GiB of a SparseCore tensor unless a test wants less.

    Raises:
        ConfigError: naming the value and the limit.

    >>> Storage(num_rows=1000, dim=24).part_shape
    (192, 128)
    """

    num_rows: int
    dim: int
    dtype: str = "float32"
    max_part_bytes: int = MAX_TENSOR_BYTES

    def __post_init__(self) -> None:
        if self.dim % 8 or not 8 <= self.dim <= MAX_DIM:
            raise ConfigError(
                f"embedding_dim {self.dim}: kernels take multiples of 8 from 8 to {MAX_DIM}.",
                "Pad or split the columns.",
            )
        if self.dtype not in _COLUMNS_PER_WORD:
            raise ConfigError(f"dtype {self.dtype!r}: tables are {' or '.join(_COLUMNS_PER_WORD)}.")
        if not 1 <= self.num_rows < 2**31:
            raise ConfigError(
                f"num_rows {self.num_rows}: rows are int32, so 1 to {2**31 - 1} in one storage.",
                "Make several storages.",
            )
        rows_per_tensor(self.num_rows, self.row_bytes, self.max_part_bytes)  # refuses a limit that is too low

    @property
    def columns_per_word(self) -> int:
        """1 for float32, 2 for bfloat16."""
        return _COLUMNS_PER_WORD[self.dtype]

    @property
    def row_words(self) -> int:
        """32-bit words from one row to the next, padding included."""
        return _round_up(self.dim // self.columns_per_word, GRANULE_WORDS)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next, padding included."""
        return self.row_words * WORD_BYTES

    @property
    def word_dtype(self) -> Any:
        """jnp dtype of the parts: float32, or int32 for pairs of bfloat16."""
        return jnp.float32 if self.columns_per_word == 1 else jnp.int32

    @cached_property
    def rows_per_part(self) -> int:
        """Rows in each part; the last part's surplus rows are never addressed."""
        return rows_per_tensor(self.num_rows, self.row_bytes, self.max_part_bytes)

    @property
    def num_parts(self) -> int:
        """Tensors that hold the table."""
        return num_tensors(self.num_rows, self.row_bytes, self.max_part_bytes)

    @property
    def part_shape(self) -> tuple[int, int]:
        """`(lines, 128)` of every part."""
        return self.rows_per_part * self.row_words // LANES, LANES

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts together."""
        return self.num_parts * self.rows_per_part * self.row_bytes

    @property
    def lines_per_row(self) -> int:
        """K: the most lines that one row touches."""
        step = math.gcd(self.row_words, LANES)
        return (LANES - step + self.row_words + LANES - 1) // LANES

    @property
    def words_per_access(self) -> int:
        """Words that a TensorCore reads to get one row: whole lines."""
        return self.lines_per_row * LANES


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def stack(num_rows: Sequence[int], dim: int, dtype: str = "float32") -> tuple[Storage, tuple[int, ...]]:
    """Put tables of one dim below one another, so that one launch serves all of their features.

    Args:
        num_rows: rows of each table.
        dim: columns of all of them.
        dtype: as of `Storage`.

    Returns:
        The storage, and the row offset of each table: row i of table t is global row `offsets[t] + i`.

    Raises:
        ConfigError: no tables, or a limit of `Storage`.

    >>> stack([10, 5], dim=128)[1]
    (0, 10)
    """
    if not num_rows:
        raise ConfigError("no tables to stack.")
    offsets, total = [], 0
    for rows in num_rows:
        offsets.append(total)
        total += rows
    return Storage(total, dim, dtype), tuple(offsets)


def pack(table_RD: jax.Array, storage: Storage) -> tuple[jax.Array, ...]:
    """Lay a plain table out as the storage's parts.

    Args:
        table_RD: `[num_rows, dim]` in the storage's dtype.
        storage: the shapes.

    Returns:
        Parts, each `storage.part_shape` of `storage.word_dtype`; padding is zero.
    """
    if table_RD.shape != (storage.num_rows, storage.dim) or table_RD.dtype != storage.dtype:
        raise ConfigError(f"table {table_RD.shape} {table_RD.dtype} is not of {storage}.")
    rows = storage.num_parts * storage.rows_per_part
    columns = storage.row_words * storage.columns_per_word
    padded = jnp.pad(table_RD, ((0, rows - storage.num_rows), (0, columns - storage.dim)))
    words = to_words(padded, storage).reshape(storage.num_parts, *storage.part_shape)
    return tuple(words)


def unpack(parts: Sequence[jax.Array], storage: Storage) -> jax.Array:
    """The inverse of `pack`.

    Args:
        parts: as `pack` returns them.
        storage: the shapes.

    Returns:
        `[num_rows, dim]` in the storage's dtype.
    """
    words = jnp.concatenate([part.reshape(storage.rows_per_part, storage.row_words) for part in parts])
    return from_words(words[: storage.num_rows], storage)


def to_words(rows_ND: jax.Array, storage: Storage) -> jax.Array:
    """Rows in the storage's dtype to 32-bit words.

    Args:
        rows_ND: `[N, row_words * columns_per_word]`.
        storage: the shapes.

    Returns:
        `[N, row_words]`.
    """
    if storage.columns_per_word == 1:
        return rows_ND
    return jax.lax.bitcast_convert_type(rows_ND.reshape(len(rows_ND), storage.row_words, 2), jnp.int32)


def from_words(words_NW: jax.Array, storage: Storage) -> jax.Array:
    """32-bit words to rows in the storage's dtype, padding columns cut off.

    Args:
        words_NW: `[N, row_words]`.
        storage: the shapes.

    Returns:
        `[N, dim]`.
    """
    if storage.columns_per_word == 1:
        return words_NW[:, : storage.dim]
    columns = jax.lax.bitcast_convert_type(words_NW, jnp.bfloat16)
    return columns.reshape(len(words_NW), -1)[:, : storage.dim]


def line_window(rows_N: jax.Array, storage: Storage) -> tuple[jax.Array, jax.Array]:
    """Where rows lie in a part.

    Args:
        rows_N: int32, rows within the part.
        storage: the shapes.

    Returns:
        int32 `[N, K]` lines that cover each row (the last ones may not be needed), clipped into the part; and int32
        `[N]`, the word at which the row starts in the first of them.
    """
    # rows * row_words would overflow int32 beyond 8 GiB: split the row into whole periods of lines.
    period_rows = LANES // math.gcd(storage.row_words, LANES)
    period_lines = period_rows * storage.row_words // LANES
    within = rows_N % period_rows * storage.row_words
    first = rows_N // period_rows * period_lines + within // LANES
    lines = first[:, None] + jnp.arange(storage.lines_per_row, dtype=jnp.int32)
    return jnp.minimum(lines, storage.part_shape[0] - 1), within % LANES


def gather_rows(parts: Sequence[jax.Array], rows_N: jax.Array, storage: Storage) -> jax.Array:
    """Read rows with plain XLA gathers of whole lines, which relay nothing out on any backend.

    Args:
        parts: the storage's parts.
        rows_N: int32 `[N]`, each in `[0, num_rows)`.
        storage: the shapes.

    Returns:
        float32 `[N, dim]`.
    """
    words = None
    for index, part in enumerate(parts):
        local = jnp.clip(rows_N - index * storage.rows_per_part, 0, storage.rows_per_part - 1)
        found = _gather_words(part, local, storage)
        here = rows_N // storage.rows_per_part == index
        words = found if words is None else jnp.where(here[:, None], found, words)
    return from_words(words, storage).astype(jnp.float32)


def _gather_words(part: jax.Array, rows_N: jax.Array, storage: Storage) -> jax.Array:
    lines_NK, start_N = line_window(rows_N, storage)
    window = part[lines_NK].reshape(len(rows_N), -1)
    if storage.row_words % LANES == 0:
        return window
    columns = start_N[:, None] + jnp.arange(storage.row_words, dtype=jnp.int32)
    return jnp.take_along_axis(window, columns, axis=1)
