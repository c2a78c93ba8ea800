"""Requests that are no HTTP: answered before there is an application, in the shape of every other error."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from serving.errors import RequestError


class ScoringProtocol(AutoHTTPProtocol):
    """uvicorn's parser of HTTP, whose refusals would be plain text."""

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, and close the connection.

        Args:
            msg: uvicorn's words for it.
        """
        message = f"{msg.rstrip('.')}: its request line, a header, Content-Length or a chunk is not as HTTP has it."
        answer = RequestError(400, "invalid_http", message, headers={"connection": "close"}).response()
        head = [f"HTTP/1.1 400 {HTTPStatus.BAD_REQUEST.phrase}".encode()]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", b""]) + answer.body)
        self.transport.close()
