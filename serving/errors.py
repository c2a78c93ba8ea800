"""Every error of the service, in one shape: `{"error": {"code", "message", "row", "field"}}`."""

from __future__ import annotations

import json
import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serving.metrics import Metrics

logger = logging.getLogger("tpurec.serving")

_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        code: a word for programs, such as `invalid_row`.
        message: a sentence for people: what is wrong, the value, the limit, what to do.
        row: number of the row at fault, from 0; None if it is not one row.
        field: column or key at fault; None if it is not one field.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        row: int | None = None,
        field: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.row, self.field = status, code, message, row, field
        self.headers = headers or {}

    def response(self) -> Response:
        """The answer.

        Returns:
            A JSON response.
        """
        error = {"code": self.code, "message": self.message, "row": self.row, "field": self.field}
        return Response(json.dumps({"error": error}), self.status, media_type="application/json", headers=self.headers)


def install_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Make the application answer every error in that shape, and count it.

    Args:
        app: the application.
        metrics: where errors are counted.
    """

    def answer(error: RequestError) -> Response:
        metrics.error(error.code)
        return error.response()

    @app.exception_handler(RequestError)
    async def _request_error(request: Request, error: RequestError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)  # unknown paths and methods
    async def _http_error(request: Request, error: HTTPException) -> Response:
        code = _CODE_OF_STATUS.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path}: {error.detail}. See /docs for what there is."
        return answer(RequestError(error.status_code, code, message, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)  # a defect of ours; details belong to the log, not to the client
    async def _defect(request: Request, error: Exception) -> Response:
        return answer(RequestError(500, "internal", "The service failed on this request; its log says why."))
