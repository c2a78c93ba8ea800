"""Maximise a concave function with kinks of a few variables between bounds: BFGS with a weak Wolfe line search.

A quasi-Newton method needs no gradient that is continuous: its matrix learns how steep the function is across a kink.
Source: Lewis and Overton, "Nonsmooth optimization via quasi-Newton methods" (Mathematical Programming 141, 2013).
Bounds are kept by projection. It is written here, and with NumPy alone, because the functions are cheap: SciPy's
L-BFGS-B spends more time around them than in them, and its BLAS starts threads that wait for each other on a busy
machine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_RISE, _FLATTER = 1e-4, 0.5  # weak Wolfe conditions: share of the promised rise, share of the slope that may be left
_MOST_TRIALS = 8  # step lengths along one direction
_SETTLED = 1e-5  # rise of a step, as a share of the value, that counts as none
_PATIENCE = 2  # such steps before it ends


def ascend(
    function: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    evaluations: int,
    enough: float = float("inf"),
) -> None:
    """Climb; the caller's function keeps the best that it saw.

    Args:
        function: value and slope (a supergradient) at a point.
        start: float64 `[n]`, where to begin; moved between the bounds.
        low: float64 `[n]`.
        high: float64 `[n]`.
        evaluations: of the function, at most.
        enough: a value with which it ends.
    """
    here = np.clip(start, low, high)
    value, slope = function(here)
    left, idle = evaluations - 1, 0
    inverse = np.eye(len(here)) / max(float(np.sqrt(slope @ slope)), 1e-12)
    while left > 0 and idle < _PATIENCE and value < enough:
        free = ~(((here <= low) & (slope < 0)) | ((here >= high) & (slope > 0)))
        climb = np.where(free, slope, 0.0)
        direction = np.where(free, inverse @ climb, 0.0)
        steep = float(direction @ climb)
        if steep <= 1e-14:
            break
        shortest, longest, length = 0.0, np.inf, 1.0
        best = None
        for _ in range(min(_MOST_TRIALS, left)):
            there = np.clip(here + length * direction, low, high)
            reached, after = function(there)
            left -= 1
            if best is None or reached > best[0]:
                best = reached, after, there
            if reached >= enough:
                break
            if reached < value + _RISE * length * steep:
                longest = length
            elif float(after @ direction) > _FLATTER * steep and (there != np.clip(there + direction, low, high)).any():
                shortest = length
            else:
                break
            length = (shortest + longest) / 2 if np.isfinite(longest) else 2 * shortest
        moved, bend = there - here, slope - after  # of the last trial, which meets the conditions if one did
        curved = float(moved @ bend)
        if curved > 1e-14:
            pull = inverse @ bend
            inverse = (
                inverse
                + (1 + float(bend @ pull) / curved) / curved * np.outer(moved, moved)
                - (np.outer(pull, moved) + np.outer(moved, pull)) / curved
            )
        idle = idle + 1 if best[0] < value + _SETTLED * abs(value) else 0
        if best[0] > value:
            value, slope, here = best
