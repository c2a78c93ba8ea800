"""Learning-rate schedule: one factor a step, shared by the dense optimizer and the tables'. Plain arithmetic."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, decay: Decay, final_factor: float) -> float:
    """What to multiply the configured learning rates with at one step.

    Args:
        step: steps done before this one, from 0.
        total_steps: steps of the whole run.
        warmup_steps: steps over which the factor climbs linearly to 1; the first of them already has 1/warmup_steps.
        decay: after the warm-up: `none` stays at 1, `linear` and `cosine` fall to `final_factor` at the last step.
        final_factor: where the decay ends, between 0 and 1.

    Returns:
        The factor, between 0 and 1.

    >>> [learning_rate_factor(step, 6, 2, "linear", 0.0) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "none" or total_steps <= warmup_steps:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    shape = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final_factor + (1.0 - final_factor) * shape
