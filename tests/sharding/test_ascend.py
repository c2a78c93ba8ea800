"""The climber behind the planner's prices."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from tpurec.sharding.ascend import ascend


@pytest.mark.parametrize("seed", range(10))
def test_it_climbs_to_the_top_of_a_function_with_kinks_within_the_evaluations(seed: int) -> None:
    """The minimum of 40 planes over a box: a linear program knows the top."""
    rng = np.random.default_rng(seed)
    slopes, heights = rng.normal(size=(40, 5)), rng.uniform(1, 2, 40)
    low, high = np.full(5, -1.0), np.full(5, 0.3)
    seen: list[float] = []

    def planes(at: np.ndarray) -> tuple[float, np.ndarray]:
        assert (at >= low).all() and (at <= high).all()
        values = heights + slopes @ at
        lowest = int(values.argmin())
        seen.append(float(values[lowest]))
        return seen[-1], slopes[lowest]

    ascend(planes, np.full(5, 2.0), low, high, 200)
    found = linprog(
        np.append(np.zeros(5), -1.0),
        A_ub=np.column_stack([-slopes, np.ones(40)]),
        b_ub=heights,
        bounds=[*zip(low, high, strict=True), (None, None)],
    )
    assert len(seen) <= 200
    assert seen[0] < max(seen) <= -found.fun + 1e-9
    assert max(seen) >= seen[0] + 0.95 * (-found.fun - seen[0])


def test_it_ends_at_a_value_that_is_enough() -> None:
    """What is above is not looked for."""
    seen: list[float] = []

    def hill(at: np.ndarray) -> tuple[float, np.ndarray]:
        seen.append(float(-(at @ at)))
        return seen[-1], -2 * at

    ascend(hill, np.array([8.0, 8.0]), np.full(2, -9.0), np.full(2, 9.0), 100, enough=-120.0)
    assert seen[-1] >= -120 and max(seen[:-1]) < -120
