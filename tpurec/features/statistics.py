"""Statistics of id columns, from a stream of Arrow pieces in bounded memory: frequency, skew, how often batches repeat.

Distinct ids: the k smallest of their 62-bit hashes (Bar-Yossef et al., Counting Distinct Elements in a Data Stream,
RANDOM 2002): exact up to k, then a relative standard error of about 1 / sqrt(k). Frequent ids: Misra-Gries counters
(Agarwal et al., Mergeable Summaries, PODS 2012), never too high, and too low by at most a bound that is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpurec.features.arrow_columns import id_bags
from tpurec.features.feature_specs import SparseFeature
from tpurec.features.hashing import hash_rows, hex_codes, integer_codes, text_codes

SMALLEST_HASHES = 4096  # k: 1.6% standard error
COUNTERS = 8192
FITTED_RANKS = 1000
# Ids met less often say little about the law they follow.
FITTED_COUNT = 10
_HALF = 2**31 - 1


@dataclass(frozen=True)
class FrequentId:
    """An id that occurs often.

    Args:
        id: as it is written in the data.
        count: how often it was met; too low by at most `IdSummary.count_error`.
        share: of all ids.
    """

    id: str
    count: int
    share: float


@dataclass(frozen=True)
class IdSummary:
    """What was found in an id column.

    Args:
        examples: rows.
        blanks: rows without an id.
        ids: ids in all.
        distinct: different ids; an estimate unless `distinct_is_exact`.
        distinct_is_exact: tells which.
        top: the most frequent ids, most frequent first.
        count_error: counts of `top` are too low by at most this.
        ids_per_example: mean over all rows.
        max_ids_per_example: of any row.
        unique_share: distinct ids / ids in a batch of `batch_size` examples, mean over the full batches (or of the only
            one, if it is not full); NaN without ids.
        batch_size: examples of a batch.
        zipf_exponent: s such that the id of rank r occurs about r ** -s often, by maximum likelihood over the most
            frequent ids; NaN if fewer than 10 ids occur often enough.
    """

    examples: int
    blanks: int
    ids: int
    distinct: int
    distinct_is_exact: bool
    top: tuple[FrequentId, ...]
    count_error: int
    ids_per_example: float
    max_ids_per_example: int
    unique_share: float
    batch_size: int
    zipf_exponent: float


class IdStatistics:
    """Adds up the statistics of one id column.

    Args:
        feature: says how ids are written and split; two ways to write a hex id are one id.
        batch_size: examples of the batches in which distinct ids are counted.

    >>> statistics = IdStatistics(SparseFeature("item", 100, kind="integer"), batch_size=2)
    >>> statistics.add(pa.array([7, 7, 9, None]))
    >>> statistics.summary().unique_share  # one of two ids, then one of one
    0.75
    """

    def __init__(self, feature: SparseFeature, batch_size: int) -> None:
        self.feature = feature
        self.batch_size = batch_size
        self._examples = self._blanks = self._ids = self._max_ids = 0
        self._smallest = np.empty(0, np.uint64)
        self._all_seen = True  # no hash was dropped yet
        self._codes = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)
        self._texts = pa.array([], pa.string())
        self._error = 0
        self._window: list[np.ndarray] = []
        self._window_examples = 0
        self._shares = 0.0
        self._batches = 0

    def add(self, column: pa.Array | pa.ChunkedArray) -> None:
        """Add a piece of the column.

        Args:
            column: ids of any number of rows, of a type that the transform takes; nulls and empty text are blanks.
        """
        bags = id_bags(column, self.feature)
        values = bags.values if pa.types.is_dictionary(bags.values.type) else bags.values.dictionary_encode()
        codes, is_id = _codes(values.dictionary, self.feature.kind)
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        present = values.indices.is_valid().to_numpy(zero_copy_only=False)
        if len(codes):
            present = present & is_id[indices]
        lengths = present.astype(np.int64)
        if bags.lengths is not None:
            before = np.concatenate([[0], np.cumsum(lengths)])
            lengths = np.diff(before[np.concatenate([[0], np.cumsum(bags.lengths)])])
        positions = indices[present]
        self._examples += len(lengths)
        self._blanks += int(np.count_nonzero(lengths == 0))
        self._ids += len(positions)
        self._max_ids = max(self._max_ids, int(lengths.max(initial=0)))
        if len(positions):
            counts = np.bincount(positions, minlength=len(codes))
            used = np.flatnonzero(counts)
            self._count_distinct(codes[used])
            self._count_often(codes[used], counts[used], values.dictionary.take(pa.array(used)))
        self._cut_batches(codes[positions], lengths)

    def summary(self, num_top: int = 10) -> IdSummary:
        """Say what was found so far.

        Args:
            num_top: how many of the most frequent ids to name.

        Returns:
            The statistics.
        """
        order = np.lexsort((self._codes, -self._counts))
        top = tuple(
            FrequentId(self._texts[int(i)].as_py(), int(self._counts[i]), float(self._counts[i] / self._ids))
            for i in order[:num_top]
        )
        shares, batches = self._shares, self._batches
        if batches == 0 and any(len(codes) for codes in self._window):
            shares, batches = _unique_share(self._window), 1
        return IdSummary(
            examples=self._examples,
            blanks=self._blanks,
            ids=self._ids,
            distinct=self._distinct(),
            distinct_is_exact=self._all_seen,
            top=top,
            count_error=self._error,
            ids_per_example=self._ids / self._examples if self._examples else float("nan"),
            max_ids_per_example=self._max_ids,
            unique_share=shares / batches if batches else float("nan"),
            batch_size=self.batch_size,
            zipf_exponent=self._exponent(self._counts[order]),
        )

    def _count_distinct(self, codes: np.ndarray) -> None:
        hashes = hash_rows(codes, _HALF, salt=1).astype(np.uint64) << np.uint64(31)
        hashes |= hash_rows(codes, _HALF, salt=2).astype(np.uint64)
        merged = np.union1d(self._smallest, hashes)
        self._all_seen &= len(merged) <= SMALLEST_HASHES
        self._smallest = merged[:SMALLEST_HASHES]

    def _distinct(self) -> int:
        if self._all_seen:
            return len(self._smallest)
        return round((SMALLEST_HASHES - 1) / (float(self._smallest[-1]) / 2.0**62))

    def _count_often(self, codes: np.ndarray, counts: np.ndarray, texts: pa.Array) -> None:
        all_codes = np.concatenate([self._codes, codes])
        found, first, inverse = np.unique(all_codes, return_index=True, return_inverse=True)
        summed = np.bincount(inverse, weights=np.concatenate([self._counts, counts])).astype(np.int64)
        kept_texts = pa.concat_arrays([self._texts, texts.cast(pa.string())]).take(pa.array(first))
        if len(found) > COUNTERS:
            surplus = int(np.partition(summed, len(found) - COUNTERS - 1)[len(found) - COUNTERS - 1])
            self._error += surplus
            summed = summed - surplus
            kept = summed > 0
            found, summed, kept_texts = found[kept], summed[kept], kept_texts.filter(pa.array(kept))
        self._codes, self._counts, self._texts = found, summed, kept_texts

    def _cut_batches(self, codes: np.ndarray, lengths: np.ndarray) -> None:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        start = 0
        while start < len(lengths):
            stop = min(start + self.batch_size - self._window_examples, len(lengths))
            self._window.append(codes[offsets[start] : offsets[stop]])
            self._window_examples += stop - start
            start = stop
            if self._window_examples == self.batch_size:
                if any(len(piece) for piece in self._window):
                    self._shares += _unique_share(self._window)
                    self._batches += 1
                self._window, self._window_examples = [], 0

    def _exponent(self, counts: np.ndarray) -> float:
        often = counts[counts >= max(FITTED_COUNT, 2 * self._error)][:FITTED_RANKS]
        if len(often) < 10:
            return float("nan")
        # The likelihood's derivative is zero where the mean of log(rank) is that of the law cut off at this many ranks.
        logs = np.log(np.arange(1, len(often) + 1))
        wanted = float(often @ logs) / float(often.sum())
        low, high = 0.0, 6.0
        for _ in range(50):
            middle = (low + high) / 2
            weights = np.exp(-middle * logs)
            if weights @ logs / weights.sum() > wanted:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def _unique_share(pieces: list[np.ndarray]) -> float:
    codes = np.concatenate(pieces)
    return len(np.unique(codes)) / len(codes)


def _codes(ids: pa.Array, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """uint64 codes of different ids, and which of them are ids at all (neither null nor empty text)."""
    is_id = ids.is_valid().to_numpy(zero_copy_only=False)
    if kind == "integer":
        return integer_codes(ids.fill_null(0).to_numpy(zero_copy_only=False)), is_id
    is_id = is_id & (pc.binary_length(ids).fill_null(0).to_numpy(zero_copy_only=False) > 0)
    if kind == "text":
        return text_codes(ids), is_id
    codes, malformed = hex_codes(pc.if_else(pa.array(is_id), ids, pa.scalar("0", ids.type)))
    if malformed is not None:
        codes = np.where(malformed, text_codes(ids), codes)
    return codes, is_id
