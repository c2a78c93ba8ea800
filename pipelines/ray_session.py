"""Ray on this machine, for as long as a command needs it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from tpurec.errors import TpurecError


@contextmanager
def ray_session(num_workers: int = 1, *, cluster: bool = False) -> Iterator[int]:
    """Start Ray on this machine and end it afterwards; one that this process runs already is used and left running.

    Its logs stay out of ours, and what it prints all the same goes to stderr: stdout is for the command's result.

    Args:
        num_workers: that are to find room at the same time.
        cluster: use the cluster that this machine belongs to, or that a submitted job runs on, instead.

    Yields:
        CPUs that it may use.

    Raises:
        TpurecError: there is no such cluster.
    """
    import ray

    if ray.is_initialized():
        yield int(ray.cluster_resources()["CPU"])
        return
    # Two at least, so that an actor and a reading task can run side by side.
    num_cpus = max(num_workers + 1, len(os.sched_getaffinity(0)))
    where = {"address": "auto"} if cluster else {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    with redirect_stdout(sys.stderr):
        with _our_signal_handlers():
            try:
                ray.init(**where, log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise TpurecError(
                    f"there is no Ray cluster here: {str(error).splitlines()[0].rstrip('.')}.",
                    "Start one with `ray start` on every host of the slice, or use `ray job submit`.",
                ) from None
        try:
            yield int(ray.cluster_resources().get("CPU", 0)) if cluster else num_cpus
        finally:
            ray.shutdown()


@contextmanager
def _our_signal_handlers() -> Iterator[None]:
    """Undo what the block does to SIGINT and SIGTERM: Ray would abort with a stack trace."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
