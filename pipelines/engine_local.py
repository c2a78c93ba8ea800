"""`--engine local`: everything in this process, or in one of several like it; threads read ahead of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipelines.order import Pass
from pipelines.reading import SourceBatch, read_batches
from pipelines.run import Run
from pipelines.source import Part, Source
from pipelines.training import train_run
from tpurec.features import Ladder
from tpurec.reporting import Reporter


class LocalSource(Source):
    """Reads windows in threads of this process."""

    def read(self, part: Part, passes: Iterable[Pass], ladder: Ladder, first_batch: int) -> Iterator[SourceBatch]:
        """Read passes, as `Source.read` says.

        Args:
            part: which data the passes are over.
            passes: say which rows make up which batch.
            ladder: for the id capacities.
            first_batch: number of the first batch wanted of the first pass.

        Yields:
            The batches, or this rank's shares of them.
        """
        workers = self.recipe.data.reader_workers
        yield from read_batches(self.reader(part), passes, ladder, workers, first_batch, self.share)


def train_local(run: Run, source: LocalSource, reporter: Reporter) -> dict[str, Any]:
    """Train in this process.

    Args:
        run: prepared and locked.
        source: the batches.
        reporter: where progress goes.

    Returns:
        The result of `train_run`.
    """
    with reporter.progress("train", source.total_rows) as advance:
        return train_run(
            run, source, log=reporter.log, progress=lambda rows, loss: advance(rows, f"log loss {loss:.4f}")
        )
