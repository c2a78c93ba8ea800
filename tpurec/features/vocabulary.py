"""Vocabularies: the ids that are met often enough, in a stable order; an entry's position is its row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpurec import atomic
from tpurec.errors import ConfigError


class VocabularyBuilder:
    """Counts ids of a column piece by piece; memory grows with the number of different ids, not of rows.

    Args:
        kind: `text`, `hex` or `integer`, as in the schema; hex ids are counted in lower case without leading zeros.
    """

    def __init__(self, kind: str = "text") -> None:
        self.kind = kind
        self._pieces: list[pa.Table] = []
        self._pending = 0

    def add(self, values: pa.Array | pa.ChunkedArray) -> None:
        """Count a piece.

        Args:
            values: strings or integers, or lists of them, dictionary-encoded or not; nulls and empty strings are blanks
                and are not counted.
        """
        for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
            while _is_list(chunk.type):
                chunk = chunk.flatten()
            if isinstance(chunk, pa.DictionaryArray):
                chunk = chunk.dictionary_decode()
            chunk = chunk.drop_null()
            if self.kind == "integer":
                chunk = chunk.cast(pa.int64())
            else:
                chunk = chunk.cast(pa.large_string())
                chunk = chunk.filter(pc.not_equal(pc.binary_length(chunk), 0))
            if self.kind == "hex":
                chunk = canonical_hex(chunk)
            counted = pc.value_counts(chunk)
            self._pieces.append(pa.table({"id": counted.field("values"), "count": counted.field("counts")}))
            self._pending += len(counted)
        # Merging when the pieces have doubled keeps the work linear and the memory bounded by the different ids.
        if len(self._pieces) > 1 and self._pending > 2 * max(len(self._pieces[0]), 100_000):
            self._merge()

    def _merge(self) -> pa.Table:
        type_ = pa.int64() if self.kind == "integer" else pa.large_string()
        empty = pa.table({"id": pa.array([], type_), "count": pa.array([], pa.int64())})
        merged = pa.concat_tables([empty, *self._pieces]).group_by("id").aggregate([("count", "sum")])
        self._pieces = [merged.rename_columns({"count_sum": "count"}).select(["id", "count"])]
        self._pending = len(merged)
        return self._pieces[0]

    def build(self, min_count: int = 1, max_size: int | None = None) -> tuple[str, ...] | tuple[int, ...]:
        """The entries in row order.

        Args:
            min_count: ids met less often are left out.
            max_size: keep at most this many.

        Returns:
            Ids by falling count, equal counts by id: the same for the same data in any order.
        """
        table = self._merge()
        table = table.filter(pc.greater_equal(table["count"], min_count))
        order = pc.sort_indices(table, sort_keys=[("count", "descending"), ("id", "ascending")])
        return tuple(table["id"].take(order)[:max_size].to_pylist())


def canonical_hex(texts: pa.Array) -> pa.Array:
    """Hex ids in the form that vocabularies store: lower case, no leading zeros.

    Args:
        texts: Arrow strings; what is not hex keeps its form apart from that.

    Returns:
        Arrow strings; "000" gives "0".
    """
    trimmed = pc.ascii_ltrim(pc.ascii_lower(texts), characters="0")
    return pc.if_else(pc.equal(pc.binary_length(trimmed), 0), pa.scalar("0", trimmed.type), trimmed)


def write_vocabulary(path: str | Path, entries: tuple[str, ...] | tuple[int, ...]) -> None:
    """Write a vocabulary file, atomically.

    Args:
        path: ends in `.json` (a list) or `.parquet` (one column, `id`).
        entries: ids in row order.

    Raises:
        ConfigError: another ending.
    """
    path = Path(path)
    if path.suffix == ".json":
        atomic.write_text(path, json.dumps(list(entries), ensure_ascii=False))
    elif path.suffix == ".parquet":
        import pyarrow.parquet as pq

        with atomic.new_file(path) as unfinished:
            pq.write_table(pa.table({"id": pa.array(list(entries))}), unfinished)
    else:
        raise ConfigError(f"{path}: a vocabulary file ends in .json or .parquet.")


def read_vocabulary(path: str | Path) -> tuple[str, ...] | tuple[int, ...]:
    """Read a vocabulary file.

    Args:
        path: written by `write_vocabulary`, or by hand.

    Returns:
        Ids in row order.

    Raises:
        ConfigError: no such file, or not a list of ids.
    """
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return tuple(pq.read_table(path)["id"].to_pylist())
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such vocabulary file.", "The path is relative to the schema.") from None
    except (KeyError, pa.ArrowInvalid, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not a vocabulary file: {error}.", "Use a JSON list or Parquet column id.") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: a vocabulary file holds one list of ids, found {type(entries).__name__}.")
    return tuple(entries)


class VocabularyIndex:
    """Finds the position of ids in a vocabulary; built once, used for every batch.

    Args:
        entries: ids in row order, each once: text as strings, hex and integer ids as their uint64 codes.
    """

    def __init__(self, entries: Sequence[str] | np.ndarray) -> None:
        self._positions: dict[str, int] | None = None
        if isinstance(entries, np.ndarray):
            self._order = np.argsort(entries).astype(np.int32)
            self._sorted = entries[self._order]
        else:
            self._positions = {entry: position for position, entry in enumerate(entries)}

    def find(self, ids: pa.Array | np.ndarray) -> np.ndarray:
        """Positions of ids.

        Args:
            ids: uint64 codes [n], or Arrow strings [n] without nulls, as the entries are.

        Returns:
            int32 [n], -1 where the id is not in the vocabulary.
        """
        if self._positions is None:
            places = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
            return np.where(self._sorted[places] == ids, self._order[places], np.int32(-1))
        encoded = ids.dictionary_encode()
        found = [self._positions.get(text, -1) for text in encoded.dictionary.to_pylist()]
        return np.array(found, dtype=np.int32)[encoded.indices.to_numpy(zero_copy_only=False)]


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
