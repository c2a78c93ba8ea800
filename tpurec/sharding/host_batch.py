"""One rank's ids on the host, out of whatever batch there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torchrec import KeyedJaggedTensor

from tpurec.embeddings.jagged import TorchBatch, check_sizes, weight_not_finite
from tpurec.errors import DataError
from tpurec.features.packing import PackedBatch

Batch = PackedBatch | TorchBatch | KeyedJaggedTensor


@dataclass(frozen=True)
class HostBatch:
    """One rank's ids on the host.

    Args:
        num_examples: examples, of which the last may be padding.
        values: for each feature its ids, without padding or skipped ones, int32 or int64 `[num_ids]`.
        lengths: for each feature the ids of each example, int32 `[num_examples]`.
        weights: for each feature float32 `[num_ids]`; None without weights.
        with_skipped: of features that have skipped ids: ids with -1 in the places of those, and lengths with them.
    """

    num_examples: int
    values: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] | None
    with_skipped: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def sequence(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A feature as a sequence, in which a skipped id keeps its place.

        Args:
            name: of the feature.

        Returns:
            Ids, -1 for skipped ones, and int32 lengths `[num_examples]`.
        """
        return self.with_skipped.get(name) or (self.values[name], self.lengths[name])


def read_batch(batch: Batch, needed: Mapping[str, bool | None]) -> HostBatch:
    """Take the ids of some features out of a batch, without padding and skipped ids.

    Args:
        batch: this rank's examples.
        needed: the features, and whether each needs weights; None if nobody asks, as for sequences.

    Returns:
        The ids on the host.

    Raises:
        DataError: a feature or weights that the batch lacks, parts that do not fit together, or a weight of an id that
            is not finite.
    """
    if isinstance(batch, PackedBatch):
        return _read_packed(batch, needed)
    return _read_jagged(jagged_of(batch), needed)


def _read_packed(batch: PackedBatch, needed: Mapping[str, bool | None]) -> HostBatch:
    host = HostBatch(batch.batch_size, {}, {}, {})
    for name, weighted in needed.items():
        if name not in batch.sparse:
            raise DataError(f"feature {name!r} is not in the batch.", f"It has: {', '.join(batch.sparse) or 'none'}.")
        feature = batch.sparse[name]
        count = int(feature.lengths.sum())
        given = feature.weights
        if weighted and given is None:
            given = np.ones(count, dtype=np.float32)  # as `to_torch` does where only some features have weights
        _keep(host, name, feature.rows[:count], feature.lengths, given[:count] if weighted else None)
    return host


def _read_jagged(features: KeyedJaggedTensor, needed: Mapping[str, bool | None]) -> HostBatch:
    asked = [weighted for weighted in needed.values() if weighted is not None]
    is_weighted = any(asked) if asked else features.weights_or_none() is not None
    check_sizes(features, list(needed), is_weighted)
    keys = features.keys()
    per_key = features.lengths().cpu().numpy().reshape(len(keys), -1)
    ids = features.values().cpu().numpy()
    given = features.weights_or_none()
    given = None if given is None else given.detach().cpu().float().numpy()
    used = per_key.sum(axis=1)
    starts = features.offset_per_key_or_none()
    if starts is None or used.sum() == len(ids):
        starts = np.concatenate([[0], np.cumsum(used)])
        if starts[-1] != len(ids):
            raise DataError(
                f"lengths sum to {starts[-1]}, but there are {len(ids)} values "
                f"({len(keys)} features x {per_key.shape[1]} examples)."
            )
    if per_key.size and per_key.min() < 0:
        raise DataError(f"lengths has a negative value: {per_key.min()}.")
    host = HostBatch(features.stride(), {}, {}, {})
    for name, weighted in needed.items():
        key = keys.index(name)
        begin, end = int(starts[key]), int(starts[key] + used[key])
        if end > starts[key + 1]:
            raise DataError(
                f"feature {name!r}: lengths sum to {used[key]}, but it has room for "
                f"{starts[key + 1] - starts[key]} values."
            )
        _keep(host, name, ids[begin:end], per_key[key], given[begin:end] if weighted else None)
    return host


def _keep(host: HostBatch, name: str, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None) -> None:
    """Put a feature into the batch; id -1 is skipped, with its weight."""
    if len(ids) and ids.min() == -1:
        host.with_skipped[name] = ids, lengths.astype(np.int32, copy=False)
        keep = ids != -1
        example_of_id = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(example_of_id[keep], minlength=len(lengths))
        ids = ids[keep]
        weights = None if weights is None else weights[keep]
    if weights is not None and not np.isfinite(weights).all():
        bad = np.flatnonzero(~np.isfinite(weights))
        raise weight_not_finite(name, weights[bad[0]], bad[0], len(bad))
    host.values[name], host.lengths[name] = ids, lengths.astype(np.int32, copy=False)
    if weights is not None:
        host.weights[name] = weights


def empty_batch(num_examples: int, features: Sequence[str]) -> HostBatch:
    """Make a batch without ids.

    Args:
        num_examples: how many.
        features: their names.

    Returns:
        The batch.
    """
    none, no_weights = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    lengths = dict.fromkeys(features, np.zeros(num_examples, dtype=np.int32))
    return HostBatch(num_examples, dict.fromkeys(features, none), lengths, dict.fromkeys(features, no_weights))


def jagged_of(batch: TorchBatch | KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The sparse features of a batch that is in torch's form.

    Args:
        batch: the batch.

    Returns:
        Its features.
    """
    return batch.features if isinstance(batch, TorchBatch) else batch
