"""One rank's ids on the host, out of whatever batch there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec import KeyedJaggedTensor

from tpurec.embeddings.jagged import TorchBatch, check_sizes
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
    """

    num_examples: int
    values: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray] | None


def read_batch(batch: Batch, needed: dict[str, bool]) -> HostBatch:
    """Take the ids of some features out of a batch, without padding and skipped ids.

    Args:
        batch: this rank's examples.
        needed: the features, and whether each needs weights.

    Returns:
        The ids on the host.

    Raises:
        DataError: a feature or weights that the batch lacks, or parts that do not fit together.
    """
    if isinstance(batch, PackedBatch):
        return _read_packed(batch, needed)
    return _read_jagged(jagged_of(batch), needed)


def _read_packed(batch: PackedBatch, needed: dict[str, bool]) -> HostBatch:
    values, lengths, weights = {}, {}, {}
    for name, weighted in needed.items():
        if name not in batch.sparse:
            raise DataError(f"feature {name!r} is not in the batch.", f"It has: {', '.join(batch.sparse) or 'none'}.")
        feature = batch.sparse[name]
        count = int(feature.lengths.sum())
        given = feature.weights
        if weighted and given is None:
            given = np.ones(count, dtype=np.float32)  # as `to_torch` does where only some features have weights
        _keep(
            name, feature.rows[:count], feature.lengths, given[:count] if weighted else None, values, lengths, weights
        )
    return HostBatch(batch.batch_size, values, lengths, weights)


def _read_jagged(features: KeyedJaggedTensor, needed: dict[str, bool]) -> HostBatch:
    is_weighted = any(needed.values())
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
    values, lengths, weights = {}, {}, {}
    for name, weighted in needed.items():
        key = keys.index(name)
        begin, end = int(starts[key]), int(starts[key] + used[key])
        if end > starts[key + 1]:
            raise DataError(
                f"feature {name!r}: lengths sum to {used[key]}, but it has room for "
                f"{starts[key + 1] - starts[key]} values."
            )
        _keep(name, ids[begin:end], per_key[key], given[begin:end] if weighted else None, values, lengths, weights)
    return HostBatch(features.stride(), values, lengths, weights)


def _keep(
    name: str,
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | None,
    into_values: dict[str, np.ndarray],
    into_lengths: dict[str, np.ndarray],
    into_weights: dict[str, np.ndarray],
) -> None:
    """Put a feature into the batch; id -1 is skipped, with its weight."""
    if len(ids) and ids.min() == -1:
        keep = ids != -1
        example_of_id = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(example_of_id[keep], minlength=len(lengths))
        ids = ids[keep]
        weights = None if weights is None else weights[keep]
    into_values[name], into_lengths[name] = ids, lengths.astype(np.int32, copy=False)
    if weights is not None:
        into_weights[name] = weights


def with_empty_features(host: HostBatch, spare: Sequence[str]) -> HostBatch:
    """Add features without ids.

    Args:
        host: a batch.
        spare: names of the features to add.

    Returns:
        The batch with them.
    """
    if not spare:
        return host
    none, no_weights = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
    zeros = np.zeros(host.num_examples, dtype=np.int32)
    return HostBatch(
        host.num_examples,
        {**dict.fromkeys(spare, none), **host.values},
        {**dict.fromkeys(spare, zeros), **host.lengths},
        {**dict.fromkeys(spare, no_weights), **host.weights},
    )


def jagged_of(batch: TorchBatch | KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The sparse features of a batch that is in torch's form.

    Args:
        batch: the batch.

    Returns:
        Its features.
    """
    return batch.features if isinstance(batch, TorchBatch) else batch
