"""`tpurec serve`: one process that answers scoring requests over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.config import ServeConfig
from tpurec.errors import TpurecError
from tpurec.reporting import JsonOption, Reporter

if TYPE_CHECKING:
    from fastapi import FastAPI

_DEFAULTS = ServeConfig()


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by `tpurec export`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 picks a free one.")] = 8000,
    max_batch_rows: Annotated[
        int, typer.Option(min=1, help="Rows that are scored together at most.")
    ] = _DEFAULTS.max_batch_rows,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="How long a request waits for others to be scored with, at most.")
    ] = _DEFAULTS.max_wait_ms,
    max_request_rows: Annotated[
        int, typer.Option(min=1, help="Rows of one request; more are refused (413).")
    ] = _DEFAULTS.max_request_rows,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of one request; more are refused (413).")
    ] = _DEFAULTS.max_body_bytes,
    request_seconds: Annotated[
        float, typer.Option(min=0.001, help="A request that takes longer is given up (408, 504).")
    ] = _DEFAULTS.request_seconds,
    threads: Annotated[int, typer.Option(min=0, help="Torch threads; 0 for every core.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Serve a bundle over HTTP until interrupted (Ctrl-C or SIGTERM); requests in flight are still answered.

    POST /v1/score, GET /healthz, /readyz, /metrics, /docs. The bundle scores its own examples before the port opens.
    With --json the object (url, model, pid) is printed once the service is ready.
    """
    import os

    from tpurec.bundle import Bundle, read_manifest

    reporter = Reporter(as_json)
    read_manifest(bundle)  # a wrong path is said before torch is loaded
    config = ServeConfig(
        max_batch_rows=max_batch_rows,
        max_wait_ms=max_wait_ms,
        max_request_rows=max_request_rows,
        max_body_bytes=max_body_bytes,
        max_queue_rows=max(_DEFAULTS.max_queue_rows, 4 * max_batch_rows),
        request_seconds=request_seconds,
    )
    with _listen(host, port) as listener:  # so is a port that is taken
        import torch

        from serving.app import create_app

        if threads:
            torch.set_num_threads(threads)
        loaded = Bundle.load(bundle)
        difference = loaded.check_examples()
        url = _url(host, listener)

        def announce() -> None:
            reporter.log(f"model {loaded.version}: its examples score as in training (difference {difference:.1e})")
            reporter.log(f"serving {bundle} on {url} (docs: {url}/docs); Ctrl-C stops")
            if as_json:
                reporter.result({"url": url, "model": loaded.version, "pid": os.getpid()})

        run_server(create_app(loaded, config), listener, announce, config.shutdown_seconds)
    reporter.log("stopped")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise TpurecError(
            f"cannot listen on {host}:{port}: {error.strerror or error}.",
            "Choose another --port (0 picks a free one) or --host.",
        ) from None
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def run_server(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None], shutdown_seconds: float) -> None:
    """Run an application until SIGINT or SIGTERM.

    Args:
        app: the application.
        listener: a socket that listens already.
        on_ready: called once requests are answered.
        shutdown_seconds: how long requests in flight may take after the signal.
    """
    import uvicorn

    from serving.http_protocol import ScoringProtocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            on_ready()

    # uvicorn would read the environment (workers, proxies) for what is left out here.
    server = Server(
        uvicorn.Config(
            app,
            http=ScoringProtocol,
            workers=1,
            proxy_headers=False,
            forwarded_allow_ips="",
            server_header=False,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        )
    )
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again once it has stopped; being told to stop is no failure
        if not server.should_exit:
            raise
