"""`tpurec serve` as a process: it says when it is ready, and stops without dropping what it accepted."""

import contextlib
import http.client
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.bundle.small import small_rows, small_table

pytestmark = pytest.mark.multiprocess


class Server:
    """A running `tpurec serve`."""

    def __init__(self, bundle, *options):
        words = [sys.executable, "-m", "tpurec.cli", "serve", str(bundle), "--port", "0", "--json", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = json.loads(self.process.stdout.readline())
        self.url = self.ready["url"]

    def post(self, rows):
        request = urllib.request.Request(
            f"{self.url}/v1/score", json.dumps({"rows": rows}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def start(small_bundle):
    servers = []

    def begin(*options):
        servers.append(Server(small_bundle, *options))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def serving(small_bundle):
    """One server for what does not end it."""
    server = Server(small_bundle)
    yield server
    server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_one_object_when_ready_serves_and_stops_on_a_signal(start, loaded, number):
    server = start()
    assert server.ready["model"] == loaded.version and server.ready["pid"] == server.process.pid
    assert server.url.startswith("http://127.0.0.1:") and not server.url.endswith(":0")
    answer = server.post(small_rows())
    np.testing.assert_allclose(answer["scores"], loaded.score(small_table()), atol=1e-6, rtol=0)
    code, out, err = server.stop(number)
    assert code == 0
    assert out == ""  # the object was the only line
    assert server.url in err and "Traceback" not in err


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: ten",
        b"POST /v1/score HTTP/1.1\r\nContent-Length: -1",
        b"GET",
    ],
    ids=["text", "negative", "no HTTP"],
)
def test_what_is_no_http_gets_an_error_of_the_shape_of_all_others(serving, head):
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head + b"\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert error.keys() == {"code", "message", "row", "field"}
    assert error["code"] == "invalid_http" and "Content-Length" in error["message"]
    assert len(serving.post(small_rows())["scores"]) == len(small_rows()), "others are served on"


def test_a_head_without_end_is_refused_before_it_fills_memory(serving):
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # the server closes while we send
            for _ in range(1000):
                connection.sendall(b"a" * 10_000)
                if select.select([connection], [], [], 0.001)[0]:
                    break
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) in ((431, "head_too_large"), (400, "invalid_http"))  # httptools, h11
    long = {"x-long": "a" * 20_000}
    with urllib.request.urlopen(urllib.request.Request(f"{serving.url}/healthz", headers=long), timeout=30) as response:
        assert response.status == 200


def test_a_request_in_flight_is_answered_after_the_signal_and_the_port_is_closed(start):
    server = start("--max-wait-ms", "1000")  # so that the request is still waiting when the signal comes
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.post([{}])))
    started = time.monotonic()
    asking.start()
    time.sleep(0.4)
    server.process.send_signal(signal.SIGTERM)
    asking.join(30)
    assert len(answers) == 1 and len(answers[0]["scores"]) == 1
    assert time.monotonic() - started > 0.4
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    with pytest.raises(urllib.error.URLError):
        server.post([{}])


def test_many_clients_at_once_get_their_own_answers(start, loaded):
    server = start()
    rows, expected = small_rows(), loaded.score(small_table())
    wrong = []

    def ask(number):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        for step in range(10):
            row = (number * 7 + step) % len(rows)
            body = json.dumps({"rows": [rows[row]] if (number + step) % 5 else [{"slot": "bad"}]})
            connection.request("POST", "/v1/score", body, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            if (number + step) % 5:
                if response.status != 200 or abs(answer["scores"][0] - expected[row]) > 1e-6:
                    wrong.append((row, response.status, answer))
            elif response.status != 422:
                wrong.append(("bad", response.status, answer))
        connection.close()

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    assert wrong == []
    metrics = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    assert 'tpurec_requests_total{path="/v1/score",status="200"} 96.0' in metrics
    assert 'tpurec_requests_total{path="/v1/score",status="422"} 24.0' in metrics


def _run(*words):
    child = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", "serve", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return child.returncode, child.stdout, child.stderr


def test_a_port_that_is_taken_is_a_one_line_error(small_bundle):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = _run(small_bundle, "--port", port, "--json")
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in json.loads(out)["error"]["message"]
    assert "--port" in json.loads(out)["error"]["remedy"] and "Traceback" not in err


def test_what_is_no_bundle_is_a_one_line_error(tmp_path):
    code, out, _ = _run(tmp_path / "absent", "--port", 0, "--json")
    assert code == 1
    assert "not a bundle" in json.loads(out)["error"]["message"]


@pytest.mark.parametrize("options", [["--port", "70000"], ["--max-wait-ms", "-1"], ["--max-batch-rows", "0"]])
def test_options_out_of_range_are_wrong_usage(small_bundle, options):
    code, out, _ = _run(small_bundle, *options, "--json")
    assert code == 2 and options[0] in json.loads(out)["error"]["message"]
