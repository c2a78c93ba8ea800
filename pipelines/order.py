"""Which rows make up batch t of epoch e: a pure function of (data manifest, seed, e, t), for any number of workers.

An epoch permutes the row groups of all files, joins their rows in that order, cuts this sequence into windows that are
whole multiples of the batch size, and shuffles inside each window. So any batch can be found without reading those
before it, memory is one window, and only the very last batch of an epoch can be short. The validation cut takes whole
pieces of row groups, scattered over the data, and is the same for every epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Enough pieces for a fair cut of small data; in data with more row groups a piece is a whole row group, so that
# validation reads only the row groups it needs.
VALIDATION_PIECES = 2000
NATURAL_WINDOW_ROWS = 65_536


@dataclass(frozen=True)
class ManifestFile:
    """One Parquet file.

    Args:
        path: where it is.
        name: its path below the folder it was found in, by which it is recognised when the data has moved.
        row_groups: rows of each row group.
        footer_sha256: digest of the Parquet footer, which holds the sizes, offsets and statistics of all columns.
    """

    path: str
    name: str
    row_groups: tuple[int, ...]
    footer_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a data set, in the order in which their rows are numbered.

    Args:
        files: the files, sorted.
    """

    files: tuple[ManifestFile, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(sum(file.row_groups) for file in self.files)

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal data, wherever its folder is.

        Returns:
            64 hex digits.
        """
        identity = [[file.name, list(file.row_groups), file.footer_sha256] for file in self.files]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


@dataclass(frozen=True)
class Segment:
    """Rows of one row group, in file order.

    Args:
        file: index into `Manifest.files`.
        row_group: index in that file.
        rows: int64 [n], ascending row numbers within the row group.
    """

    file: int
    row_group: int
    rows: np.ndarray


@dataclass(frozen=True)
class Window:
    """Rows that are read together, and the batches made of them.

    Args:
        index: its number in the pass.
        first_batch: number of its first batch in the pass.
        segments: what to read; the rows, joined in this order, are numbered 0 to n - 1.
        slots: int64 [num_batches, batch_size], numbers of those rows; -1 marks padding, at the end of a batch.
        batch_rows: int64 [num_batches], rows of the global batches if these are one rank's shares of them; else None.
    """

    index: int
    first_batch: int
    segments: tuple[Segment, ...]
    slots: np.ndarray
    batch_rows: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Rows in the window."""
        return sum(len(segment.rows) for segment in self.segments)


class Pass:
    """One pass over a selection of rows, cut into batches and windows.

    Args:
        rows_of_chunk: gives the ascending row numbers, int64, to use of a row group, by its index in `chunks`.
        chunks: pairs (file, row group) in the natural order of the data set.
        chunk_sizes: int64 [num_chunks], rows selected in each.
        chunk_order: int64 [num_chunks], the order in which row groups come.
        batch_size: rows of a batch.
        window_rows: rows of a window, a multiple of `batch_size`.
        shuffle_key: names the shuffle of this pass; None keeps the order.
    """

    def __init__(
        self,
        rows_of_chunk: Callable[[int], np.ndarray],
        chunks: Sequence[tuple[int, int]],
        chunk_sizes: np.ndarray,
        chunk_order: np.ndarray,
        batch_size: int,
        window_rows: int,
        shuffle_key: tuple[object, ...] | None,
    ) -> None:
        self._rows_of_chunk = rows_of_chunk
        self._chunks = chunks
        self._order = chunk_order
        self._ends = np.cumsum(chunk_sizes[chunk_order])
        self._shuffle_key = shuffle_key
        self.batch_size = batch_size
        self.window_rows = window_rows
        self.num_rows = int(self._ends[-1]) if len(self._ends) else 0
        self.num_batches = -(-self.num_rows // batch_size)
        self.num_windows = -(-self.num_rows // window_rows)
        self.batches_per_window = window_rows // batch_size

    def window(self, index: int) -> Window:
        """Return one window.

        Args:
            index: 0 to num_windows - 1.

        Returns:
            The window.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        begin, end = index * self.window_rows, min((index + 1) * self.window_rows, self.num_rows)
        segments = []
        for position in range(np.searchsorted(self._ends, begin, side="right"), len(self._order)):
            chunk = int(self._order[position])
            chunk_end = int(self._ends[position])
            chunk_begin = int(self._ends[position - 1]) if position else 0
            if chunk_begin >= end:
                break
            low, high = max(begin, chunk_begin) - chunk_begin, min(end, chunk_end) - chunk_begin
            if low < high:
                segments.append(Segment(*self._chunks[chunk], self._rows_of_chunk(chunk)[low:high]))
        num_rows = end - begin
        slots = np.full(-(-num_rows // self.batch_size) * self.batch_size, -1, dtype=np.int64)
        slots[:num_rows] = (
            np.arange(num_rows) if self._shuffle_key is None else permutation(num_rows, *self._shuffle_key, index)
        )
        return Window(index, index * self.batches_per_window, tuple(segments), slots.reshape(-1, self.batch_size))


class Order:
    """The order of the training rows, and the validation cut.

    Args:
        manifest: the training data.
        batch_size: rows of a global batch.
        seed: of permutations and cut.
        shuffle_window: rows that are shuffled together; rounded up to whole batches.
        validation_share: share of the rows that is cut off for validation; 0 for none.

    Raises:
        ValueError: there are too few rows for a training part and a validation part.
    """

    def __init__(
        self, manifest: Manifest, batch_size: int, seed: int, shuffle_window: int, validation_share: float
    ) -> None:
        self.manifest = manifest
        self.batch_size = batch_size
        self._seed = seed
        self._window_rows = -(-shuffle_window // batch_size) * batch_size
        self._chunks, self._sizes = _chunks_of(manifest)
        self._cut = _cut(self._sizes, seed, validation_share)
        validation_sizes = [sum(end - begin for begin, end in self._cut.get(i, ())) for i in range(len(self._sizes))]
        self._validation_sizes = np.array(validation_sizes, dtype=np.int64)
        self._train_sizes = self._sizes - self._validation_sizes
        if self._train_sizes.sum() == 0:
            raise ValueError(
                f"{manifest.num_rows} rows cannot be cut into training and validation rows "
                f"with validation_share = {validation_share}"
            )

    def epoch(self, epoch: int) -> Pass:
        """Return the training pass of one epoch.

        Args:
            epoch: from 0.

        Returns:
            The pass, shuffled.
        """
        chunk_order = permutation(len(self._chunks), self._seed, "row groups", epoch)
        return Pass(
            self._rows_to_train,
            self._chunks,
            self._train_sizes,
            chunk_order,
            self.batch_size,
            self._window_rows,
            (self._seed, "rows", epoch),
        )

    def validation(self, batch_size: int) -> Pass:
        """Return the pass over the validation rows, in the data's order.

        Args:
            batch_size: rows of a batch.

        Returns:
            The pass; it has no rows if there is no cut.
        """
        return _natural_pass(self._rows_to_validate, self._chunks, self._validation_sizes, batch_size)

    def _rows_to_validate(self, chunk: int) -> np.ndarray:
        pieces = [np.arange(begin, end) for begin, end in self._cut.get(chunk, ())]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _rows_to_train(self, chunk: int) -> np.ndarray:
        keep = np.ones(self._sizes[chunk], dtype=bool)
        for begin, end in self._cut.get(chunk, ()):
            keep[begin:end] = False
        return np.flatnonzero(keep)


def natural_pass(manifest: Manifest, batch_size: int) -> Pass:
    """Return the pass over all rows of a data set, in its own order.

    Args:
        manifest: the data set.
        batch_size: rows of a batch.

    Returns:
        The pass.
    """
    chunks, sizes = _chunks_of(manifest)
    return _natural_pass(lambda chunk: np.arange(sizes[chunk]), chunks, sizes, batch_size)


def permutation(count: int, *key: object) -> np.ndarray:
    """Return the permutation that a key names; the same on every machine and NumPy version.

    Only raw Philox output is used, whose stream NumPy guarantees (the methods of `Generator` may change).

    Args:
        count: how many items.
        key: integers and texts.

    Returns:
        int64 [count].
    """
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    return np.argsort(bits.random_raw(count), kind="stable")


def _natural_pass(
    rows_of_chunk: Callable[[int], np.ndarray], chunks: Sequence[tuple[int, int]], sizes: np.ndarray, batch_size: int
) -> Pass:
    window_rows = -(-NATURAL_WINDOW_ROWS // batch_size) * batch_size
    return Pass(rows_of_chunk, chunks, sizes, np.arange(len(chunks)), batch_size, window_rows, None)


def _chunks_of(manifest: Manifest) -> tuple[list[tuple[int, int]], np.ndarray]:
    chunks = [(index, group) for index, file in enumerate(manifest.files) for group in range(len(file.row_groups))]
    sizes = np.array([size for file in manifest.files for size in file.row_groups], dtype=np.int64)
    return chunks, sizes


def _cut(sizes: np.ndarray, seed: int, share: float) -> dict[int, list[tuple[int, int]]]:
    """Choose pieces until the share of the rows is reached; returns row group -> ascending (begin, end) rows."""
    total = int(sizes.sum())
    wanted = max(1, round(share * total)) if share > 0 else 0
    piece_rows = max(1, total // VALIDATION_PIECES)
    pieces = [(chunk, begin) for chunk, size in enumerate(sizes) for begin in range(0, int(size), piece_rows)]
    cut: dict[int, list[tuple[int, int]]] = {}
    for number in permutation(len(pieces), seed, "validation"):
        if wanted <= 0:
            break
        chunk, begin = pieces[number]
        end = min(begin + piece_rows, int(sizes[chunk]))
        cut.setdefault(chunk, []).append((begin, end))
        wanted -= end - begin
    return {chunk: sorted(ranges) for chunk, ranges in cut.items()}
