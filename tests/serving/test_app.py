"""The service answers rows with the bundle's scores, and everything else with one shape of error."""

import asyncio
import json
import re
import threading

import httpx
import numpy as np
import pyarrow as pa
import pytest

from serving.app import create_app
from serving.config import ServeConfig
from tests.bundle.small import small_rows, small_table, write_pooled_bundle, write_small_bundle
from tpurec.bundle import Bundle
from tpurec.features import Schema, SparseFeature

JSON = {"content-type": "application/json"}


def serve(bundle, scenario, **limits):
    """Run an asynchronous scenario against the application; returns what it returns."""

    async def main():
        app = create_app(bundle, ServeConfig(**limits))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client,
        ):
            return await asyncio.wait_for(scenario(client), 60)

    return asyncio.run(main())


def post(bundle, body, headers=JSON, **limits):
    """Send one body to /v1/score; returns the response."""
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return serve(bundle, lambda client: client.post("/v1/score", content=content, headers=headers), **limits)


def error_of(response):
    """The error object, after a check of its shape."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"code", "message", "row", "field"}, body
    assert response.headers["content-type"] == "application/json"
    return body["error"]


def metric(text, name, **labels):
    """The value of one sample."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and wanted <= set(re.findall(r'\w+="[^"]*"', found[1] or "")):
            return float(found[2])
    raise AssertionError(f"no sample {name} {labels}")


# ---- scores --------------------------------------------------------------------------------------------------------


def test_rows_get_the_scores_that_the_bundle_gives_offline(loaded):
    """Case 36, serving against offline scoring."""
    response = post(loaded, {"rows": small_rows()})
    assert response.status_code == 200
    assert response.json()["model"] == loaded.version
    offline = loaded.score(small_table())
    np.testing.assert_allclose(response.json()["scores"], offline, atol=1e-6, rtol=0)


def test_scores_do_not_depend_on_who_else_asks_at_the_same_time(loaded):
    rows, offline = small_rows(), loaded.score(small_table())

    async def scenario(client):
        cuts = [rows[start : start + size] for start, size in zip(range(0, 40, 4), [1, 2, 3, 4] * 3, strict=False)]
        answers = await asyncio.gather(*(client.post("/v1/score", json={"rows": cut}) for cut in cuts))
        return [(cut, answer.json()["scores"]) for cut, answer in zip(cuts, answers, strict=True)], (
            await client.get("/metrics")
        ).text

    answers, metrics = serve(loaded, scenario, max_wait_ms=100)
    for start, (cut, scores) in zip(range(0, 40, 4), answers, strict=True):
        np.testing.assert_allclose(scores, offline[start : start + len(cut)], atol=1e-6, rtol=0)
    assert metric(metrics, "tpurec_batch_rows_count") < len(answers)  # they did share batches


def test_the_label_and_key_columns_may_be_sent_along(loaded):
    rows = small_rows(2)
    plain = post(loaded, {"rows": rows}).json()["scores"]
    assert post(loaded, {"rows": [{**row, "label": 1, "request": 7} for row in rows]}).json()["scores"] == plain


def test_weighted_sum_of_two_ids_is_210_online(tmp_path):
    """Case 6."""
    feature = SparseFeature("f", num_embeddings=5, kind="integer", transform="identity", multi_valued=True, weights="w")
    schema = Schema(name="weighted", sparse=(feature,))
    example = {"f": [1, 2], "w": [10.0, 100.0], "pooled": 210.0}
    bundle = Bundle.load(write_pooled_bundle(tmp_path / "b", schema, 0.01, example))
    scores = np.array(post(bundle, {"rows": [{"f": [1, 2], "w": [10, 100]}]}).json()["scores"])
    assert np.log(scores / (1 - scores)) * 100 == pytest.approx([210], rel=1e-4)


@pytest.mark.parametrize("policy", ["error", "skip", "hash"])
def test_an_id_without_a_row_follows_the_policy_and_is_counted(tmp_path, policy):
    """Cases 7 and 34: the same answer as offline; under `error` the row is refused, by name; a counter goes up."""
    feature = SparseFeature("f", num_embeddings=10, kind="integer", transform="identity")
    schema = Schema(name="ids", sparse=(feature,), id_policy=policy)
    bundle = Bundle.load(write_pooled_bundle(tmp_path / "b", schema, 0.5, {"f": 3, "pooled": 3.0}))
    strange = [10, -1, 2**31, 2**33, 2**32 + 3]

    async def scenario(client):
        answer = await client.post("/v1/score", json={"rows": [{"f": 3}, *({"f": number} for number in strange)]})
        good = await client.post("/v1/score", json={"rows": [{"f": 3}]})
        return answer, good, (await client.get("/metrics")).text

    answer, good, metrics = serve(bundle, scenario)
    assert good.status_code == 200
    if policy == "error":
        assert answer.status_code == 422
        error = error_of(answer)
        assert (error["row"], error["field"]) == (1, "f")
        assert "id 10 is out of range, num_embeddings is 10" in error["message"] and "5 of 6 rows" in error["message"]
    else:
        offline = bundle.score(pa.table({"f": pa.array([3, *strange], pa.int64())}))
        np.testing.assert_allclose(answer.json()["scores"], offline, atol=1e-6, rtol=0)
    assert metric(metrics, "tpurec_policy_ids_total", table="f", reason="out_of_range") == 5


def test_a_value_that_the_vocabulary_lacks_is_counted_as_unseen(loaded):
    """Case 34."""

    async def scenario(client):
        before = (await client.get("/metrics")).text
        answer = await client.post("/v1/score", json={"rows": [{"city": "atlantis", "ad": "not hex"}]})
        return answer, before, (await client.get("/metrics")).text

    answer, before, after = serve(loaded, scenario)
    assert answer.status_code == 200
    assert metric(before, "tpurec_policy_ids_total", table="city", reason="unseen") == 0
    assert metric(after, "tpurec_policy_ids_total", table="city", reason="unseen") == 1
    assert metric(after, "tpurec_policy_ids_total", table="ad", reason="malformed") == 1


# ---- errors --------------------------------------------------------------------------------------------------------


def test_good_malformed_good_in_one_window(loaded):
    """Case 33: the good ones are answered, the malformed one gets a 4xx naming row and field."""
    rows = small_rows(4)

    async def scenario(client):
        bodies = [{"rows": rows[:2]}, {"rows": [rows[0], {"slot": "seven"}]}, {"rows": rows[2:]}]
        return await asyncio.gather(*(client.post("/v1/score", json=body) for body in bodies))

    first, malformed, last = serve(loaded, scenario, max_wait_ms=200)
    expected = loaded.score(small_table(4))
    np.testing.assert_allclose(first.json()["scores"] + last.json()["scores"], expected, atol=1e-6, rtol=0)
    assert malformed.status_code == 422
    error = error_of(malformed)
    assert (error["code"], error["row"], error["field"]) == ("invalid_row", 1, "slot")


@pytest.mark.parametrize(
    ("row", "field", "says"),
    [
        ({"tags": 3, "tag_weights": [1.0]}, "tags", "expected a list"),  # case 35: a scalar where a list is expected
        ({"slot": [3]}, "slot", "expected a whole number"),  # case 35: a list where a scalar is
        ({"tags": [1, 2], "tag_weights": [1.0]}, "tag_weights", "1 weights for 2 ids"),
        ({"tags": [1, "2"], "tag_weights": [1.0, 1.0]}, "tags", "item 1"),
        ({"price": "3"}, "price", "expected a number"),
        ({"price": 1e39}, "price", "float32"),
        ({"price": 10**400}, "price", "float32"),
        ({"slot": 2**63}, "slot", "int64"),
        ({"slot": 1.5}, "slot", "whole number"),
        ({"city": {"a": 1}}, "city", "expected a string"),
        ({"city": "\ud800"}, "city", "Unicode"),
        ({"citty": "rome"}, "citty", "did you mean 'city'"),
    ],
)
def test_a_bad_value_gets_a_422_that_names_row_and_field(loaded, row, field, says):
    response = post(loaded, {"rows": [{}, {}, row]})
    assert response.status_code == 422
    error = error_of(response)
    assert (error["code"], error["row"], error["field"]) == ("invalid_row", 2, field)
    assert says in error["message"]
    assert error["message"][-1] in ".?" and error["message"][-2] not in ".?"


def test_a_number_that_json_overflows_to_infinity_is_refused(loaded):
    response = post(loaded, '{"rows": [{"price": 1e999}]}')
    assert response.status_code == 422 and error_of(response)["field"] == "price"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/score/", 404, "not_found"),
        ("GET", "/v1/score", 405, "method_not_allowed"),
        ("DELETE", "/healthz", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_the_same_shape_of_error(loaded, method, path, status, code):
    response = serve(loaded, lambda client: client.request(method, path))
    assert response.status_code == status
    assert error_of(response)["code"] == code


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_gets_a_415(loaded, content_type):
    response = post(loaded, {"rows": [{}]}, headers={"content-type": content_type} if content_type else {})
    assert response.status_code == 415
    assert error_of(response)["code"] == "wrong_content_type"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_any_of_its_names_is_taken(loaded, content_type):
    assert post(loaded, {"rows": [{}]}, headers={"content-type": content_type}).status_code == 200


def test_a_body_over_the_limit_gets_a_413_without_being_kept(loaded):
    sent = []

    async def pieces():
        for _ in range(100):
            sent.append(1)
            yield b" " * 1000

    async def scenario(client):
        announced = await client.post("/v1/score", content=b" " * 5001, headers=JSON)
        streamed = await client.post("/v1/score", content=pieces(), headers=JSON)
        return announced, streamed

    announced, streamed = serve(loaded, scenario, max_body_bytes=5000)
    assert announced.status_code == streamed.status_code == 413
    assert error_of(announced)["code"] == error_of(streamed)["code"] == "too_large"
    assert "5000 bytes" in error_of(streamed)["message"]


def test_too_many_rows_get_a_413(loaded):
    response = post(loaded, {"rows": [{}] * 4}, max_request_rows=3)
    assert response.status_code == 413 and error_of(response)["code"] == "too_many_rows"


def test_a_request_larger_than_a_batch_is_answered(loaded):
    response = post(loaded, {"rows": small_rows(20)}, max_batch_rows=4)
    np.testing.assert_allclose(response.json()["scores"], loaded.score(small_table(20)), atol=1e-6, rtol=0)


class _Slow:
    """A bundle whose scoring waits for a permission."""

    def __init__(self, bundle):
        self._bundle = bundle
        self.go = threading.Event()

    def __getattr__(self, name):
        return getattr(self._bundle, name)

    def predict(self, columns):
        assert self.go.wait(20)
        return self._bundle.predict(columns)


def test_a_request_that_takes_too_long_gets_a_504_and_the_next_one_is_answered(loaded):
    slow = _Slow(loaded)

    async def scenario(client):
        late = await client.post("/v1/score", json={"rows": [{}]})
        slow.go.set()
        return late, await client.post("/v1/score", json={"rows": [{}]})

    late, good = serve(slow, scenario, request_seconds=0.3)
    assert late.status_code == 504 and error_of(late)["code"] == "timeout"
    assert good.status_code == 200


def test_a_body_that_does_not_arrive_gets_a_408(loaded):
    async def pieces():
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async def scenario(client):
        return await client.post("/v1/score", content=pieces(), headers=JSON)

    # httpx's transport collects the body first, so the application is driven by hand here.
    async def main():
        app = create_app(loaded, ServeConfig(request_seconds=0.2))
        sent = []
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(30)

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/score", "raw_path": b"/v1/score", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 10)
        return sent

    sent = asyncio.run(main())
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


def test_more_waiting_rows_than_allowed_get_a_503_that_says_when_to_come_back(loaded):
    slow = _Slow(loaded)

    async def scenario(client):
        requests = []
        for _ in range(4):
            requests.append(asyncio.ensure_future(client.post("/v1/score", json={"rows": [{}] * 3})))
            await asyncio.sleep(0.2)
        slow.go.set()
        return await asyncio.gather(*requests)

    answers = serve(slow, scenario, max_queue_rows=4, max_wait_ms=0)
    assert [answer.status_code for answer in answers] == [200, 200, 503, 503]
    assert error_of(answers[2])["code"] == "overloaded" and answers[2].headers["retry-after"] == "1"


def test_a_defect_gets_a_500_without_its_details_and_the_service_lives_on(loaded, caplog):
    class Broken(_Slow):
        def predict(self, columns):
            if len(columns) == 2:
                raise ZeroDivisionError("a secret path")
            return self._bundle.predict(columns)

    async def scenario(client):
        return await client.post("/v1/score", json={"rows": [{}, {}]}), await client.post(
            "/v1/score", json={"rows": [{}]}
        )

    broken, good = serve(Broken(loaded), scenario)
    assert broken.status_code == 500 and error_of(broken)["code"] == "internal"
    assert "secret" not in broken.text
    assert good.status_code == 200


def test_a_score_that_is_no_number_is_an_error_and_not_invalid_json(loaded):
    class Diverged(_Slow):
        def predict(self, columns):
            return np.array([0.5, np.nan], np.float32)

    response = post(Diverged(loaded), {"rows": [{}, {}]})
    assert response.status_code == 500
    assert (error_of(response)["code"], error_of(response)["row"]) == ("not_finite", 1)


# ---- the other paths -----------------------------------------------------------------------------------------------


def test_health_readiness_and_metrics(loaded):
    async def scenario(client):
        await client.post("/v1/score", json={"rows": small_rows(3)})
        await client.post("/v1/score", json={"rows": []})
        await client.get("/no/such/path")
        return [await client.get(path) for path in ("/healthz", "/readyz", "/metrics")]

    health, ready, metrics = serve(loaded, scenario)
    assert health.json() == {"status": "alive"}
    assert ready.json() == {"status": "ready", "model": loaded.version}
    text = metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metric(text, "tpurec_requests_total", path="/v1/score", status="200") == 1
    assert metric(text, "tpurec_requests_total", path="/v1/score", status="422") == 1
    assert metric(text, "tpurec_requests_total", path="other", status="404") == 1
    assert metric(text, "tpurec_errors_total", code="invalid_request") == 1
    assert metric(text, "tpurec_rows_total") == 3
    assert metric(text, "tpurec_batch_rows_sum") == 3
    assert metric(text, "tpurec_request_seconds_count", path="/v1/score") == 2
    assert metric(text, "tpurec_model", version=loaded.version) == 1
    assert metric(text, "tpurec_ids_total", table="city") == 3


def test_it_is_not_ready_before_and_after_its_life(loaded):
    async def main():
        app = create_app(loaded)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            before = await client.get("/readyz")
            async with app.router.lifespan_context(app):
                during = await client.get("/readyz")
            return before, during, await client.get("/readyz"), await client.get("/healthz")

    before, during, after, health = asyncio.run(main())
    assert [answer.status_code for answer in (before, during, after, health)] == [503, 200, 503, 200]
    assert error_of(before)["code"] == "not_ready"


def test_the_example_of_the_openapi_description_works_as_it_stands(loaded):
    async def scenario(client):
        description = (await client.get("/openapi.json")).json()
        operation = description["paths"]["/v1/score"]["post"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        return description, example, await client.post("/v1/score", json=example)

    description, example, answer = serve(loaded, scenario)
    shown = description["paths"]["/v1/score"]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    assert answer.status_code == 200 and len(example["rows"]) == 2
    np.testing.assert_allclose(answer.json()["scores"], shown["scores"], atol=2e-6, rtol=0)
    assert set(description["paths"]) == {"/v1/score", "/healthz", "/readyz", "/metrics"}
    rows = description["paths"]["/v1/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = rows["properties"]["rows"]["items"]["properties"]
    assert properties["tags"] == {"type": ["array", "null"], "items": {"type": "integer"}}
    assert set(properties) == {"price", "age", "ad", "city", "slot", "tags", "tag_weights"}


def test_the_docs_page_loads_nothing_from_anywhere_else(loaded):
    response = serve(loaded, lambda client: client.get("/docs"))
    assert response.status_code == 200 and "tag_weights" in response.text
    assert re.findall(r"https?://|//cdn|src=|@import", response.text) == []


def test_two_applications_do_not_mix_their_metrics(loaded, tmp_path):
    other = Bundle.load(write_small_bundle(tmp_path / "other", seed=9))
    post(loaded, {"rows": [{}]})
    text = serve(other, lambda client: client.get("/metrics")).text
    assert metric(text, "tpurec_rows_total") == 0 and other.version in text and loaded.version not in text


@pytest.mark.parametrize(
    "limits", [{"max_batch_rows": 0}, {"max_wait_ms": -1}, {"max_wait_ms": float("nan")}, {"request_seconds": 0}]
)
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        ServeConfig(**limits)
