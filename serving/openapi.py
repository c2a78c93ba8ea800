"""What the service says about itself: the OpenAPI description of `/v1/score`, and a page to read and try it."""

from __future__ import annotations

import html
import json
from typing import Any

from tpurec.bundle import Bundle
from tpurec.bundle.bundle import EXPECTED_SCORE
from tpurec.features import Schema

PATHS = frozenset({"/v1/score", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"})
_ERRORS = {
    400: "Not JSON (NaN, Infinity and doubled keys included).",
    408: "The request did not arrive in time.",
    413: "Too many bytes or too many rows.",
    415: "The content type is not application/json.",
    422: "JSON of another shape, or a row that the schema refuses; `row` and `field` say where.",
    500: "The service failed.",
    503: "Too many rows wait; try again later.",
    504: "No answer in time.",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "row", "field"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "row": {"type": ["integer", "null"], "description": "From 0."},
                "field": {"type": ["string", "null"]},
            },
        }
    },
    "required": ["error"],
}


def describe_score(bundle: Bundle, example_rows: int = 2) -> dict[str, Any]:
    """Describe `POST /v1/score` for one bundle.

    Args:
        bundle: its schema gives the columns, its examples the example.
        example_rows: rows of the example.

    Returns:
        Keyword arguments for FastAPI's route decorator.
    """
    examples = bundle.examples()
    rows = examples.slice(0, example_rows)
    expected = [round(score, 6) for score in rows.column(EXPECTED_SCORE).to_pylist()]
    request = {
        "rows": [
            {name: value for name, value in row.items() if value is not None}
            for row in rows.drop_columns([EXPECTED_SCORE]).to_pylist()
        ]
    }
    answer = {
        "type": "object",
        "properties": {
            "scores": {"type": "array", "items": {"type": "number"}, "description": "One a row, in order."},
            "model": {"type": "string", "description": "The model's version."},
        },
        "required": ["scores", "model"],
    }
    body = {
        "type": "object",
        "properties": {"rows": {"type": "array", "minItems": 1, "items": row_schema(bundle.schema)}},
        "required": ["rows"],
        "additionalProperties": False,
    }
    responses: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "The scores.",
            "content": {
                "application/json": {"schema": answer, "example": {"scores": expected, "model": bundle.version}}
            },
        }
    }
    for status, description in _ERRORS.items():
        responses[status] = {"description": description, "content": {"application/json": {"schema": _ERROR}}}
    return {
        "summary": "Score rows",
        "response_model": None,
        "responses": responses,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": body, "example": request}},
            }
        },
    }


def row_schema(schema: Schema) -> dict[str, Any]:
    """Describe one row as JSON schema.

    Args:
        schema: names and kinds of the columns.

    Returns:
        A JSON schema object; every column may be absent or null, which is a blank.
    """
    properties: dict[str, Any] = {}
    for dense in schema.dense:
        properties[dense.column] = {"type": ["number", "null"]}
    for sparse in schema.sparse:
        kind = "integer" if sparse.kind == "integer" else "string"
        properties[sparse.column] = _maybe_list(kind, sparse.multi_valued)
        if sparse.multi_valued and sparse.separator:
            properties[sparse.column]["type"].append("string")
        if sparse.kind == "hex":
            properties[sparse.column]["description"] = "1 to 16 hex digits."
        if sparse.weights:
            properties[sparse.weights] = _maybe_list("number", sparse.multi_valued)
    return {"type": "object", "properties": properties, "description": "A column left out, or null, is a blank."}


def _maybe_list(kind: str, is_list: bool) -> dict[str, Any]:
    return {"type": ["array", "null"], "items": {"type": kind}} if is_list else {"type": [kind, "null"]}


def docs_page(description: dict[str, Any]) -> str:
    """Make a page that shows the API and can try it; it loads nothing from anywhere else.

    Args:
        description: the OpenAPI document.

    Returns:
        HTML.
    """
    operation = description["paths"]["/v1/score"]["post"]
    example = json.dumps(operation["requestBody"]["content"]["application/json"]["example"], indent=2)
    columns = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["rows"]["items"]
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kinds(entry))}</td>"
        f"<td>{html.escape(entry.get('description', ''))}</td></tr>"
        for name, entry in columns["properties"].items()
    ]
    errors = [f"<tr><td>{status}</td><td>{html.escape(text)}</td></tr>" for status, text in _ERRORS.items()]
    others = [
        f"<tr><td><a href='{path}'><code>{path}</code></a></td><td>{html.escape(entry['get']['summary'])}</td></tr>"
        for path, entry in description["paths"].items()
        if "get" in entry
    ]
    return _PAGE.format(
        title=html.escape(description["info"]["title"]),
        version=html.escape(description["info"]["version"]),
        example=html.escape(example),
        rows="".join(rows),
        errors="".join(errors),
        others="".join(others),
    )


def _kinds(entry: dict[str, Any]) -> str:
    kinds = [kind for kind in entry["type"] if kind != "null"]
    return " or ".join(f"list of {entry['items']['type']}" if kind == "array" else kind for kind in kinds)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }}
textarea {{ width: 100%; height: 16rem; font: 13px/1.4 ui-monospace, monospace; box-sizing: border-box }}
pre {{ background: #f4f4f4; padding: .75rem; overflow: auto; white-space: pre-wrap; min-height: 1.4em }}
td {{ padding: .15rem 1rem .15rem 0; vertical-align: top }} button {{ font: inherit; padding: .3rem 1rem }}
</style></head><body>
<h1>{title}</h1>
<p>Model <code>{version}</code>. The machine-readable description is <a href="/openapi.json">/openapi.json</a>.</p>
<h2><code>POST /v1/score</code></h2>
<p>Send rows, get one score a row, in order. A column left out, or <code>null</code>, is a blank.</p>
<label for="body">A real example; change it as you like.</label>
<textarea id="body" spellcheck="false">{example}</textarea>
<p><button id="send">Send</button> <span id="status"></span></p>
<pre id="answer" aria-live="polite"></pre>
<h3>Columns of a row</h3><table>{rows}</table>
<h3>Errors</h3>
<p>Every error is <code>{{"error": {{"code", "message", "row", "field"}}}}</code>.</p><table>{errors}</table>
<h2>Other paths</h2><table>{others}</table>
<script>
document.getElementById("send").onclick = async () => {{
  const status = document.getElementById("status"), answer = document.getElementById("answer");
  status.textContent = "...";
  try {{
    const response = await fetch("/v1/score", {{
      method: "POST", headers: {{"content-type": "application/json"}}, body: document.getElementById("body").value
    }});
    status.textContent = response.status;
    answer.textContent = JSON.stringify(await response.json(), null, 2);
  }} catch (error) {{ status.textContent = error; }}
}};
</script>
</body></html>
"""
