"""Which rank owns the row of an id, and where: the row rules of a plan, for all ids of several slots at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpurec.errors import DataError
from tpurec.sharding.host_batch import HostBatch
from tpurec.sharding.placement import ShardedTable, Slot, Stack

_EMPTY = np.empty(0, dtype=np.int32)


class Lookups:
    """Slots whose ids are located together.

    Args:
        slots: the lookups.
        stack: theirs.
        tables: of the model.
        num_ranks: ranks; stands for "here" as the owner of replicated rows.
    """

    def __init__(self, slots: Sequence[Slot], stack: Stack, tables: Sequence[ShardedTable], num_ranks: int) -> None:
        self.features = [slot.feature for slot in slots]
        places = [stack.places[slot.place] for slot in slots]
        self.table_names = [tables[place.table].config.name for place in places]
        self.table_rows = np.array([tables[place.table].config.num_embeddings for place in places], dtype=np.int64)
        owners, starts, answers, first = [], [], [], []
        for slot, place in zip(slots, places, strict=True):
            first.append(len(owners))
            local = place.exchange == "local"
            owners += [num_ranks] if local else place.shard.ranks
            starts += place.row_starts[:1] if local else place.row_starts
            answers += slot.answers or [0] * (1 if local else len(place.shard.ranks))
        counts = np.diff([*first, len(owners)])
        self.first = np.array(first, dtype=np.int64)
        self.counts = counts.astype(np.int64)
        self.shifts = np.array([place.shard.shift for place in places], dtype=np.int64)
        self.owners = np.array(owners, dtype=np.int64)
        self.starts = np.array(starts, dtype=np.int64)
        self.answers = np.array(answers, dtype=np.int64)
        # One number of owners for all slots is the usual case; dividing by a scalar is many times faster.
        self.one_count = int(counts[0]) if len(set(counts.tolist())) == 1 else None

    def check(self, batch: HostBatch) -> None:
        """Refuse an id that is not a row.

        Args:
            batch: this rank's ids.

        Raises:
            DataError: naming feature, table, id and position.
        """
        for name, table, num_rows in zip(self.features, self.table_names, self.table_rows, strict=True):
            ids = batch.values[name]
            if len(ids) and (ids.max() >= num_rows or ids.min() < 0):
                bad = np.flatnonzero((ids >= num_rows) | (ids < 0))
                raise DataError(
                    f"feature {name!r}: id {ids[bad[0]]} (value {bad[0]} of the feature; {len(bad)} in all) is "
                    f"not a row of table {table!r} with {num_rows} rows.",
                    "Map ids to rows first (tpurec.features); -1 skips an id.",
                )

    def values(self, batch: HostBatch) -> tuple[np.ndarray, np.ndarray]:
        """All ids.

        Args:
            batch: this rank's ids.

        Returns:
            Slot after slot, and how many each slot has.
        """
        parts = [batch.values[name] for name in self.features]
        return _joined(parts), np.array([len(part) for part in parts], dtype=np.int64)

    def weights(self, batch: HostBatch) -> np.ndarray:
        """All weights.

        Args:
            batch: this rank's ids.

        Returns:
            float32, slot after slot.
        """
        return _joined([batch.weights[name] for name in self.features]).astype(np.float32, copy=False)

    def locate(self, values: np.ndarray, per_slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each id's row is.

        Args:
            values: of `values`.
            per_slot: ids of each slot.

        Returns:
            Its place in `owners`, and its storage row there.
        """
        values = values.astype(np.int64, copy=False)
        if self.one_count == 1:
            at = np.repeat(self.first, per_slot)
            return at, self.starts[at] + values
        counts = self.one_count or np.repeat(self.counts, per_slot)
        shifted = values + np.repeat(self.shifts, per_slot)
        at = shifted - shifted // counts * counts + np.repeat(self.first, per_slot)
        return at, self.starts[at] + values // counts


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else _EMPTY
