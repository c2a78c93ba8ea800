"""The online service: routes, and the way of a request from bytes to scores."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serving.batching import MicroBatcher, QueueFull
from serving.config import ServeConfig
from serving.errors import RequestError, install_error_handlers
from serving.metrics import CONTENT_TYPE, Metrics
from serving.openapi import PATHS, describe_score, docs_page
from serving.request import parse_rows, read_body
from tpurec.bundle import Bundle
from tpurec.features.rows import RowError, columns_from_rows

logger = logging.getLogger("tpurec.serving")

# Up to here, parsing in the event loop takes less than a millisecond, about what handing it to a thread would cost.
_SMALL_BODY_BYTES = 16 << 10


def create_app(bundle: Bundle, config: ServeConfig | None = None) -> FastAPI:
    """Make the application that serves a bundle.

    Args:
        bundle: what to serve.
        config: limits; by default those of `ServeConfig`.

    Returns:
        An ASGI application. Its lifespan starts and ends the scoring thread, so run it under a server that runs
        lifespans.
    """
    config = config or ServeConfig()
    metrics = Metrics(bundle.version, list(bundle.schema.tables))
    service = _Service(bundle, config, metrics)
    app = FastAPI(
        title="tpurec scoring",
        version=bundle.version,
        description="Scores rows with one model. Every error has one shape; see /docs.",
        lifespan=service.lifespan,
        docs_url=None,  # FastAPI's page loads its scripts from a CDN; ours needs no network
        redoc_url=None,
        redirect_slashes=False,
        # FastAPI's own telemetry can be told by the environment to send data elsewhere; /metrics is all there is.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.add_middleware(_Measure, metrics=metrics)
    install_error_handlers(app, metrics)

    @app.post("/v1/score", **describe_score(bundle))
    async def score(request: Request) -> Response:
        return await service.score(request)

    @app.get("/healthz", summary="Is the process alive?")
    async def healthz() -> Response:
        return _json({"status": "alive"})

    @app.get("/readyz", summary="Can it answer requests now?")
    async def readyz() -> Response:
        if not service.ready:
            raise RequestError(503, "not_ready", "The service is starting or stopping.", headers={"retry-after": "1"})
        return _json({"status": "ready", "model": bundle.version})

    @app.get("/metrics", summary="Counters and histograms, Prometheus text format")
    async def read_metrics() -> Response:
        metrics.waiting_rows.set(service.batcher.waiting_rows)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

    return app


class _Service:
    def __init__(self, bundle: Bundle, config: ServeConfig, metrics: Metrics) -> None:
        self._bundle = bundle
        self._config = config
        self._metrics = metrics
        self.batcher: MicroBatcher[list[dict[str, Any]], np.ndarray] = MicroBatcher(
            self._score_requests,
            config.max_batch_rows,
            config.max_wait_ms / 1000,
            config.max_queue_rows,
            metrics.batch,
        )
        self._parsers = ThreadPoolExecutor(2, thread_name_prefix="parse")
        self.ready = False

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.batcher.start()
        self.ready = True
        try:
            yield
        finally:
            self.ready = False
            await self.batcher.close()
            self._parsers.shutdown()

    async def score(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._config.request_seconds):
                body = await read_body(request, self._config.max_body_bytes)
        except TimeoutError:
            message = f"The request did not arrive within {self._config.request_seconds:g} s."
            raise RequestError(408, "request_timeout", message, headers={"connection": "close"}) from None
        try:
            async with asyncio.timeout(self._config.request_seconds):
                rows = await self._parse(body)
                scores = await self.batcher.submit(rows)
        except TimeoutError:
            message = f"No answer within {self._config.request_seconds:g} s; the service is busy."
            raise RequestError(504, "timeout", message) from None
        except QueueFull:
            message = f"More than {self._config.max_queue_rows} rows wait already; try again later."
            raise RequestError(503, "overloaded", message, headers={"retry-after": "1"}) from None
        return _json({"scores": scores.tolist(), "model": self._bundle.version})

    async def _parse(self, body: bytes) -> list[dict[str, Any]]:
        if len(body) <= _SMALL_BODY_BYTES:
            return parse_rows(body, self._config.max_request_rows)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parsers, parse_rows, body, self._config.max_request_rows)

    def _score_requests(self, requests: list[list[dict[str, Any]]]) -> list[np.ndarray | Exception]:
        """Judge and score several requests at once; the cost of both is per column far more than per row.

        Every row is judged alone, so what is wrong with one request concerns no other.
        """
        parsed = columns_from_rows(self._bundle.transformer, [row for rows in requests for row in rows])
        self._metrics.ids(parsed.columns.counts)  # ids that policy `error` refuses are counted as well
        ends = np.cumsum([len(rows) for rows in requests])
        errors = _errors_by_request(parsed.errors, ends)
        scores = np.zeros(ends[-1], dtype=np.float32)
        scores[parsed.good] = self._bundle.predict(parsed.columns)
        answers: list[np.ndarray | Exception] = []
        for number, (rows, end) in enumerate(zip(requests, ends, strict=True)):
            own = scores[end - len(rows) : end]
            if number in errors:
                answers.append(_refusal(errors[number], len(rows)))
            elif not np.isfinite(own).all():
                row = int(np.flatnonzero(~np.isfinite(own))[0])
                logger.error("model %s gives %s for a row", self._bundle.version, own[row])
                message = "The model's score for this row is not a number."
                answers.append(RequestError(500, "not_finite", message, row=row))
            else:
                answers.append(own)
        return answers


def _errors_by_request(errors: list[RowError], ends: np.ndarray) -> dict[int, list[RowError]]:
    """Errors of the rows of several requests, by request, with row numbers as the request counts them."""
    found: dict[int, list[RowError]] = {}
    for error in errors:
        number = int(np.searchsorted(ends, error.row, side="right"))
        first = int(ends[number - 1]) if number else 0
        found.setdefault(number, []).append(dataclasses.replace(error, row=error.row - first))
    return found


def _refusal(errors: list[RowError], num_rows: int) -> RequestError:
    first, refused = errors[0], len({error.row for error in errors})
    more = f" ({refused} of {num_rows} rows are refused.)" if refused > 1 else ""
    message = first.message if first.message.endswith((".", "?")) else f"{first.message}."
    return RequestError(422, "invalid_row", f"{message}{more}", first.row, first.field)


class _Measure:
    """ASGI middleware that counts and times requests; pure ASGI, since the request path is the service's main cost."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500  # unless an answer says otherwise

        async def watch(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.request(path, status, time.monotonic() - started)


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")
