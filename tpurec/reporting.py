"""What commands print: one JSON object or a readable summary on stdout; progress and logs on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

PIPED_WIDTH = 120
SECONDS_BETWEEN_LINES = 30.0  # of progress, where stderr is a file: seen by `tail -f`, and no flood in a night's log

JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


class _RateColumn(ProgressColumn):
    def render(self, task: Any) -> Text:
        speed = task.finished_speed or task.speed
        return Text(_rate(speed, task.fields["unit"]) if speed else "", style="cyan")


def _rate(speed: float, unit: str) -> str:
    return f"{speed:,.0f} {unit}/s" if speed >= 1 else ""  # slices to plan take seconds each: "0 slices/s" says nothing


class Reporter:
    """Where one command's output goes.

    Args:
        as_json: print the result as one JSON object instead of a summary for people.
    """

    json_printed = False  # whether this process has printed its one JSON object; `tpurec.cli` asks before an error's

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.err = Console(stderr=True, highlight=False)
        self.out = Console(highlight=False)
        if not self.out.is_terminal and "COLUMNS" not in os.environ:
            self.out.width = PIPED_WIDTH  # a file or pager has no width of its own; 80 would cut tables

    def log(self, message: str) -> None:
        """Print one line on stderr.

        Args:
            message: the line; rich markup is not interpreted.
        """
        self.err.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print one warning line on stderr.

        Args:
            message: the line, without the word "warning".
        """
        self.err.print(Text("warning: ", style="yellow") + Text(message), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str = "rows") -> Iterator[Callable[..., None]]:
        """Show a progress bar with rate and remaining time on stderr; where that is no terminal, a line now and then.

        Args:
            description: what is going on, such as `train`.
            total: how many units there are in all; None if not known.
            unit: the unit of the rate.

        Yields:
            A function to call with the number of units just done, and optionally a short note to show behind the bar.
        """
        if not self.err.is_terminal:
            yield self._progress_lines(description, total, unit)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}" if total is not None else "{task.completed:,.0f}"),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(description, total=total, unit=unit, note="")
            yield lambda amount, note="": bar.update(task, advance=amount, note=note)

    def _progress_lines(self, description: str, total: float | None, unit: str) -> Callable[..., None]:
        done = counted = 0.0
        counted_at = time.monotonic()
        resumed = True  # the first call may tell what an interrupted run had done: no rate is taken from it

        def advance(amount: float, note: str = "") -> None:
            nonlocal done, counted, counted_at, resumed
            done += amount
            seconds = time.monotonic() - counted_at
            if resumed:
                resumed, counted = False, done
            elif seconds >= SECONDS_BETWEEN_LINES:
                of = f" of {total:,.0f}" if total is not None else ""
                words = (f"{done:,.0f}{of} {unit}", _rate((done - counted) / seconds, unit), note)
                self.log(f"{description}: {', '.join(filter(None, words))}")
                counted, counted_at = done, time.monotonic()

        return advance

    def result(self, values: dict[str, Any], summary: Callable[[Console], None] | None = None) -> None:
        """Print the command's result; call it once, at the end.

        Args:
            values: what `--json` prints; NaN and infinity become null.
            summary: draws the readable form on the given console; by default `key: value` lines.
        """
        if self.as_json:
            print(json.dumps(_json_safe(values)), file=sys.stdout, flush=True)
            Reporter.json_printed = True
        elif summary is not None:
            summary(self.out)
        else:
            width = max(map(len, values), default=0)
            for key, value in values.items():
                self.out.print(f"{key:<{width}}  {value}", markup=False)


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):  # numpy and torch scalars
        return _json_safe(value.item())
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
