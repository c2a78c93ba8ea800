"""One rank's fixed share of every global batch.

Rank r of n takes slots r * s to (r + 1) * s - 1 of a batch, s = ceil(batch_size / n): the global batch is the same for
every n, and the last ranks have the padding, or nothing. The rows of a window are shuffled, so a share is scattered
over all its row groups: each rank decodes these whole, and transforms (hash, log1p: the dearer half) its own rows only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from pipelines.order import Window


@dataclass(frozen=True)
class Share:
    """Which part of every batch one rank has.

    Args:
        rank: 0 to num_ranks - 1.
        num_ranks: ranks.
    """

    rank: int
    num_ranks: int

    def size(self, batch_size: int) -> int:
        """Return the slots of a batch that the rank has.

        Args:
            batch_size: rows of a global batch.

        Returns:
            Slots, the same for every rank; the last ones may be padding.
        """
        return -(-batch_size // self.num_ranks)

    def of(self, window: Window) -> Window:
        """Return the rank's share of a window.

        Args:
            window: of global batches.

        Returns:
            As many batches, slots int64 [num_batches, size], and only the rows that they name. A batch may be empty,
            and so may the window.
        """
        if self.num_ranks == 1:
            return window
        num_batches, batch_size = window.slots.shape
        size = self.size(batch_size)
        slots = np.full((num_batches, size), -1, dtype=np.int64)
        mine = window.slots[:, self.rank * size : (self.rank + 1) * size]
        slots[:, : mine.shape[1]] = mine
        needed = np.sort(slots[slots >= 0])
        segments, begin = [], 0
        for segment in window.segments:
            end = begin + len(segment.rows)
            low, high = np.searchsorted(needed, (begin, end))
            if low < high:
                segments.append(dataclasses.replace(segment, rows=segment.rows[needed[low:high] - begin]))
            begin = end
        return Window(
            window.index,
            window.first_batch,
            tuple(segments),
            np.where(slots >= 0, np.searchsorted(needed, slots), -1),
            (window.slots >= 0).sum(axis=1),
        )


WHOLE = Share(0, 1)


def in_batch_order(parts: list[np.ndarray], sizes: list[np.ndarray]) -> np.ndarray:
    """Put values that the ranks have of their shares into the order of the global batches.

    Args:
        parts: per rank its values, batch after batch.
        sizes: per rank int [num_batches], how many values each batch has.

    Returns:
        All values: batch by batch, within each rank by rank.
    """
    owner = np.repeat(np.tile(np.arange(len(parts)), len(sizes[0])), np.stack(sizes, axis=1).ravel())
    place = np.empty(len(owner), dtype=np.int64)
    place[np.argsort(owner, kind="stable")] = np.arange(len(owner))
    return np.concatenate(parts)[place]
