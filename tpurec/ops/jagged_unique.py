"""`tpurec::unique_ids`: each id of a table once, for TorchRec's de-duplicated lookups.

The specification is `tpurec/kernels/jagged_unique.py`. How many distinct ids there are depends on the ids, so they come
with the capacity of all ids and their number beside them. FBGEMM has this for GPUs only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpurec.ops.jagged_offsets import check_integers, check_offsets, checked_bounds


@torch.library.custom_op("tpurec::unique_ids", mutates_args=(), device_types="cpu")
def unique_ids(
    hash_starts: Tensor, group_offsets: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make a jagged tensor of the distinct ids of every table.

    Args:
        hash_starts: int32 or int64 `[T + 1]`, ascending: feature t reads the table that begins at `hash_starts[t]`;
            features with the same begin share a table.
        group_offsets: int32 or int64 `[G + 1]`, ascending from 0 to T: group g is features `group_offsets[g]` to
            `group_offsets[g + 1]`, which are to be those of one table.
        offsets: int32 or int64 `[T * B + 1]`, feature-major.
        ids: int32 or int64 `[N]`, any numbers: an id out of range is nobody else's row. What lies in no bag counts as
            one more id, -1, behind all tables.

    Returns:
        Lengths `[T * B]` of the offsets' dtype: a group's distinct ids in equal shares over all its bags, the first
        ones one more; distinct ids `[N]`, ascending within a table, -1 behind them; int64 `[N]`, where each id is among
        them; how many there are, an int64 scalar.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: offsets that do not ascend within what they point into. On a device they are cut.
    """
    _check(hash_starts, group_offsets, offsets, ids)
    num_features = hash_starts.shape[0] - 1
    batch_size = (offsets.shape[0] - 1) // num_features
    bounds = checked_bounds(offsets, ids.shape[0])
    groups = checked_bounds(group_offsets, num_features)
    if bool((hash_starts.diff() < 0).any()):
        raise IndexError(f"hash_starts: {hash_starts.tolist()} do not ascend")
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (hash_starts.diff() != 0).cumsum(0)])
    first, last = int(bounds[0]), int(bounds[-1])
    tables = torch.full(ids.shape, num_features + 1)
    tables[first:last] = torch.repeat_interleave(starts[:-1], bounds[::batch_size].diff()) if batch_size else 0
    inside = torch.full_like(ids, -1)
    inside[first:last] = ids[first:last]
    order = inside.argsort(stable=True)
    order = order[tables[order].argsort(stable=True)]
    tables, inside = tables[order], inside[order]
    is_first = torch.ones_like(tables, dtype=torch.bool)
    is_first[1:] = (tables.diff() != 0) | (inside.diff() != 0)
    reverse = torch.empty_like(tables).scatter_(0, order, is_first.cumsum(0) - 1)
    distinct = torch.full_like(ids, -1)
    count = is_first.sum()
    distinct[: int(count)] = inside[is_first]
    per_table = tables[is_first].bincount(minlength=num_features + 2)
    lengths = torch.zeros(num_features * batch_size, dtype=offsets.dtype)
    for begin, end in zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True):
        size = int(per_table[starts[begin] : starts[end]].sum())
        slots = lengths[begin * batch_size : end * batch_size]
        if len(slots):
            slots.fill_(size // len(slots))
            slots[: size % len(slots)] += 1
    return lengths, distinct, reverse, count


@unique_ids.register_fake
def _(
    hash_starts: Tensor, group_offsets: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(hash_starts, group_offsets, offsets, ids)
    wide = {"dtype": torch.int64}
    return (
        offsets.new_empty(offsets.shape[0] - 1),
        torch.empty_like(ids),
        ids.new_empty(ids.shape, **wide),
        (ids.new_empty((), **wide)),
    )


def _check(hash_starts: Tensor, group_offsets: Tensor, offsets: Tensor, ids: Tensor) -> None:
    check_offsets("offsets", offsets)
    check_offsets("group_offsets", group_offsets)
    check_integers("ids", ids)
    check_integers("hash_starts", hash_starts)
    if hash_starts.shape[0] < 2:
        raise ValueError(f"hash_starts: {hash_starts.shape[0]} values; features + 1 are expected, at least 2")
    if (offsets.shape[0] - 1) % (hash_starts.shape[0] - 1):
        raise ValueError(
            f"offsets: {offsets.shape[0]} values; {hash_starts.shape[0] - 1} features * batch_size + 1 are expected"
        )
