"""Jagged batches: from a packed batch to torch, and from a KeyedJaggedTensor to the rows of a stack, checked.

A KeyedJaggedTensor comes in two layouts. *Compact*: `lengths` sum to the number of values. *Static*: it carries
`offset_per_key`, every feature owns a fixed range of values (its capacity), and what its lengths do not use is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import KeyedJaggedTensor

from tpurec.embeddings.lookup import StackedIds
from tpurec.embeddings.stack import TableStack
from tpurec.errors import DataError
from tpurec.features.packing import PackedBatch


@dataclass(frozen=True)
class TorchBatch:
    """A packed batch as torch tensors on one device.

    Args:
        dense: float32 `[B, num_dense]`.
        features: the sparse features, int32 values and lengths.
        labels: float32 `[B]`, 0 where `valid` is false.
        valid: bool `[B]`; true where the example counts in loss and metrics.
    """

    dense: Tensor
    features: KeyedJaggedTensor
    labels: Tensor
    valid: Tensor


def to_torch(
    batch: PackedBatch,
    device: torch.device | str = "cpu",
    keys: Sequence[str] | None = None,
    static: bool | None = None,
) -> TorchBatch:
    """Move a packed batch to a device. On the CPU dense, labels and valid share memory with the batch.

    Args:
        batch: the batch.
        device: where to.
        keys: the features to take, in this order; all of the batch by default.
        static: keep the unused capacity, so that shapes depend on rungs only; by default everywhere but on the CPU,
            whose kernels gain nothing from static shapes.

    Returns:
        The tensors. If any of the features has weights, those without get ones.

    Raises:
        DataError: a key that the batch does not have.
    """
    device = torch.device(device)
    static = device.type != "cpu" if static is None else static
    keys = list(batch.sparse) if keys is None else list(keys)
    missing = [key for key in keys if key not in batch.sparse]
    if missing:
        raise DataError(f"feature {missing[0]!r} is not in the batch.", f"It has: {', '.join(batch.sparse) or 'none'}.")
    packed = [batch.sparse[key] for key in keys]
    used = [feature.capacity if static else int(feature.lengths.sum()) for feature in packed]
    values = _joined([feature.rows[:count] for feature, count in zip(packed, used, strict=True)], np.int32)
    lengths = _joined([feature.lengths for feature in packed], np.int32)
    weights = None
    if any(feature.weights is not None for feature in packed):
        ones = np.ones(max(used), dtype=np.float32)
        parts = [
            (ones if feature.weights is None else feature.weights)[:count]
            for feature, count in zip(packed, used, strict=True)
        ]
        weights = _joined(parts, np.float32).to(device)
    features = KeyedJaggedTensor(
        keys,
        values.to(device),
        weights=weights,
        lengths=lengths.to(device),
        stride=batch.batch_size,
        length_per_key=used,
        offset_per_key=list(accumulate(used, initial=0)),
    )
    dense, labels, valid = (_from_numpy(array).to(device) for array in (batch.dense, batch.labels, batch.valid))
    return TorchBatch(dense, features, labels, valid)


def _joined(parts: list[np.ndarray], dtype: type) -> Tensor:
    if len(parts) == 1:
        return _from_numpy(parts[0])
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=dtype))


def _from_numpy(array: np.ndarray) -> Tensor:
    # torch cannot mark a tensor read-only, and warns: a batch read from a read-only buffer is copied.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_sizes(features: KeyedJaggedTensor, needed: Sequence[str], is_weighted: bool) -> None:
    """Refuse a KeyedJaggedTensor whose parts do not fit together or do not fit the collection; looks at no values.

    Args:
        features: the batch.
        needed: keys that the collection reads.
        is_weighted: whether the collection takes weights.

    Raises:
        DataError: naming the sizes, the dtype, the missing feature, or the weights that are missing or not expected.
    """
    keys, values = features.keys(), features.values()
    num_values = values.numel()
    if num_values and (values.dtype not in (torch.int32, torch.int64) or values.dim() != 1):
        dtype = str(values.dtype).removeprefix("torch.")
        raise DataError(
            f"ids are {dtype} {list(values.shape)}; one dimension of int32 or int64 is expected.",
            "Convert the values of the KeyedJaggedTensor.",
        )
    missing = [key for key in needed if key not in keys]
    if missing:
        raise DataError(f"feature {missing[0]!r} is not in the batch.", f"Its keys are: {', '.join(keys)}.")
    if features.variable_stride_per_key():
        raise DataError("The batch has another number of examples for every feature, which is not supported.")
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is None and offsets is None:
        raise DataError(
            "The batch has neither lengths nor offsets.",
            "Give KeyedJaggedTensor lengths= or offsets= by keyword: its third positional argument is the weights.",
        )
    given = f"{lengths.numel()} lengths" if lengths is not None else f"{offsets.numel()} offsets"
    num_bags = lengths.numel() if lengths is not None else offsets.numel() - 1
    if num_bags != len(keys) * features.stride():
        raise DataError(
            f"{given} do not fit {len(keys)} features x {features.stride()} examples.",
            f"Give {len(keys) * features.stride()} lengths or one offset more.",
        )
    starts = features.offset_per_key_or_none()
    if starts is not None and (len(starts) != len(keys) + 1 or starts[-1] != num_values):
        raise DataError(f"offset_per_key {starts} does not fit {len(keys)} features with {num_values} values.")
    weights = features.weights_or_none()
    if weights is not None and not is_weighted:
        raise DataError(
            "The batch has weights, but the collection is not weighted.", "Build the collection with is_weighted=True."
        )
    if weights is None and is_weighted:
        raise DataError("The collection is weighted, but the batch has no weights.", "Give the batch weights.")
    if weights is not None and weights.numel() != num_values:
        raise DataError(f"{weights.numel()} weights do not fit {num_values} values.", "Give one weight per value.")


def stack_ids(features: KeyedJaggedTensor, stack: TableStack) -> StackedIds:
    """Map a batch's ids of the features of one stack to rows of its storage.

    Args:
        features: the batch, checked by `check_sizes`; id -1 means "no row" and is skipped.
        stack: the tables.

    Returns:
        The ids as the ops take them.

    Raises:
        DataError: on the CPU: lengths that do not sum to the number of values, an id that is not a row, named with
            feature, table and position, or a weight of an id that is not finite. Other devices, and compiled code,
            cannot look at values: such an id is skipped there, and never reads or changes another row.
    """
    if features.values().device.type == "cpu" and not torch.compiler.is_compiling():
        return _checked(features, stack)
    if features.offset_per_key_or_none() is not None:
        return _static(features, stack)
    return _compact_on_device(features, stack)


def _checked(features: KeyedJaggedTensor, stack: TableStack) -> StackedIds:
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    per_key = features.lengths().view(len(keys), -1)
    used = per_key.sum(1).tolist()
    starts = features.offset_per_key_or_none()
    if starts is None or sum(used) == values.numel():
        starts = list(accumulate(used, initial=0))
        if starts[-1] != values.numel():
            raise DataError(
                f"lengths sum to {starts[-1]}, but there are {values.numel()} values "
                f"({len(keys)} features x {per_key.shape[1]} examples)."
            )
    if per_key.numel() and int(per_key.min()) < 0:
        raise DataError(f"lengths has a negative value: {int(per_key.min())}.")
    order = [keys.index(name) for name in stack.feature_names]
    rows = torch.empty(sum(used[key] for key in order), dtype=torch.int32)
    at = 0
    for feature, key in enumerate(order):
        if starts[key] + used[key] > starts[key + 1]:
            raise DataError(
                f"feature {keys[key]!r}: lengths sum to {used[key]}, but it has room for "
                f"{starts[key + 1] - starts[key]} values."
            )
        if used[key]:
            ids = values[starts[key] : starts[key] + used[key]]
            _write_rows(rows[at : at + used[key]], ids, stack, feature)
            at += used[key]
    offsets = torch.zeros(len(order) * per_key.shape[1] + 1, dtype=torch.int32)
    torch.cumsum(per_key[order].reshape(-1), 0, out=offsets[1:])
    if weights is not None:
        weights = torch.cat([weights[starts[key] : starts[key] + used[key]] for key in order]).float()
        if not weights.isfinite().all():
            _check_weights(weights, rows, [keys[key] for key in order], [used[key] for key in order])
    return StackedIds(rows, offsets, weights)


def _write_rows(target: Tensor, ids: Tensor, stack: TableStack, feature: int) -> None:
    low, high = torch.aminmax(ids)
    if low < -1 or high >= stack.feature_num_rows[feature]:
        bad = ((ids < -1) | (ids >= stack.feature_num_rows[feature])).nonzero()
        position = int(bad[0])
        table = stack.tables[stack.features[feature].table]
        raise DataError(
            f"feature {stack.feature_names[feature]!r}: id {int(ids[position])} (value {position} of the feature; "
            f"{len(bad)} in all) is not a row of table {table.name!r} with {table.num_embeddings} rows.",
            "Map ids to rows first (tpurec.features); -1 skips an id.",
        )
    torch.add(ids, stack.feature_row_starts[feature], out=target)
    if low < 0:
        target[ids < 0] = -1


def _check_weights(weights: Tensor, rows: Tensor, names: Sequence[str], used: Sequence[int]) -> None:
    """Refuse the first weight that is not finite; that of a skipped id does not matter."""
    bad = ~weights.isfinite() & (rows >= 0)
    for name, of_feature, values in zip(names, bad.split(used), weights.split(used), strict=True):
        if len(positions := of_feature.nonzero()):
            raise weight_not_finite(name, float(values[positions[0]]), int(positions[0]), len(positions))


def weight_not_finite(feature: str, weight: float, position: int, count: int) -> DataError:
    """An error for a weight that would make every vector that it touches, and then the tables, NaN.

    Args:
        feature: its name.
        weight: the first such weight.
        position: its place among the feature's values.
        count: such weights of the feature.

    Returns:
        The error, to be raised.
    """
    return DataError(
        f"feature {feature!r}: the weight {weight} (value {position} of the feature; {count} in all) is not finite.",
        "Give one finite weight per id.",
    )


def _static(features: KeyedJaggedTensor, stack: TableStack) -> StackedIds:
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    starts = features.offset_per_key_or_none()
    per_key = features.lengths().view(len(keys), -1)
    rows, offsets, used_weights, at = [], [], [], 0
    for feature, name in enumerate(stack.feature_names):
        key = keys.index(name)
        ids = values[starts[key] : starts[key + 1]]
        ends = per_key[key].to(torch.int32).cumsum(0, dtype=torch.int32)
        is_row = (ids >= 0) & (ids < stack.feature_num_rows[feature])
        if ends.numel():
            is_row = is_row & (torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device) < ends[-1])
        rows.append(torch.where(is_row, ids + stack.feature_row_starts[feature], -1).to(torch.int32))
        # The last bag of a feature runs on over the padding, which is skipped: so one list of offsets has no gaps.
        offsets.append(F.pad(ends, (1, 0))[:-1] + at)
        at += ids.shape[0]
        if weights is not None:
            used_weights.append(weights[starts[key] : starts[key + 1]])
    offsets.append(torch.full((1,), at, dtype=torch.int32, device=values.device))
    return StackedIds(torch.cat(rows), torch.cat(offsets), torch.cat(used_weights) if used_weights else None)


def _compact_on_device(features: KeyedJaggedTensor, stack: TableStack) -> StackedIds:
    # Where a feature begins is known only on the device. Ids of features that this pass does not read become -1, and
    # lie in the last bag of the feature before them; features out of the batch's order need another pass over the ids.
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    per_key = features.lengths().view(len(keys), -1)
    device, num_values, batch_size = values.device, values.shape[0], per_key.shape[1]
    ends = per_key.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32)
    begins = F.pad(ends, (1, 0))[:-1].view(len(keys), batch_size)
    key_ends = per_key.sum(1).cumsum(0).to(torch.int32)
    key_of_id = torch.searchsorted(
        key_ends, torch.arange(num_values, dtype=torch.int32, device=device), right=True, out_int32=True
    )
    rows, offsets = [], []
    for number, reading in enumerate(_ascending_runs([keys.index(name) for name in stack.feature_names])):
        num_rows, row_starts = [0] * (len(keys) + 1), [0] * (len(keys) + 1)
        for feature, key in reading:
            num_rows[key], row_starts[key] = stack.feature_num_rows[feature], stack.feature_row_starts[feature]
        limit = torch.tensor(num_rows, dtype=torch.int32, device=device)[key_of_id]
        start = torch.tensor(row_starts, dtype=torch.int32, device=device)[key_of_id]
        rows.append(torch.where((values >= 0) & (values < limit), values + start, -1).to(torch.int32))
        offsets += [begins[key] + number * num_values for _, key in reading]
    first, last = torch.zeros(1, dtype=torch.int32, device=device), len(rows) * num_values
    bags = torch.cat([*offsets, torch.full((1,), last, dtype=torch.int32, device=device)])
    bags = torch.cat([first, bags[1:]])
    return StackedIds(torch.cat(rows), bags, None if weights is None else torch.cat([weights] * len(rows)))


def _ascending_runs(keys: list[int]) -> list[list[tuple[int, int]]]:
    """Cut features into runs whose keys ascend; each item is (feature, key)."""
    runs = [[(0, keys[0])]]
    for feature, (before, key) in enumerate(pairwise(keys), start=1):
        if key <= before:
            runs.append([])
        runs[-1].append((feature, key))
    return runs
