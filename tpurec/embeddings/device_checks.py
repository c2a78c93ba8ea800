"""A debug aid: look at the values of every batch on the device, and name the first that is wrong.

A device cannot raise an error, and reading values back for each check would cost a transfer each. So the checks are
tensor operations of the step, eager or compiled, that write the first offence into six numbers, which are read after
it. Off, they cost nothing: they are not part of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tpurec.embeddings.stack import TableStack
from tpurec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tpurec.embeddings.fused import FusedEmbeddingBagCollection

# What the first number of a report says; 0 is "nothing found".
LENGTH, CAPACITY, TOTAL, ID, WEIGHT, POOLED, GRADIENT = range(1, 8)
_NOT_FINITE = {0: "nan", 1: "inf", -1: "-inf"}


class DeviceChecks:
    """The checks of one collection, and what they found.

    Args:
        device: where the collection is.
    """

    def __init__(self, device: torch.device) -> None:
        # Offence, stack, feature of the stack, position, value, limit.
        self.report = torch.zeros(6, dtype=torch.int64, device=device)

    def check_features(self, features: KeyedJaggedTensor, stack: TableStack, number: int) -> None:
        """Check lengths, ids and weights of the features that read a stack.

        Args:
            features: the batch, checked by `jagged.check_sizes`.
            stack: the tables.
            number: of the stack in its collection.
        """
        keys, values, weights = features.keys(), features.values(), features.weights_or_none()
        starts, per_key = features.offset_per_key_or_none(), features.lengths().view(len(keys), -1).long()
        totals = per_key.sum(1)
        for feature, name in enumerate(stack.feature_names):
            key = keys.index(name)
            lengths = per_key[key]
            if starts is None:  # the values of all features in one piece
                first, room, ids, shown = totals[:key].sum(), values.shape[0], values, weights
            else:
                first, room = torch.zeros_like(totals[0]), starts[key + 1] - starts[key]
                ids = values[starts[key] : starts[key + 1]]
                shown = None if weights is None else weights[starts[key] : starts[key + 1]]
            place = (number, feature)
            self._note(LENGTH, place, lengths < 0, lengths, 0)
            ends = first + lengths.cumsum(0)
            self._note(CAPACITY, place, ends > room, ends - first, room)
            at = torch.arange(ids.shape[0], device=ids.device) - first
            used = (at >= 0) & (at < totals[key])
            limit = stack.feature_num_rows[feature]
            self._note(ID, place, used & ((ids < -1) | (ids >= limit)), ids, limit, first)
            if shown is not None:
                self._note(WEIGHT, place, used & ~shown.isfinite(), _not_finite(shown), 0, first)
        if starts is None:
            total, count = totals.sum().view(1), values.shape[0]
            self._note(TOTAL, (number, 0), total != count, total, count)

    def check_vectors(self, offence: int, vectors: Tensor, stack: TableStack, number: int) -> None:
        """Check pooled vectors, or their gradients.

        Args:
            offence: `POOLED` or `GRADIENT`.
            vectors: `[batch_size, num_features * dim]`.
            stack: the tables.
            number: of the stack in its collection.
        """
        lines = vectors.detach().view(-1, stack.num_features, stack.dim)
        bad = ~lines.isfinite()
        shown = torch.where(bad, _not_finite(lines), 0)
        # The first that is not finite of every line; nan counts as 0.
        where = bad.int().argmax(2, keepdim=True)
        shown, bad = shown.gather(2, where).squeeze(2), bad.any(2)
        for feature in range(stack.num_features):
            self._note(offence, (number, feature), bad[:, feature], shown[:, feature], 0)

    def allowed(self, rows: Tensor) -> Tensor:
        """Leave out every row if something was found, so that tables stay as they were.

        Args:
            rows: rows of a stack, int32.

        Returns:
            The rows, or -1 for each of them.
        """
        return torch.where(self.report[0] == 0, rows, -1)

    def _note(
        self, offence: int, place: tuple[int, int], bad: Tensor, values: Tensor, limit: int, first: Tensor | int = 0
    ) -> None:
        """Write the first true one of `bad` into the report if that is still empty."""
        count = bad.shape[0]
        if not count:
            return
        at = torch.where(bad, torch.arange(count, device=bad.device), count).amin()
        value = values.long().index_select(0, at.clamp(max=count - 1).view(1))
        known = [torch.full((1,), number, dtype=torch.int64, device=bad.device) for number in (offence, *place, limit)]
        found = torch.cat([*known[:3], (at - first).view(1), value, known[3]])
        with torch.no_grad():
            self.report.copy_(torch.where((at < count) & (self.report[0] == 0), found, self.report))


def check_on_device(model: nn.Module, enabled: bool = True) -> None:
    """Switch the checks on or off. They see what follows; a compiled step is compiled again.

    With them on, `raise_offence` has to be called now and then, best after every step. After an offence no table
    changes until it was called.

    Args:
        model: with fused collections, on any device.
        enabled: on or off.

    Raises:
        ConfigError: the model has no fused collection, or its tables are sharded.

    Example:
        >>> check_on_device(model)
        >>> loss = step(batch)
        >>> raise_offence(model)
        DataError: feature 'clicks', table 'items': id 1000 (value 7 of the feature) is not one of 1000 rows.
    """
    collections = _collections(model)
    if not collections:
        raise ConfigError(
            f"{type(model).__name__} has no fused collection to check; tables that are spread over ranks have none.",
            "Check with one process.",
        )
    for collection in collections:
        collection.device_checks = DeviceChecks(collection.device) if enabled else None


def raise_offence(model: nn.Module) -> None:
    """Read what the checks found since the last call; nothing if they are off. Waits for the device.

    Args:
        model: with fused collections.

    Raises:
        DataError: naming table, feature, position and value of the first offence: an id that is not a row, lengths that
            do not fit, or a weight, pooled vector or gradient that is not finite.
    """
    for collection in _collections(model):
        checks = collection.device_checks
        if checks is None:
            continue
        offence, *numbers = checks.report.cpu().tolist()
        if offence:
            checks.report.zero_()
            raise _error(collection, offence, *numbers)


def _collections(model: nn.Module) -> list[FusedEmbeddingBagCollection]:
    from tpurec.embeddings.fuse import fused_collections

    return [collection for _, collection in fused_collections(model)]


def _error(
    collection: FusedEmbeddingBagCollection,
    offence: int,
    number: int,
    feature: int,
    position: int,
    value: int,
    limit: int,
) -> DataError:
    stack = collection.stack(number)
    entry = stack.features[feature]
    where = f"feature {entry.name!r}, table {stack.tables[entry.table].name!r}:"
    if offence == TOTAL:
        return DataError(f"lengths of all features sum to {value}, but there are {limit} values.")
    if offence == LENGTH:
        return DataError(f"{where} length {value} of example {position} is negative.")
    if offence == CAPACITY:
        return DataError(
            f"{where} lengths of examples 0 to {position} sum to {value}; there is room for {limit} values."
        )
    if offence == ID:
        return DataError(
            f"{where} id {value} (value {position} of the feature) is not one of {limit} rows.",
            "Map ids to rows first (tpurec.features); -1 skips an id.",
        )
    shown = _NOT_FINITE[value]
    if offence == WEIGHT:
        return DataError(f"{where} weight {shown} (value {position} of the feature) is not finite.")
    if offence == POOLED:
        return DataError(
            f"{where} the pooled vector of example {position} has {shown} in it.",
            "A row that it reads is not finite, or the sum overflows: lower the learning rate of the tables.",
        )
    return DataError(
        f"{where} the gradient of example {position} has {shown} in it; no table was changed by it.",
        "Look at the loss and the dense part first; lower the learning rates.",
    )


def _not_finite(values: Tensor) -> Tensor:
    """What is not finite as a number: 0 for nan, 1 and -1 for infinities."""
    return torch.where(values.isnan(), 0.0, values.sign()).long()
