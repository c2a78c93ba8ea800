"""Runs conversion units in this process or in several."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from pipelines.data.conversion_unit import ConversionUnit, UnitResult, convert_unit
from tpurec.errors import TpurecError
from tpurec.features import Schema

_POLL_SECONDS = 0.2


def run_units(
    units: Sequence[ConversionUnit],
    folder: Path,
    schema: Schema,
    max_bad_rows: int | None,
    workers: int,
    progress: Callable[[int], None],
) -> Iterator[UnitResult]:
    """Convert units.

    Args:
        units: what to read.
        folder: where to write.
        schema: of the rows.
        max_bad_rows: as for `convert_unit`.
        workers: processes; with 1 or a single unit, this one does the work.
        progress: called in this process with the number of rows just read.

    Yields:
        Results, as they come.

    Raises:
        DataError: of the first unit that fails.
        TpurecError: a process was killed.
    """
    if workers == 1 or len(units) <= 1:
        for unit in units:
            yield convert_unit(unit, folder, schema, max_bad_rows, progress)
        return
    # Fresh processes: forking this one would copy its threads' locks (Arrow's, the progress bar's) as they stand.
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(units)), mp_context=context, initializer=_start_worker, initargs=(reports,)
    )
    try:
        with _reporting(reports, progress):
            futures = [pool.submit(_convert_in_worker, unit, folder, schema, max_bad_rows) for unit in units]
            for future in as_completed(futures):
                yield future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise TpurecError(
            "a worker process of the conversion was killed, perhaps for lack of memory.", "Try fewer --workers."
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
            process.join()
        reports.close()


_reports: multiprocessing.Queue | None = None


def _start_worker(reports: multiprocessing.Queue) -> None:
    global _reports
    _reports = reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others


def _convert_in_worker(unit: ConversionUnit, folder: Path, schema: Schema, max_bad_rows: int | None) -> UnitResult:
    return convert_unit(unit, folder, schema, max_bad_rows, _reports.put)


@contextlib.contextmanager
def _reporting(reports: multiprocessing.Queue, progress: Callable[[int], None]) -> Iterator[None]:
    """Pass on what workers report while the block runs."""
    stopped = threading.Event()

    def listen() -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Empty):
                progress(reports.get(timeout=_POLL_SECONDS))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        stopped.set()
        listener.join()
