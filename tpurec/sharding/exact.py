"""Small problems are solved exactly: every choice of every item on every set of ranks is costed."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from tpurec.sharding.costs import LATENCY_FLAGS
from tpurec.sharding.space import NUM_PARTS, Placement, Space

_MOST_NUMBERS = 8_000_000  # combinations x ranks x columns held at once: 64 MB; does not depend on speeds or memory


def is_small(space: Space) -> bool:
    """Whether a space can be enumerated; depends on its shape only, not on speeds or memory.

    Args:
        space: the problem.

    Returns:
        True if `best_of_all` can take it.
    """
    count = space.model.num_ranks * space.num_columns
    for position, item in enumerate(space.items):
        count *= _num_options(space, position, _first_is_free(space) and position == 0)
        if count > _MOST_NUMBERS or len(item.choices) == 0:
            return False
    return True


def best_of_all(space: Space, capacity_bytes: float) -> Placement | None:
    """Find the fastest placement that fits by costing all of them.

    Args:
        space: a small problem.
        capacity_bytes: memory per rank.

    Returns:
        The fastest; of equally fast ones the smallest, then the first; None if none fits.
    """
    ranks = space.model.num_ranks
    options = [_options(space, i, _first_is_free(space) and i == 0) for i in range(len(space.items))]
    load = np.zeros((1, ranks, space.num_columns))
    even = np.zeros((1, space.num_columns))
    padded = np.zeros((1, space.num_columns))
    pairs, flags = np.zeros(1), np.zeros(1, dtype=np.int64)
    for item, found in zip(space.items, options, strict=True):
        chosen = [item.choices[choice] for choice, _ in found]
        lumps = np.zeros((len(found), ranks, space.num_columns))
        for row, (choice, owners) in enumerate(found):
            lumps[row, list(owners)] = item.choices[choice].lump
        load = (load[:, None] + lumps[None]).reshape(-1, ranks, space.num_columns)
        even = (even[:, None] + np.array([c.uniform for c in chosen])[None]).reshape(-1, space.num_columns)
        padded = (padded[:, None] + np.array([c.padded for c in chosen])[None]).reshape(-1, space.num_columns)
        pairs = (pairs[:, None] + np.array([c.pair_ids for c in chosen])[None]).reshape(-1)
        flags = (flags[:, None] | np.array([c.flags for c in chosen], dtype=np.int64)[None]).reshape(-1)
    factor = np.array([space.padding(float(pair)) for pair in pairs])
    columns = even + factor[:, None] * padded + load.max(axis=1)
    bits = (flags[:, None] >> np.arange(len(LATENCY_FLAGS))) & 1
    seconds = space.constant_seconds + columns[:, :NUM_PARTS].sum(axis=1) + bits @ space.latency
    workspace = space.model.assume.workspace_bytes * (columns[:, NUM_PARTS:-1] > 0.5).sum(axis=1)
    num_bytes = space.constant_bytes + columns[:, NUM_PARTS:].sum(axis=1) + workspace
    fits = np.flatnonzero(num_bytes <= capacity_bytes)
    if not len(fits):
        return None
    fastest = fits[np.isclose(seconds[fits], seconds[fits].min(), rtol=1e-12, atol=0.0)]
    number = int(fastest[np.argmin(num_bytes[fastest])])
    picks: list[tuple[int, tuple[int, ...]]] = []
    for found in reversed(options):
        number, index = divmod(number, len(found))
        picks.append(found[index])
    picks.reverse()
    return Placement(tuple(choice for choice, _ in picks), tuple(owners for _, owners in picks))


def _first_is_free(space: Space) -> bool:
    """With nothing pinned all ranks are alike, so the first item's single shard may as well be on rank 0."""
    return all(item.pinned is None for item in space.items)


def _num_options(space: Space, position: int, first: bool) -> int:
    count = 0
    for choice in space.items[position].choices:
        if not choice.copies or space.items[position].pinned is not None or (first and choice.copies == 1):
            count += 1
        elif choice.group:
            count += len(space.groups[choice.group])
        else:
            count += comb(space.model.num_ranks, choice.copies)
    return count


def _options(space: Space, position: int, first: bool) -> list[tuple[int, tuple[int, ...]]]:
    item, ranks = space.items[position], space.model.num_ranks
    found: list[tuple[int, tuple[int, ...]]] = []
    for number, choice in enumerate(item.choices):
        if not choice.copies:
            found.append((number, ()))
        elif item.pinned is not None:
            found.append((number, item.pinned))
        elif choice.group:
            found += [(number, tuple(sorted(map(int, members)))) for members in space.groups[choice.group]]
        elif first and choice.copies == 1:
            found.append((number, (0,)))
        else:
            found += [(number, owners) for owners in combinations(range(ranks), choice.copies)]
    return found
