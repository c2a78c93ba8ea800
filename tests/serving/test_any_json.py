"""Whatever JSON comes, the answer is scores or an error of the one shape, never a 500, and the others are not hurt."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bundle.small import small_rows, small_table
from tests.serving.test_app import error_of, serve

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.text("0123456789abcdefABCDEF", max_size=18),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_COLUMNS = ["price", "age", "ad", "city", "slot", "tags", "tag_weights", "label", "request"]
_ROWS = st.lists(st.dictionaries(st.sampled_from(_COLUMNS) | st.text(max_size=6), _VALUES, max_size=6), max_size=5)
_BODIES = st.one_of(
    st.builds(lambda rows: {"rows": rows}, _ROWS),
    st.builds(lambda value: {"rows": value}, _VALUES),
    _VALUES,
)


@settings(max_examples=80, deadline=None)
@given(bodies=st.lists(_BODIES, min_size=1, max_size=4))
def test_any_json_gets_an_answer_and_good_requests_beside_it_get_theirs(loaded, bodies):
    good = small_rows(3)

    async def scenario(client):
        import asyncio

        requests = [client.post("/v1/score", json={"rows": good})]
        # ensure_ascii keeps lone surrogates as escapes, which is what a client can send
        headers = {"content-type": "application/json"}
        requests += [client.post("/v1/score", content=json.dumps(body), headers=headers) for body in bodies]
        return await asyncio.gather(*requests)

    first, *answers = serve(loaded, scenario, max_wait_ms=5)
    np.testing.assert_allclose(first.json()["scores"], loaded.score(small_table(3)), atol=1e-6, rtol=0)
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code == 200:
            scores = answer.json()["scores"]
            assert len(scores) == len(body["rows"]) and all(0 <= score <= 1 for score in scores)
        else:
            assert answer.status_code in (400, 422), answer.text
            assert error_of(answer)["message"]
