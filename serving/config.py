"""The limits of the online service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeConfig:
    """Limits and waiting times.

    Args:
        max_batch_rows: rows that are scored together at most, unless a single request has more.
        max_wait_ms: how long a request that finds the scorer idle waits for company, milliseconds.
        max_request_rows: rows of one request; more are refused with 413.
        max_body_bytes: bytes of one request's body; more are refused with 413.
        max_queue_rows: rows that may wait; beyond this a request is refused with 503.
        request_seconds: a request that is not read and answered within this time gets 408 or 504.
        shutdown_seconds: how long requests in flight may take once the process was told to stop.
    """

    max_batch_rows: int = 4096
    max_wait_ms: float = 2.0
    max_request_rows: int = 8192
    max_body_bytes: int = 16 << 20
    max_queue_rows: int = 65_536
    request_seconds: float = 30.0
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "max_request_rows", "max_body_bytes", "max_queue_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if not 0 <= self.max_wait_ms <= 1000:
            raise ValueError(f"max_wait_ms = {self.max_wait_ms}: must be from 0 to 1000")
        for name in ("request_seconds", "shutdown_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")
