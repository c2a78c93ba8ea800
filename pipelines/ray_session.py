"""A Ray of our own on this machine, for as long as a command needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_session() -> Iterator[int]:
    """Start Ray on this machine and end it afterwards; its logs stay out of ours.

    Yields:
        CPUs that it may use.
    """
    import ray

    # Two at least, so that an actor and a reading task can run side by side.
    num_cpus = max(2, len(os.sched_getaffinity(0)))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield num_cpus
    finally:
        ray.shutdown()
