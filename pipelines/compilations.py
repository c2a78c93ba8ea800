"""Which programs a run compiled: for which shapes, in how many seconds, and whether they were to be expected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tpurec.embeddings import TorchBatch
from tpurec.errors import TpurecError
from tpurec.features import Ladder
from tpurec.sharding.routed import RoutedBatch, RoutedFeatures

Activity = Literal["training", "evaluation"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Compilation:
    """One call during which programs were compiled.

    Args:
        activity: what the call was for.
        batch_size: rows of the batch, padding included.
        capacities: feature name to ids it has room for; of sharded tables the sizes of their exchange.
        programs: compiled during the call.
        seconds: the call took.
        unexpected: empty, or why no program should have been needed.
    """

    activity: Activity
    batch_size: int
    capacities: dict[str, int]
    programs: int
    seconds: float
    unexpected: str = ""

    def shape(self) -> str:
        """The shape in words, for people."""
        # Most features have room for one id an example; the others are what makes a shape.
        least = Ladder.for_batch(self.batch_size).rungs[0]
        wide = [f"{name} {capacity}" for name, capacity in self.capacities.items() if capacity > least]
        return f"{self.batch_size} rows" + (f", ids of {', '.join(wide)}" if wide else "")


class Compilations:
    """Counts the programs that calls compile, and judges them.

    Args:
        count: gives the programs compiled so far, in this process.
        one_per_shape: a call needs one program a shape; False where operations are compiled one by one, in the
            background and also for what happens between the calls.
        on_recompile: `error` to raise when a program was compiled that should not be needed.
        report: takes each compilation.

    Attributes:
        programs: compiled in all calls.
        seconds: spent in calls that compiled.
        unexpected: calls that compiled a program that should not be needed.
    """

    def __init__(
        self,
        count: Callable[[], int],
        one_per_shape: bool,
        on_recompile: Literal["warn", "error"],
        report: Callable[[Compilation], None],
    ) -> None:
        self.programs = 0
        self.seconds = 0.0
        self.unexpected = 0
        self._count = count
        self._counted = count()
        self._one_per_shape = one_per_shape
        self._on_recompile = on_recompile
        self._report = report
        self._known: set[tuple] = set()

    def watch(
        self,
        activity: Activity,
        batch: TorchBatch | RoutedBatch,
        call: Callable[[], Result],
        finish: Callable[[Result], Any],
    ) -> tuple[Result, bool]:
        """Make a call; if it compiles a program, wait for its result and record it.

        Args:
            activity: what the call is for.
            batch: its batch, of static shape.
            call: the call.
            finish: waits for its result, so that the seconds tell how long the program took.

        Returns:
            The result, and whether a program was compiled.

        Raises:
            TpurecError: a program was compiled that should not be needed, and that is an error.
        """
        started = time.perf_counter()
        result = call()
        if self._count() == self._counted:
            return result, False
        finish(result)
        programs, self._counted = self._count() - self._counted, self._count()
        self._add(activity, batch, programs, time.perf_counter() - started)
        return result, True

    def warnings(self) -> list[str]:
        """Sum up what should not have been compiled.

        Returns:
            A line, or nothing.
        """
        if not self.unexpected:
            return []
        return [f"programs were compiled that should not be needed, {self.unexpected} times; metrics.jsonl has each."]

    def _add(self, activity: Activity, batch: TorchBatch | RoutedBatch, programs: int, seconds: float) -> None:
        features = batch.features
        if isinstance(features, RoutedFeatures):
            capacities, limited = features.capacities(), {}  # the ranks agree on sizes without an upper limit
        else:
            capacities = limited = dict(zip(features.keys(), features.length_per_key(), strict=True))
        shape = (activity, features.stride(), tuple(capacities.items()))
        unexpected = self._why_unexpected(shape, programs, limited) if self._one_per_shape else ""
        self._known.add(shape)
        self.programs += programs
        self.seconds += seconds
        self.unexpected += bool(unexpected)
        found = Compilation(activity, features.stride(), capacities, programs, seconds, unexpected)
        self._report(found)
        if unexpected and self._on_recompile == "error":
            raise TpurecError(
                f"{activity} compiled a program that it should not need ({found.shape()}): {unexpected}.",
                "Set device.on_recompile=warn to go on, more slowly.",
            )

    def _why_unexpected(self, shape: tuple, programs: int, capacities: dict[str, int]) -> str:
        if shape in self._known:
            return "this shape has a program already"
        if programs > 1:
            return f"{programs} programs for one shape"
        highest = Ladder.for_batch(shape[1]).rungs[-1]
        wide = [name for name, capacity in capacities.items() if capacity > highest]
        return f"feature {wide[0]!r} has more than {highest} ids, the highest rung" if wide else ""
