"""From the bytes of a request to its rows, with a defined answer to everything that can be wrong with them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from serving.errors import RequestError

_SHAPE = 'Expected {"rows": [{"column": value, ...}, ...]}.'


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body, up to a limit.

    Args:
        request: the request; its content type must be JSON.
        max_bytes: the limit; not one byte more is kept.

    Returns:
        The body.

    Raises:
        RequestError: 415 for another content type, 413 for a body that is too large, 400 if the client went away.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = f"content type {content_type!r}" if content_type else "no content type"
        raise RequestError(415, "wrong_content_type", f"The request has {shown}; send application/json.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > max_bytes:
                raise _too_large(max_bytes)
            pieces.append(piece)
    except ClientDisconnect:
        raise RequestError(400, "client_gone", "The client went away before its request was complete.") from None
    return b"".join(pieces)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        413, "too_large", f"The body has more than {max_bytes} bytes, the limit. Send fewer rows a request."
    )


def parse_rows(body: bytes, max_rows: int) -> list[dict[str, Any]]:
    """Read the rows out of a body.

    Args:
        body: JSON text.
        max_rows: the limit.

    Returns:
        The rows; their values are still as JSON has them. At least one.

    Raises:
        RequestError: 400 for what is not JSON (NaN, Infinity and doubled keys included), 413 for too many rows, 422
            for JSON of another shape, an empty list of rows included.
    """
    document = _parse_json(body)
    if not isinstance(document, dict):
        raise RequestError(422, "invalid_request", f"The body is {_kind(document)}. {_SHAPE}")
    if "rows" not in document:
        raise RequestError(422, "invalid_request", f"The key 'rows' is missing. {_SHAPE}", field="rows")
    for key in document:
        if key != "rows":
            raise RequestError(422, "invalid_request", f"Unknown key {key!r}. {_SHAPE}", field=key)
    rows = document["rows"]
    if not isinstance(rows, list):
        raise RequestError(422, "invalid_request", f"'rows' is {_kind(rows)}. {_SHAPE}", field="rows")
    if not rows:
        raise RequestError(422, "invalid_request", "'rows' is empty; send at least one row.", field="rows")
    if len(rows) > max_rows:
        raise RequestError(
            413, "too_many_rows", f"{len(rows)} rows, the limit is {max_rows}. Split the request.", field="rows"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RequestError(422, "invalid_row", f"Row {number} is {_kind(row)}, not an object.", row=number)
    return rows


class _DoubledKey(ValueError):
    pass


class _Constant(ValueError):
    pass


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except _DoubledKey as error:
        raise RequestError(
            400, "invalid_json", f"The key {str(error)!r} is there twice in one object.", field=str(error)
        ) from None
    except _Constant as error:
        row, field = _find_constant(body)
        message = f"{error} is not JSON; leave the column out, or send null, for a blank."
        raise RequestError(400, "invalid_json", message, row, field) from None
    except RecursionError:
        raise RequestError(400, "invalid_json", "The JSON is nested too deeply.") from None
    except ValueError as error:  # JSONDecodeError, bad UTF-8, and integers of thousands of digits
        raise RequestError(400, "invalid_json", f"The body is not valid JSON: {error}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):  # the last one would silently win
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DoubledKey(key)
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise _Constant(text)


def _find_constant(body: bytes) -> tuple[int | None, str | None]:
    """Say which row and field has the first NaN or Infinity; the parser itself does not know."""
    try:
        document = json.loads(body, parse_constant=_Constant)
    except (ValueError, RecursionError):  # there is more wrong behind it
        return None, None
    rows = document.get("rows") if isinstance(document, dict) else None
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        for field, value in row.items() if isinstance(row, dict) else ():
            if isinstance(value, _Constant) or (
                isinstance(value, list) and any(isinstance(item, _Constant) for item in value)
            ):
                return number, field
    return None, None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return {str: "text", list: "a list", dict: "an object"}[type(value)]
