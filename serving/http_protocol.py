"""Requests that are no HTTP, or whose head has no end: answered before there is an application, as all errors are."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from serving.errors import RequestError

MAX_HEAD_BYTES = 64 << 10


class ScoringProtocol(AutoHTTPProtocol):
    """uvicorn's parser of HTTP, whose refusals would be plain text, and which keeps a head of any size (httptools')."""

    _head_bytes: int | None = None  # of a head that is not complete yet

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, and refuse a head that grows on.

        Args:
            data: the bytes.
        """
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"The request line and headers have more than {MAX_HEAD_BYTES} bytes."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message)

    def on_message_begin(self) -> None:
        """As httptools calls it; h11, uvicorn's other parser, has a limit of its own."""
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """As httptools calls it."""
        self._head_bytes = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, and close the connection.

        Args:
            msg: uvicorn's words for it.
        """
        message = f"{msg.rstrip('.')}: its request line, a header, Content-Length or a chunk is not as HTTP has it."
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", message)

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        answer = RequestError(status, code, message, headers={"connection": "close"}).response()
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", b""]) + answer.body)
        self.transport.close()
