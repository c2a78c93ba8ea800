"""Batches of static shape: ids are padded up to a rung of a short ladder, nothing is ever dropped."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tpurec.errors import DataError
from tpurec.features.columns import Columns

PAD = -1
# Offsets are int32.
_MAX_CAPACITY = 2**31 - 1
_ALIGN = 64
_MAGIC = b"TPRB0001"


@dataclass(frozen=True)
class Ladder:
    """The sizes that id arrays are padded to, so that a handful of programs covers every batch.

    Args:
        rungs: increasing positive sizes, in ids.

    >>> Ladder((8, 16, 32)).rung(9), Ladder((8, 16, 32)).rung(33)
    (16, 64)
    """

    rungs: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = zip(self.rungs, self.rungs[1:], strict=False)
        if not self.rungs or self.rungs[0] < 1 or any(low >= high for low, high in pairs):
            raise ValueError(f"rungs {self.rungs} must be positive and increasing")

    @classmethod
    def for_batch(cls, batch_size: int, growth: float = 1.25, num_rungs: int = 24, multiple: int = 8) -> Ladder:
        """A geometric ladder that starts at the batch size: a feature of at most one id needs one rung only.

        Args:
            batch_size: examples per batch (of one rank); the lowest rung, rounded up to `multiple`.
            growth: ratio of neighbouring rungs, > 1; at most growth - 1 of a batch's ids are padding.
            num_rungs: number of rungs; 24 of them at 1.25 reach 169 ids per example.
            multiple: every rung is a multiple of this.

        Returns:
            The ladder.
        """
        sizes = (max(1, round(batch_size * growth**step)) for step in range(num_rungs))
        rungs = {-(-size // multiple) * multiple for size in sizes if size < _MAX_CAPACITY or size == batch_size}
        return cls(tuple(sorted(rungs)))

    def rung(self, num_ids: int) -> int:
        """The capacity for a number of ids.

        Args:
            num_ids: ids to hold, >= 0.

        Returns:
            The smallest rung >= num_ids; above the top the next multiple of the top rung.
        """
        for rung in self.rungs:
            if num_ids <= rung:
                return rung
        return -(-num_ids // self.rungs[-1]) * self.rungs[-1]


@dataclass(frozen=True)
class PackedFeature:
    """One sparse feature of a batch.

    Args:
        rows: int32 [capacity]; the first lengths.sum() are table rows, the rest is -1.
        lengths: int32 [B], ids per example; 0 for padding examples.
        weights: float32 [capacity], 0 behind the ids; None if the feature is unweighted.
    """

    rows: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None

    @property
    def capacity(self) -> int:
        """Length of `rows`: a rung."""
        return len(self.rows)


@dataclass(frozen=True)
class PackedBatch:
    """One batch with static shapes, as it goes to a device.

    Args:
        dense: float32 [B, num_dense]; padding examples are 0.
        labels: float32 [B]; 0 where `valid` is false.
        valid: bool [B]; true where the example counts in loss and metrics: it is no padding and its label is there.
        sparse: feature name to ids, in schema order.
        num_rows: examples that are no padding; they are the first ones. num_rows - valid.sum() labels are missing.
    """

    dense: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    sparse: Mapping[str, PackedFeature]
    num_rows: int

    @property
    def batch_size(self) -> int:
        """Examples including padding, B."""
        return len(self.dense)

    @property
    def num_missing_labels(self) -> int:
        """Examples that are no padding but have no label."""
        return self.num_rows - int(self.valid.sum())

    def slice_rank(self, rank: int, world_size: int, ladder: Ladder) -> PackedBatch:
        """The fixed share of one rank: examples rank * B / world_size and the following B / world_size.

        Args:
            rank: 0 <= rank < world_size.
            world_size: number of ranks; divides B.
            ladder: for the id capacity, which is the same on all ranks: the rung of the rank with most ids.

        Returns:
            The rank's batch; its capacity equals that of every other rank's.

        Raises:
            ValueError: world_size does not divide B, or rank is out of range.
        """
        if self.batch_size % world_size or not 0 <= rank < world_size:
            raise ValueError(f"batch of {self.batch_size} examples: no share for rank {rank} of {world_size}")
        share = self.batch_size // world_size
        start, stop = rank * share, (rank + 1) * share
        sparse = {}
        for name, feature in self.sparse.items():
            per_rank = feature.lengths.reshape(world_size, share).sum(axis=1)
            first = int(per_rank[:rank].sum())
            ids = slice(first, first + int(per_rank[rank]))
            weights = None if feature.weights is None else feature.weights[ids]
            capacity = ladder.rung(int(per_rank.max()))
            sparse[name] = _padded(feature.rows[ids], feature.lengths[start:stop], weights, capacity)
        num_rows = min(max(self.num_rows - start, 0), share)
        return PackedBatch(self.dense[start:stop], self.labels[start:stop], self.valid[start:stop], sparse, num_rows)

    def to_bytes(self) -> bytes:
        """Serialise to one buffer: a JSON header and raw arrays, each aligned to 64 bytes; no pickle.

        Returns:
            The buffer.
        """
        arrays = list(self._arrays())
        entries, position = [], 0
        for name, array in arrays:
            entries.append([*name, array.dtype.str, list(array.shape), position])
            position += -(-array.nbytes // _ALIGN) * _ALIGN
        header = json.dumps({"num_rows": self.num_rows, "arrays": entries}).encode()
        start = -(-(len(_MAGIC) + 4 + len(header)) // _ALIGN) * _ALIGN
        buffer = bytearray(start + position)
        buffer[: len(_MAGIC) + 4 + len(header)] = _MAGIC + struct.pack("<I", len(header)) + header
        view = np.frombuffer(buffer, dtype=np.uint8)
        for (_, array), entry in zip(arrays, entries, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            view[start + entry[-1] : start + entry[-1] + array.nbytes] = raw
        return bytes(buffer)

    @classmethod
    def from_bytes(cls, buffer: bytes | bytearray | memoryview | np.ndarray, copy: bool = False) -> PackedBatch:
        """Read what `to_bytes` wrote.

        Args:
            buffer: the bytes.
            copy: copy the buffer once, so that the arrays can be written to (`torch.from_numpy` wants that);
                otherwise arrays are views of `buffer`, and read-only if it is.

        Returns:
            The batch.

        Raises:
            DataError: not such a buffer, or one cut short.
        """
        raw = memoryview(bytearray(buffer) if copy else buffer).cast("B")
        head = len(_MAGIC) + 4
        if len(raw) < head or bytes(raw[: len(_MAGIC)]) != _MAGIC:
            raise DataError("the buffer is no packed batch.")
        (length,) = struct.unpack("<I", raw[len(_MAGIC) : head])
        if head + length > len(raw):
            raise DataError(f"the packed batch is cut short: {len(raw)} bytes, {head + length} expected.")
        header = json.loads(bytes(raw[head : head + length]))
        start = -(-(head + length) // _ALIGN) * _ALIGN
        top: dict[str, np.ndarray] = {}
        sparse: dict[str, dict[str, np.ndarray]] = {}
        for feature, field, dtype, shape, position in header["arrays"]:
            count = int(np.prod(shape))
            end = start + position + count * np.dtype(dtype).itemsize
            if end > len(raw):
                raise DataError(f"the packed batch is cut short: {len(raw)} bytes, {end} expected.")
            array = np.frombuffer(raw, dtype=dtype, count=count, offset=start + position).reshape(shape)
            (top if feature is None else sparse.setdefault(feature, {}))[field] = array
        features = {name: PackedFeature(**fields) for name, fields in sparse.items()}
        return cls(top["dense"], top["labels"], top["valid"], features, header["num_rows"])

    def _arrays(self) -> Iterator[tuple[tuple[str | None, str], np.ndarray]]:
        for field in ("dense", "labels", "valid"):
            yield (None, field), getattr(self, field)
        for name, feature in self.sparse.items():
            yield (name, "rows"), feature.rows
            yield (name, "lengths"), feature.lengths
            if feature.weights is not None:
                yield (name, "weights"), feature.weights


def pack(columns: Columns, batch_size: int, ladder: Ladder, capacities: Mapping[str, int] | None = None) -> PackedBatch:
    """Pack at most `batch_size` examples into one batch of static shape.

    Args:
        columns: 0 to batch_size examples; without labels every label counts as missing.
        batch_size: examples after padding, B.
        ladder: gives the capacity of each feature.
        capacities: feature name to a capacity that is at least used, such as the largest one so far.

    Returns:
        The batch; examples behind `columns.num_rows` have valid = false and no ids.

    Raises:
        ValueError: more than batch_size examples.
    """
    num_rows = columns.num_rows
    if num_rows > batch_size:
        raise ValueError(f"{num_rows} rows do not go into a batch of {batch_size}")
    dense = np.zeros((batch_size, columns.dense.shape[1]), dtype=np.float32)
    dense[:num_rows] = columns.dense
    labels = np.zeros(batch_size, dtype=np.float32)
    valid = np.zeros(batch_size, dtype=np.bool_)
    if columns.labels is not None:
        valid[:num_rows] = ~np.isnan(columns.labels)
        labels[:num_rows] = np.where(valid[:num_rows], columns.labels, np.float32(0))
    sparse = {}
    for name, column in columns.sparse.items():
        lengths = np.zeros(batch_size, dtype=np.int32)
        lengths[:num_rows] = column.lengths
        capacity = max(ladder.rung(len(column.rows)), (capacities or {}).get(name, 0))
        sparse[name] = _padded(column.rows, lengths, column.weights, capacity)
    return PackedBatch(dense, labels, valid, sparse, num_rows)


def _padded(rows: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None, capacity: int) -> PackedFeature:
    padded = np.full(capacity, PAD, dtype=np.int32)
    padded[: len(rows)] = rows
    if weights is None:
        return PackedFeature(padded, lengths)
    padded_weights = np.zeros(capacity, dtype=np.float32)
    padded_weights[: len(rows)] = weights
    return PackedFeature(padded, lengths, padded_weights)
