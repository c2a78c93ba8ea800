"""One worker process, as `pipelines.workers` starts it: `python -m pipelines.worker CHANNEL`.

CHANNEL is the file descriptor for messages; the order comes as one JSON line on standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tpurec.errors import TpurecError, machine_problem

EXIT_FAILED = 1
EXIT_ORPHANED = 3


class Channel:
    """Messages to the launcher, one JSON object a line, each with one key.

    Args:
        descriptor: the pipe's writing end.
    """

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        """Send one message.

        Args:
            kind: `log` (a line), `progress` ([rows, loss]), `result` (a mapping), `problem` ([problem, remedy]) or
                `defect` ([line, traceback]).
            value: plain JSON values.
        """
        with self._lock:
            self._stream.write(json.dumps({kind: value}) + "\n")
            self._stream.flush()


Task = Callable[[dict[str, Any], Channel], dict[str, Any]]


def _train(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    from pipelines.engine_workers import train_as_worker

    return train_as_worker(order, channel)


TASKS: dict[str, Task] = {"train": _train}


def main(descriptor: int) -> int:
    """Do what the launcher orders.

    Args:
        descriptor: the messages' pipe.

    Returns:
        The exit code: 0 done, 1 failed with a message sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    channel = Channel(descriptor)
    try:
        result = TASKS[order["task"]](order, channel)
    except BaseException as error:
        known = error if isinstance(error, TpurecError) and not lost_a_peer(error) else machine_problem(error)
        if known is not None and not isinstance(error, ConnectionError):
            channel.send("problem", [known.problem, known.remedy])
            return EXIT_FAILED
        # Not printed here: a peer's death makes a failure like this in every worker, and is told alone.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(".")
        channel.send("defect", [reason, traceback.format_exc()])
        return EXIT_FAILED
    if order["rank"] == 0:
        channel.send("result", result)
    return 0


def lost_a_peer(error: BaseException) -> bool:
    """Tell a failure that follows from another worker's end from one with a cause of its own.

    Args:
        error: what a worker failed of.

    Returns:
        Whether a collective failed, because another worker is gone.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and not isinstance(cause, TpurecError):
            return True
        cause = cause.__cause__
    return False


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_ORPHANED)  # at once: others may train into the RUN as soon as its lock is free


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: after a failure, threads may hang in collectives that no peer will answer.
    os._exit(code)
