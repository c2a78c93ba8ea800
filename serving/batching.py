"""Micro-batching: requests that wait at the same time are answered together, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Sized)
A = TypeVar("A")


class QueueFull(Exception):
    """More rows wait than the queue may hold; the caller should try again later."""


@dataclass(eq=False)
class _Request(Generic[R]):
    rows: R
    answer: asyncio.Future[Any]
    arrived: float = field(default_factory=time.monotonic)


class MicroBatcher(Generic[R, A]):
    """Collects requests and answers them in batches, one batch at a time, in a thread of its own.

    While a batch is worked on the next one fills, so under load no request waits for the clock; only a request that
    finds the thread idle may wait `max_wait_seconds` for company. A request is never split: one that has more rows than
    a batch may have is a batch of its own.

    Args:
        work: from the rows of several requests to one answer a request, in order; an answer that is an exception is
            raised for its request alone. Runs in the thread. If it raises, every request of the batch is tried alone.
        max_batch_rows: rows of a batch at which it no longer waits.
        max_wait_seconds: how long the first request of a batch waits for others.
        max_queue_rows: rows that may wait; beyond this `submit` raises QueueFull.
        on_batch: called in the event loop after each batch with its rows and its seconds.
    """

    def __init__(
        self,
        work: Callable[[list[R]], list[A | Exception]],
        max_batch_rows: int,
        max_wait_seconds: float,
        max_queue_rows: int,
        on_batch: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        self._work = work
        self._max_batch_rows = max_batch_rows
        self._max_wait_seconds = max_wait_seconds
        self._max_queue_rows = max_queue_rows
        self._on_batch = on_batch
        self._waiting: deque[_Request[R]] = deque()
        self._waiting_rows = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def waiting_rows(self) -> int:
        """Rows that wait for a batch now."""
        return self._waiting_rows

    def start(self) -> None:
        """Start to form batches; call it inside the running event loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._run(), name="micro-batcher")

    async def close(self) -> None:
        """Answer every request that waits, then stop."""
        self._closing = True
        self._changed.set()
        if self._loop_task is not None:
            await self._loop_task
        self._thread.shutdown()

    async def submit(self, rows: R) -> A:
        """Have one request answered, together with others.

        Args:
            rows: the request.

        Returns:
            Its answer.

        Raises:
            QueueFull: too many rows wait already, or the batcher is closed.
            Exception: what `work` answered or raised for this request.
        """
        if self._closing or (self._waiting and self._waiting_rows + len(rows) > self._max_queue_rows):
            raise QueueFull
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._waiting_rows += len(rows)
        self._changed.set()
        try:
            return await request.answer
        finally:
            if not request.answer.done() or request.answer.cancelled():  # given up: do no work for it
                self._drop(request)

    def _drop(self, request: _Request[R]) -> None:
        with contextlib.suppress(ValueError):  # it is being worked on already
            self._waiting.remove(request)
            self._waiting_rows -= len(request.rows)

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                if self._closing:
                    return
                self._changed.clear()
                await self._changed.wait()
            await self._fill()
            batch = self._take()
            if batch:
                await self._answer(batch)

    async def _fill(self) -> None:
        """Wait until the batch is full, or its first request has waited long enough."""
        deadline = self._waiting[0].arrived + self._max_wait_seconds
        while self._waiting and self._waiting_rows < self._max_batch_rows and not self._closing:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._changed.wait()

    def _take(self) -> list[_Request[R]]:
        batch: list[_Request[R]] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0].rows) <= self._max_batch_rows):
            batch.append(self._waiting.popleft())
            rows += len(batch[-1].rows)
        self._waiting_rows -= rows
        return batch

    async def _answer(self, batch: list[_Request[R]]) -> None:
        started = time.monotonic()
        requests = [request.rows for request in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._work, requests)
        except Exception as error:
            if len(batch) > 1:  # one of them is at fault: the others must not pay for it
                for request in batch:
                    await self._answer([request])
                return
            answers = [error]
        self._on_batch(sum(map(len, requests)), time.monotonic() - started)
        for request, answer in zip(batch, answers, strict=True):
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)
