"""The online service: routes, and the way of a request from bytes to scores."""

from __future__ import annotations

import asyncio
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
from tpurec.features import Columns
from tpurec.features.rows import columns_from_rows

logger = logging.getLogger("tpurec.serving")


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
        self.batcher: MicroBatcher[Columns] = MicroBatcher(
            self._score_batch,
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
                # A request is judged alone, before it joins a batch: what is wrong with it concerns no other.
                columns = await asyncio.get_running_loop().run_in_executor(self._parsers, self._validate, body)
                scores = await self.batcher.submit(columns)
        except TimeoutError:
            message = f"No answer within {self._config.request_seconds:g} s; the service is busy."
            raise RequestError(504, "timeout", message) from None
        except QueueFull:
            message = f"More than {self._config.max_queue_rows} rows wait already; try again later."
            raise RequestError(503, "overloaded", message, headers={"retry-after": "1"}) from None
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            logger.error("model %s gives %s for a row", self._bundle.version, scores[bad[0]])
            raise RequestError(500, "not_finite", "The model's score for this row is not a number.", row=int(bad[0]))
        return _json({"scores": scores.tolist(), "model": self._bundle.version})

    def _validate(self, body: bytes) -> Columns:
        rows = parse_rows(body, self._config.max_request_rows)
        parsed = columns_from_rows(self._bundle.transformer, rows)
        self._metrics.ids(parsed.columns.counts)  # ids that policy `error` refuses are counted as well
        if parsed.errors:
            first = parsed.errors[0]
            refused = len(rows) - len(parsed.good)
            more = f" ({refused} of {len(rows)} rows are refused.)" if refused > 1 else ""
            raise RequestError(422, "invalid_row", f"{first.message}.{more}", first.row, first.field)
        return parsed.columns

    def _score_batch(self, parts: list[Columns]) -> np.ndarray:
        return self._bundle.predict(Columns.concat(parts))


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
