"""From ids to table rows, and what happens to an id that has no row. Exact: ids are compared as 64-bit numbers.

An id has no row if it is `malformed` (kind hex: not 1 to 16 hex digits), `out_of_range` (identity: negative, or
>= num_embeddings) or `unseen` (not in the vocabulary). It never becomes another id's row by wrapping or clipping.
Policies: `error`; `skip`: the id and its weight are left out of the bag; `hash`: its row is the hash of the id over all
rows (identity and hash) or over the rows behind the vocabulary's entries; a malformed hex id is hashed as text.
A blank (null or empty text) is no id at all: it is left out under every policy and not counted.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpurec.features.feature_specs import SparseFeature
from tpurec.features.hashing import hash_rows, hex_codes, integer_codes, text_codes
from tpurec.features.vocabulary import VocabularyIndex

# Stand-ins for a row in what `row_of_ids` returns; all real rows are >= 0.
BLANK, MALFORMED, OUT_OF_RANGE, UNSEEN = -1, -2, -3, -4
REASONS = {MALFORMED: "malformed", OUT_OF_RANGE: "out_of_range", UNSEEN: "unseen"}
REMEDY = "Correct the id, or set id_policy to skip or hash."


class IdMap:
    """The id-to-row rule of one sparse feature.

    Args:
        feature: the feature; its vocabulary, if any, is indexed once here.
    """

    def __init__(self, feature: SparseFeature) -> None:
        self.feature = feature
        self._vocabulary = _index(feature) if feature.transform == "vocabulary" else None

    def rows(self, ids: pa.Array) -> np.ndarray:
        """Map ids to rows.

        Args:
            ids: string, large_string or (kind integer) int64 [n], nulls allowed; or a dictionary of these.

        Returns:
            int32 [n]; BLANK, MALFORMED, OUT_OF_RANGE or UNSEEN where the id has no row.
        """
        if isinstance(ids, pa.DictionaryArray):
            return _take_rows(self.rows(ids.dictionary), ids.indices)
        present = _present(ids)
        if present is None:
            return self._rows_of_present(ids)
        rows = np.full(len(ids), BLANK, dtype=np.int32)
        rows[present] = self._rows_of_present(ids.filter(pa.array(present)))
        return rows

    def _rows_of_present(self, ids: pa.Array) -> np.ndarray:
        feature = self.feature
        size = feature.num_embeddings
        if feature.kind == "integer":
            numbers = ids.to_numpy(zero_copy_only=False)
            if feature.transform == "hash":
                return hash_rows(integer_codes(numbers), size, feature.salt)
            if feature.transform == "identity":
                return np.where((numbers >= 0) & (numbers < size), numbers, OUT_OF_RANGE).astype(np.int32)
            return self._vocabulary_rows(integer_codes(numbers))
        if feature.kind == "hex":
            codes, malformed = hex_codes(ids)
            if feature.transform == "hash":
                rows = hash_rows(codes, size, feature.salt)
            elif feature.transform == "identity":
                in_range = codes < np.uint64(size)
                rows = np.where(in_range, codes.view(np.int64), OUT_OF_RANGE).astype(np.int32)
            else:
                rows = self._vocabulary_rows(codes)
            if malformed is not None:
                rows[malformed] = MALFORMED
            return rows
        if feature.transform == "vocabulary":
            return self._vocabulary_rows(ids)
        encoded = ids.dictionary_encode()
        return _take_rows(hash_rows(text_codes(encoded.dictionary), size, feature.salt), encoded.indices)

    def _vocabulary_rows(self, ids: pa.Array | np.ndarray) -> np.ndarray:
        positions = self._vocabulary.find(ids)
        return np.where(positions >= 0, positions, np.int32(UNSEEN))

    def hashed(self, ids: pa.Array) -> np.ndarray:
        """The rows that policy `hash` gives to ids that have none.

        Args:
            ids: [n] without nulls, not dictionary-encoded.

        Returns:
            int32 [n], in range.
        """
        feature = self.feature
        if feature.kind == "integer":
            codes = integer_codes(ids.to_numpy(zero_copy_only=False))
        elif feature.kind == "hex":
            codes, malformed = hex_codes(ids)
            if malformed is not None:
                codes[malformed] = text_codes(ids.filter(pa.array(malformed)))
        else:
            codes = text_codes(ids)
        first = len(feature.vocabulary)
        return hash_rows(codes, feature.num_embeddings - first, feature.salt) + np.int32(first)

    def complaint(self, reason: int, value: object) -> str:
        """Why an id has no row, for an error text.

        Args:
            reason: MALFORMED, OUT_OF_RANGE or UNSEEN.
            value: the id.

        Returns:
            Text with feature, table, id and limit.
        """
        feature = self.feature
        where = f"sparse feature {feature.name!r}, table {feature.table!r}"
        if reason == MALFORMED:
            return f"{where}: id {value!r} is not hexadecimal (1 to 16 digits)"
        if reason == OUT_OF_RANGE:
            return f"{where}: id {value!r} is out of range, num_embeddings is {feature.num_embeddings}"
        return f"{where}: id {value!r} is not in the vocabulary of {len(feature.vocabulary)} entries"


def _index(feature: SparseFeature) -> VocabularyIndex:
    if feature.kind == "text":
        return VocabularyIndex(feature.vocabulary)
    if feature.kind == "integer":
        return VocabularyIndex(integer_codes(np.array(feature.vocabulary, dtype=np.int64)))
    codes, malformed = hex_codes(pa.array(feature.vocabulary, pa.string()))
    who = f"sparse feature {feature.name!r}"
    if malformed is not None:
        raise ValueError(f"{who}: vocabulary entry {feature.vocabulary[int(malformed.argmax())]!r} is not hexadecimal")
    if len(np.unique(codes)) != len(codes):
        raise ValueError(f"{who}: two vocabulary entries write the same hexadecimal number")
    return VocabularyIndex(codes)


def _present(ids: pa.Array) -> np.ndarray | None:
    """bool [n], false for blanks; None if there are none."""
    present = ids.is_valid().to_numpy(zero_copy_only=False) if ids.null_count else None
    if not pa.types.is_int64(ids.type):
        lengths = pc.binary_length(ids)
        if present is not None:
            lengths = lengths.fill_null(0)
        not_empty = lengths.to_numpy(zero_copy_only=False) > 0
        if not not_empty.all():
            present = not_empty
    return present


def _take_rows(rows: np.ndarray, indices: pa.Array) -> np.ndarray:
    if indices.null_count == 0:
        return rows[indices.to_numpy(zero_copy_only=False)]
    if len(rows) == 0:
        return np.full(len(indices), BLANK, dtype=np.int32)
    taken = rows[indices.fill_null(0).to_numpy(zero_copy_only=False)]
    taken[indices.is_null().to_numpy(zero_copy_only=False)] = BLANK
    return taken
