"""`tpurec::check_ids`: the id policy for ids that were not mapped to rows on the host, with its counters.

The specification is `tpurec/kernels/jagged_bounds.py`; FBGEMM has no such op: its `bounds_check_indices` turns an id
out of range into row 0, which is another id's row.
"""

from __future__ import annotations

from collections.abc import Sequence

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 - registers torch.ops.fbgemm
import numpy as np
import torch
from torch import Tensor

from tpurec.errors import TpurecError
from tpurec.features.hashing import hash_rows, integer_codes
from tpurec.ops.jagged_offsets import check_integers, check_offsets, checked_bounds

POLICIES = ("error", "skip", "hash")


class IdOutOfRange(TpurecError):
    """An id has no row, and the id policy is `error`."""


@torch.library.custom_op("tpurec::check_ids", mutates_args=(), device_types="cpu")
def check_ids(ids: Tensor, offsets: Tensor, num_rows: Tensor, policy: str, salt: int = 0) -> list[Tensor]:
    """Give every id its row, and those without one what the policy says.

    Args:
        ids: int32 or int64 `[N]`; those outside of the offsets are capacity.
        offsets: int32 or int64 `[F * B + 1]`, feature after feature, ascending.
        num_rows: int32 or int64 `[F]`: num_embeddings of each feature's table, below 2**31.
        policy: `skip`: -1; `hash`: the row that the hash `mix64` gives (docs/features.md); `error`: -1, and
            `raise_out_of_range` raises, on the host, whenever the counters are looked at.
        salt: of the hash, -2**63 to 2**63 - 1 (two's complement of the schema's 0 to 2**64 - 1).

    Returns:
        int32 `[N]`: rows, -1 for what is skipped and for capacity; and int32 `[F]`: how many ids in bags had no row.

    Raises:
        ValueError: a shape, dtype or policy that does not fit.
        IndexError: on the CPU: offsets that do not ascend within the ids. On a device they are cut.
    """
    _check(ids, offsets, num_rows, policy)
    num_features = num_rows.shape[0]
    rows = torch.full_like(ids, -1, dtype=torch.int32)
    if offsets.shape[0] == 1:
        return [rows, torch.zeros(num_features, dtype=torch.int32)]
    batch_size = (offsets.shape[0] - 1) // num_features
    bounds = checked_bounds(offsets, ids.shape[0])[::batch_size]
    counts = []
    for feature, size in enumerate(num_rows.tolist()):
        first, last = int(bounds[feature]), int(bounds[feature + 1])
        found = ids[first:last]
        outside = (found < 0) | (found >= size)
        counts.append(int(outside.sum()))
        kept = torch.where(outside, -1, found).to(torch.int32)
        if policy == "hash" and counts[-1]:
            codes = integer_codes(found[outside].numpy())
            kept[outside] = torch.from_numpy(hash_rows(codes, size, salt % 2**64).astype(np.int32))
        rows[first:last] = kept
    return [rows, torch.tensor(counts, dtype=torch.int32)]


@check_ids.register_fake
def _(ids: Tensor, offsets: Tensor, num_rows: Tensor, policy: str, salt: int = 0) -> list[Tensor]:
    _check(ids, offsets, num_rows, policy)
    return [
        torch.empty_like(ids, dtype=torch.int32),
        ids.new_empty(num_rows.shape[0], dtype=torch.int32),
    ]


@torch.library.custom_op("tpurec::fix_bounds", mutates_args=(), device_types="cpu")
def fix_bounds(num_rows: Tensor, ids: Tensor, offsets: Tensor, feature_bags: Tensor | None) -> list[Tensor]:
    """What FBGEMM's `bounds_check_indices` makes of ids and offsets; `check_ids` is what tpurec itself uses.

    Args:
        num_rows: int32 or int64 `[F]`.
        ids: int32 or int64 `[N]`.
        offsets: int32 or int64 `[S + 1]`, possibly not ascending or beyond the ids.
        feature_bags: int32 or int64 `[F + 1]`: the bag that each feature begins with; None for S / F bags each.

    Returns:
        Ids `[N]`: 0 for ids outside of [-1, num_rows) in bags; offsets `[S + 1]`: cut to the ids, none below the one
        before, the last one N; and int64 `[]`: how many of both were changed.

    Raises:
        ValueError: a shape or dtype that does not fit.
        IndexError: on the CPU: feature_bags that do not go from 0 to S.
    """
    _check_fix(num_rows, ids, offsets, feature_bags)
    if feature_bags is not None:  # FBGEMM aborts the process
        bags = checked_bounds(feature_bags, offsets.shape[0] - 1)
        if int(bags[0]) != 0 or int(bags[-1]) != offsets.shape[0] - 1:
            raise IndexError(f"feature_bags: from {int(bags[0])} to {int(bags[-1])}; 0 to {offsets.shape[0] - 1}")
    new_ids, new_offsets, ignore = ids.clone(), offsets.clone(), 2
    most = -1 if feature_bags is None else int(feature_bags.diff().max())
    torch.ops.fbgemm.bounds_check_indices(
        num_rows.long(),
        new_ids,
        new_offsets,
        ignore,
        torch.zeros(1, dtype=torch.int64),
        None,
        None if feature_bags is None else feature_bags.to(torch.int32),
        most,
    )
    changed = (new_ids != ids).sum() + (new_offsets != offsets).sum()
    return [new_ids, new_offsets, changed]


@fix_bounds.register_fake
def _(num_rows: Tensor, ids: Tensor, offsets: Tensor, feature_bags: Tensor | None) -> list[Tensor]:
    _check_fix(num_rows, ids, offsets, feature_bags)
    return [torch.empty_like(ids), torch.empty_like(offsets), ids.new_empty((), dtype=torch.int64)]


def _check_fix(num_rows: Tensor, ids: Tensor, offsets: Tensor, feature_bags: Tensor | None) -> None:
    check_integers("num_rows", num_rows)
    check_integers("ids", ids)
    check_offsets("offsets", offsets)
    num_features, num_bags = num_rows.shape[0], offsets.shape[0] - 1
    if feature_bags is None and (num_features < 1 or num_bags % num_features):
        raise ValueError(f"offsets: {num_bags + 1} values; {num_features} features * batch_size + 1 are expected")
    if feature_bags is not None and feature_bags.shape != (num_features + 1,):
        raise ValueError(f"feature_bags: {list(feature_bags.shape)}; [{num_features + 1}] is expected")


def raise_out_of_range(counts: Tensor, features: Sequence[str], num_rows: Sequence[int]) -> None:
    """Raise if ids had no row; reads the counters, F numbers, from the device they are on.

    Args:
        counts: int32 `[F]` of `check_ids`, or the sum over several steps.
        features: names, for the error.
        num_rows: num_embeddings of each feature's table, for the error.

    Raises:
        IdOutOfRange: naming every feature that has such ids, how many, and the limit.
    """
    found = [
        f"{feature!r}: {count} ids outside of [0, {size})"
        for feature, count, size in zip(features, counts.tolist(), num_rows, strict=True)
        if count
    ]
    if found:
        raise IdOutOfRange(
            f"ids have no row: {'; '.join(found)}.", "Correct the ids, or set id_policy to skip or hash."
        )


def _check(ids: Tensor, offsets: Tensor, num_rows: Tensor, policy: str) -> None:
    check_integers("ids", ids)
    check_integers("num_rows", num_rows)
    check_offsets("offsets", offsets)
    num_features = num_rows.shape[0]
    if num_features < 1 or (offsets.shape[0] - 1) % num_features:
        raise ValueError(f"offsets: {offsets.shape[0]} values; {num_features} features * batch_size + 1 are expected")
    if policy not in POLICIES:
        raise ValueError(f"policy: {policy!r}; one of {POLICIES} is expected")
