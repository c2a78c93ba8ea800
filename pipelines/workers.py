"""Worker processes on this host: start them, listen to them, end them all when one fails, start again after a loss.

A worker is `python -m pipelines.worker`. Its standard input carries its order as one JSON line and then stays open:
when it ends, the launcher is gone, and so is the worker. A pipe of its own carries its messages back, one JSON object a
line (see `pipelines.worker.Channel`); whatever it prints besides goes to our stderr behind its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpurec.errors import TpurecError
from tpurec.reporting import Reporter

MAX_RESTARTS = 3
# When one worker dies its peers fail, too, in the collective they are in. So long we wait for the cause to show itself
# before we take a follow-up failure for it.
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1

WORKER = (sys.executable, "-m", "pipelines.worker")


@dataclass(frozen=True)
class Job:
    """What the workers are to do.

    Args:
        task: names the function of `pipelines.worker.TASKS`.
        options: its plain JSON arguments.
        num_workers: processes.
        keep_open: file descriptors that a worker inherits, such as a lock that is to outlive the launcher.
    """

    task: str
    options: Mapping[str, Any]
    num_workers: int
    keep_open: Sequence[int] = ()


@dataclass
class _Attempt:
    """What became of one start of all workers."""

    result: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None  # a failure with a known cause, and its remedy
    defect: tuple[int, str, str] | None = None  # rank, an exception that nobody foresaw, and its traceback
    lost: tuple[int, str] | None = None  # rank, and what ended it


@dataclass
class Progress:
    """Moves one bar, also over restarts: what is trained again moves nothing.

    Args:
        advance: takes the rows that are new and a note.
    """

    advance: Callable[[float, str], None]
    shown: float = 0.0
    reached: float = field(default=0.0)

    def restart(self) -> None:
        """The workers begin again; the first rows they tell are those of the checkpoint."""
        self.reached = 0.0

    def add(self, rows: float, loss: float) -> None:
        """Take the rows just done."""
        self.reached += rows
        if self.reached > self.shown:
            self.advance(self.reached - self.shown, f"log loss {loss:.4f}")
            self.shown = self.reached


def run_workers(
    job: Job, reporter: Reporter, progress: Progress, max_restarts: int = MAX_RESTARTS
) -> tuple[dict[str, Any], int]:
    """Run a task in workers until rank 0 has its result; start all again when one is lost.

    Args:
        job: the task; it must go on from its last checkpoint when it is started again.
        reporter: where log lines go.
        progress: moved by what rank 0 tells.
        max_restarts: so often workers are started again after one was killed or crashed. A failure with a known cause,
            or a Python exception, ends the run: doing the same again would not help.

    Returns:
        The result of rank 0, and the number of restarts.

    Raises:
        TpurecError: what a worker raised; or workers were lost more often than allowed.
    """
    for restarts in range(max_restarts + 1):
        progress.restart()
        attempt = _attempt(job, reporter, progress)
        if attempt.result is not None:
            return attempt.result, restarts
        if attempt.lost is None:
            break
        rank, how = attempt.lost
        if restarts < max_restarts:
            reporter.warn(
                f"worker {rank} of {job.num_workers} {how}; starting all again from the last checkpoint "
                f"(restart {restarts + 1} of at most {max_restarts})."
            )
    if attempt.lost is not None:
        rank, how = attempt.lost
        often = f"after {max_restarts} restarts " if max_restarts else ""
        raise TpurecError(
            f"{often}worker {rank} of {job.num_workers} {how}.",
            "Out of memory? Use fewer --workers or a smaller batch. The same command with --out set to the RUN goes on "
            "from the last checkpoint.",
        )
    if attempt.problem is not None:
        raise TpurecError(*attempt.problem)
    assert attempt.defect is not None
    rank, reason, trace = attempt.defect
    for line in trace.splitlines():
        reporter.log(f"[worker {rank}] {line}")
    raise TpurecError(f"worker {rank} of {job.num_workers}: {reason}.", "Its traceback is above.")


def _attempt(job: Job, reporter: Reporter, progress: Progress) -> _Attempt:
    events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="tpurec-") as folder:  # where the ranks meet; fresh at each start
        try:
            for rank in range(job.num_workers):
                processes.append(_start(job, rank, f"file://{folder}/store", events))
            return _listen(processes, events, reporter, progress)
        finally:  # also on Ctrl-C: no checkpoint is half-written, because a worker may be killed at any moment
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def _start(
    job: Job, rank: int, init_method: str, events: queue.SimpleQueue[tuple[int, str, Any]]
) -> subprocess.Popen[bytes]:
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [*WORKER, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing, *job.keep_open),
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
            env=_environment(),
        )
    finally:
        os.close(writing)
    task = {"task": job.task, "options": dict(job.options)}
    place = {"rank": rank, "num_workers": job.num_workers, "init_method": init_method}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; whoever listens finds out
        process.stdin.write(json.dumps(task | place).encode() + b"\n")
        process.stdin.flush()
    for stream, kind in ((os.fdopen(reading, "rb"), "message"), (process.stdout, "line")):
        threading.Thread(target=_pump, args=(stream, rank, kind, events), daemon=True).start()
    return process


def _environment() -> dict[str, str]:
    """Of the workers: gloo otherwise looks the host's name up, which may not resolve, or lead elsewhere."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})


def _pump(stream: Any, rank: int, kind: str, events: queue.SimpleQueue[tuple[int, str, Any]]) -> None:
    with stream:
        for line in stream:
            if kind == "line":
                events.put((rank, "line", line.decode(errors="replace").rstrip("\n")))
            elif line.endswith(b"\n"):  # what a kill cut short says nothing
                events.put((rank, *next(iter(json.loads(line).items()))))
    events.put((rank, f"{kind}s end", None))


def _listen(
    processes: list[subprocess.Popen[bytes]],
    events: queue.SimpleQueue[tuple[int, str, Any]],
    reporter: Reporter,
    progress: Progress,
) -> _Attempt:
    """Handle events until all is done, or it is clear what went wrong."""
    attempt = _Attempt()
    failed_at: float | None = None
    pumps = 2 * len(processes)
    while True:
        try:
            rank, kind, value = events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            rank, kind, value = -1, "nothing", None
        if kind == "line":
            reporter.log(f"[worker {rank}] {value}")
        elif kind == "log":
            reporter.log(value)
        elif kind == "progress":
            progress.add(*value)
        elif kind == "result":
            attempt.result = value
        elif kind == "problem":
            attempt.problem = attempt.problem or (value[0], value[1])
        elif kind == "defect":
            attempt.defect = attempt.defect or (rank, value[0], value[1])
        elif kind.endswith("s end"):
            pumps -= 1
        codes = [process.poll() for process in processes]
        for number, code in enumerate(codes):
            if code is not None and code < 0 and attempt.lost is None:
                attempt.lost = (number, f"was ended by signal {_signal_name(-code)}")
        if failed_at is None and any(code for code in codes):
            failed_at = time.monotonic()
        waited = failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS
        told = attempt.lost is not None or attempt.problem is not None
        ended = pumps == 0 and all(code is not None for code in codes)
        if ended or waited or (failed_at is not None and told):
            return _cause(attempt, codes)


def _cause(attempt: _Attempt, codes: list[int | None]) -> _Attempt:
    if any(code for code in codes):
        attempt.result = None
        if attempt.lost is None and attempt.problem is None and attempt.defect is None:
            rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
            attempt.lost = (rank, f"ended with code {code} and without a word")
    elif attempt.result is None:
        attempt.lost = (0, "ended without a result")
    return attempt


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
