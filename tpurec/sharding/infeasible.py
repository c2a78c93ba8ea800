"""The answer where no plan fits: what is in the way, and what would help."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tpurec.topology.slices import SliceTopology


@dataclass(frozen=True)
class Problem:
    """Why there is no plan.

    Args:
        table: the table that cannot be placed; empty if it is no single table's fault.
        message: one line with the figures.
        bytes_missing: memory that is missing on a rank.
        remedies: what would help, each checked by planning it: dicts with `action` and its effect.
    """

    table: str
    message: str
    bytes_missing: int
    remedies: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Infeasible:
    """There is no plan that fits.

    Args:
        slice: the slice's name.
        batch_size: global examples per step.
        problems: what is in the way, the worst first.
        hbm_bytes_max: memory of the fullest rank in the most compact plan found.
        hbm_bytes_mean: the same, mean over ranks.
        hbm_bytes_capacity: what libtpu lets a program use on one rank.
        hbm_bytes_budget: the capacity less the reserve.
        hbm_parts: bytes of the fullest rank by use.
        plan_seconds: time it took to find out.
    """

    slice: str
    batch_size: int
    problems: tuple[Problem, ...]
    hbm_bytes_max: int
    hbm_bytes_mean: int
    hbm_bytes_capacity: int
    hbm_bytes_budget: int
    hbm_parts: dict[str, int]
    plan_seconds: float = field(default=0.0, compare=False)

    fits = False

    @property
    def topology(self) -> SliceTopology:
        """The slice."""
        return SliceTopology.parse(self.slice)

    def summary(self) -> dict[str, Any]:
        """What `tpurec plan --json` prints; the keys of `Plan.summary`, None where there is no answer."""
        slice_ = self.topology
        return {
            "fits": False,
            "slice": self.slice,
            "num_chips": slice_.num_chips,
            "num_ranks": slice_.num_ranks,
            "idle_ranks": None,
            "step_seconds": None,
            "step_parts": {},
            "lower_bound_seconds": None,
            "lower_bound_kind": None,
            "samples_per_second": None,
            "hbm_bytes_max": self.hbm_bytes_max,
            "hbm_bytes_mean": self.hbm_bytes_mean,
            "hbm_bytes_capacity": self.hbm_bytes_capacity,
            "hbm_parts": dict(self.hbm_parts),
            "plan_seconds": self.plan_seconds,
            "stopped_early": False,
            "tables": [],
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
        }
