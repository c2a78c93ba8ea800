"""Every way in which a body can be wrong has a defined answer."""

import json

import pytest

from serving.errors import RequestError
from serving.request import parse_rows


def _refused(body, max_rows=100):
    with pytest.raises(RequestError) as caught:
        parse_rows(body if isinstance(body, bytes) else body.encode(), max_rows)
    return caught.value


def test_rows_come_out_as_they_are():
    rows = [{"a": 1, "b": None, "c": [1, 2]}, {}]
    assert parse_rows(json.dumps({"rows": rows}).encode(), 2) == rows


@pytest.mark.parametrize(
    ("body", "status", "code", "field", "says"),
    [
        ("", 400, "invalid_json", None, "not valid JSON"),
        ("{", 400, "invalid_json", None, "not valid JSON"),
        ('{"rows": [{}]} x', 400, "invalid_json", None, "not valid JSON"),
        (b"\xff\xfe\xfd", 400, "invalid_json", None, "not valid JSON"),
        ('{"rows": [{"a": ' + "1" * 5000 + "}]}", 400, "invalid_json", None, "not valid JSON"),
        ("[" * 200_000, 400, "invalid_json", None, "nested too deeply"),
        ('{"rows": [{"a": ' + "[" * 200_000, 400, "invalid_json", None, "nested too deeply"),
        ('{"rows": [{"a": 1, "b": 2, "a": 3}]}', 400, "invalid_json", "a", "'a' is there twice"),
        ('{"rows": [{}], "rows": [{}]}', 400, "invalid_json", "rows", "'rows' is there twice"),
        ("null", 422, "invalid_request", None, "The body is null"),
        ("[]", 422, "invalid_request", None, "The body is a list"),
        ("{}", 422, "invalid_request", "rows", "'rows' is missing"),
        ('{"rows": {}}', 422, "invalid_request", "rows", "'rows' is an object"),
        ('{"rows": []}', 422, "invalid_request", "rows", "'rows' is empty"),
        ('{"rows": [{}], "row": 1}', 422, "invalid_request", "row", "Unknown key 'row'"),
        ('{"rows": [{},{},{}]}', 413, "too_many_rows", "rows", "3 rows, the limit is 2"),
    ],
)
def test_a_bad_body_is_answered(body, status, code, field, says):
    error = _refused(body, max_rows=2)
    assert (error.status, error.code, error.field) == (status, code, field)
    assert says in error.message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_only_pythons_json_allows_is_refused_with_row_and_field(constant):
    error = _refused('{"rows": [{"a": 1}, {"a": 1, "b": [2, CONSTANT]}]}'.replace("CONSTANT", constant))
    assert (error.status, error.code, error.row, error.field) == (400, "invalid_json", 1, "b")
    assert f"{constant} is not JSON" in error.message


def test_a_constant_in_front_of_worse_is_still_an_answer():
    assert _refused('{"rows": [{"a": NaN, "b": ' + "[" * 200_000).code == "invalid_json"
    assert _refused('{"x": NaN').code == "invalid_json"


@pytest.mark.parametrize("row", ["1", "null", "[]", '"x"', "true"])
def test_a_row_that_is_no_object_is_named(row):
    error = _refused('{"rows": [{}, ROW]}'.replace("ROW", row))
    assert (error.status, error.code, error.row, error.field) == (422, "invalid_row", 1, None)
