"""Which shards fit together on a rank, said in sums: dual feasible functions.

A rank that holds shards of sizes x (shares of the most that it may carry, so that they sum to at most 1) has room for
less than the mean says: two shards of 0.6 never share a rank. If the sum of f(x) is at most 1 wherever the sum of x is,
then for all shards on all ranks

    sum over shards of f(x)  <=  ranks

holds as well, and says more than the mean where shards are large. Source: Fekete and Schepers, "New classes of fast
lower bounds for bin packing problems" (Mathematical Programming 91, 2001), whose functions u and U these are.
"""

from __future__ import annotations

import numpy as np

_TIE = 1e-9  # sizes this close to a multiple are that multiple: sizes are sums of a few products in float64
# Small parameters of the first see shards that nearly fill a rank, large ones and the second see pairs, triples, ...
BESIDE = (0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5)  # `least` of `beside`
FUNCTIONS: tuple[tuple[str, float], ...] = (
    *(("rounded", share) for share in (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)),
    *(("stepped", steps) for steps in (1, 2, 3, 4, 5, 6, 8)),
)
_LEAST, _STEPS = (
    np.array([parameter for kind, parameter in FUNCTIONS if kind == wanted])[:, None]
    for wanted in ("rounded", "stepped")
)


def room_taken(sizes: np.ndarray, function: int) -> np.ndarray:
    """Room that shards take on a rank that cannot carry more than 1.

    Args:
        sizes: float64, any shape, each between 0 and 1.
        function: position in FUNCTIONS.

    Returns:
        float64 of the same shape: whenever sizes sum to at most 1, so do these.

    >>> room_taken(np.array([0.4, 0.6]), FUNCTIONS.index(("stepped", 1))).tolist()
    [0.0, 1.0]
    """
    kind, parameter = FUNCTIONS[function]
    if kind == "rounded":
        return beside(sizes, sizes, parameter)
    steps = (parameter + 1) * sizes
    return np.where(np.abs(steps - np.rint(steps)) < _TIE, sizes, np.floor(steps) / parameter)


def beside(sizes: np.ndarray, others: np.ndarray, least: float) -> np.ndarray:
    """Room that shards take where one nearly fills a rank, counted in another part of the step beside such shards.

    A shard larger than `1 - least` is alone but for shards smaller than `least`, so it takes all room, and those none.
    The others share a rank as their sizes in the other part allow.

    Args:
        sizes: float64, any shape, each between 0 and 1: shares of what a rank may carry of one part.
        others: the same shape: shares of what it may carry of another part, or `sizes` again.
        least: at most 1/2.

    Returns:
        float64 of the same shape: whenever both kinds of sizes sum to at most 1, so do these.
    """
    kept = np.where(sizes < least - _TIE, 0.0, others)
    return np.where(sizes > 1 - least + _TIE, 1.0, kept)


def room_of_all(sizes: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Room that all shards take together, for every function of FUNCTIONS.

    Args:
        sizes: float64 `[n]`, each between 0 and 1.
        share: float64 `[n]`: how many shards of each size there are.

    Returns:
        float64 `[len(FUNCTIONS)]`.
    """
    near = np.where(sizes < _LEAST - _TIE, 0.0, sizes)
    rounded = np.where(sizes > 1 - _LEAST + _TIE, 1.0, near)
    steps = (_STEPS + 1) * sizes
    stepped = np.where(np.abs(steps - np.rint(steps)) < _TIE, sizes, np.floor(steps) / _STEPS)
    return np.concatenate([rounded @ share, stepped @ share])


def room_beside(sizes: np.ndarray, others: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Room that all shards take together in other parts beside large ones in this, for every `least` of BESIDE.

    Args:
        sizes: float64 `[n]`, see `beside`.
        others: float64 `[n, parts]`: sizes in the other parts.
        share: float64 `[n]`: how many shards of each size there are.

    Returns:
        float64 `[len(BESIDE), parts]`.
    """
    least = np.array(BESIDE)[:, None]
    alone = sizes > 1 - least + _TIE
    together = ~alone & (sizes >= least - _TIE)
    return (alone @ share)[:, None] + (together * share) @ others


def common_unit(sizes: np.ndarray, most_multiples: int = 4096) -> float:
    """The largest number that all sizes are multiples of.

    Args:
        sizes: float64, 0 or more.
        most_multiples: multiples that the largest size may be.

    Returns:
        The unit; 0 if there is none, or only one so small that it says nothing.
    """
    left = np.unique(sizes[sizes > 0])
    if not len(left):
        return 0.0
    largest = float(left[-1])
    while len(left) > 1:  # Euclid, all sizes at once
        unit = float(left[0])
        if unit * most_multiples < largest:
            return 0.0
        rest = left - unit * np.rint(left / unit)
        rest = np.abs(rest)
        left = np.unique(np.append(rest[rest > _TIE * largest], unit))
        if len(left) == 1:
            break
    unit = float(left[0])
    return unit if np.abs(sizes / unit - np.rint(sizes / unit)).max() < 1e-6 else 0.0
