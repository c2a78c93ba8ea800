"""Online scoring beside offline scoring, and with micro-batching beside without, all in one run on this machine.

python -m benchmarks.serving [--bundle BUNDLE] [--seconds 3] [--json]

Without --bundle, one of Criteo's shape with random weights is made. Clients run in a process of their own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROWS_PER_LARGE_REQUEST = 512
CLIENTS = 32
NO_BATCHING = ("--max-batch-rows", "1", "--max-wait-ms", "0")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--bundle", type=Path, help="bundle to serve; by default one with random weights is made")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle or random_bundle(Path(folder) / "bundle")
        result = measure(bundle, options.seconds)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<44}{value:>14,.2f}")


def measure(bundle: Path, seconds: float) -> dict[str, float]:
    """Measure one bundle.

    Args:
        bundle: the folder.
        seconds: length of each measurement.

    Returns:
        Rates per second, and their ratios.
    """
    from tpurec.bundle import Bundle

    loaded = Bundle.load(bundle)
    table = loaded.examples()
    rows = [
        {k: v for k, v in row.items() if v is not None and k != "tpurec.expected_score"} for row in table.to_pylist()
    ]
    many = pa.concat_tables([table] * -(-65_536 // len(table))).slice(0, 65_536)
    loaded.score(many)  # warm
    started, scored = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        scored += len(loaded.score(many))
    result = {"offline rows/s": scored / (time.perf_counter() - started)}
    one, large = rows[:1], (rows * ROWS_PER_LARGE_REQUEST)[:ROWS_PER_LARGE_REQUEST]
    with server(bundle) as address:
        result["requests/s, 1 row, 1 client"] = load(address, one, 1, seconds)
        result[f"requests/s, 1 row, {CLIENTS} clients"] = load(address, one, CLIENTS, seconds)
        large_rate = load(address, large, 4, seconds)
        result[f"rows/s, {ROWS_PER_LARGE_REQUEST} rows a request, 4 clients"] = large_rate * ROWS_PER_LARGE_REQUEST
    with server(bundle, *NO_BATCHING) as address:
        unbatched = load(address, one, CLIENTS, seconds)
        result[f"requests/s, 1 row, {CLIENTS} clients, no batching"] = unbatched
    result["ratio batching / no batching"] = result[f"requests/s, 1 row, {CLIENTS} clients"] / unbatched
    result["ratio online / offline, large requests"] = large_rate * ROWS_PER_LARGE_REQUEST / result["offline rows/s"]
    return result


@contextmanager
def server(bundle: Path, *options: str) -> Iterator[str]:
    """Run `tpurec serve`.

    Args:
        bundle: the folder.
        options: further words.

    Yields:
        HOST:PORT.
    """
    words = [sys.executable, "-m", "tpurec.cli", "serve", str(bundle), "--port", "0", "--json", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"].removeprefix("http://")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def load(address: str, rows: list[dict[str, Any]], clients: int, seconds: float) -> float:
    """Send one request again and again from a process of its own.

    Args:
        address: HOST:PORT.
        rows: of the request.
        clients: connections that ask at the same time.
        seconds: for how long.

    Returns:
        Requests answered a second.
    """
    context = multiprocessing.get_context("spawn")
    answer: Any = context.SimpleQueue()
    process = context.Process(target=_ask, args=(address, json.dumps({"rows": rows}), clients, seconds, answer))
    process.start()
    rate = answer.get()
    process.join()
    return rate


def _ask(address: str, body: str, clients: int, seconds: float, answer: Any) -> None:
    counts, stop = [0] * clients, time.perf_counter() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while time.perf_counter() < stop:
            connection.request("POST", "/v1/score", body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            counts[number] += 1
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.put(sum(counts) / (time.perf_counter() - started))


def random_bundle(path: Path) -> Path:
    """Make a bundle of Criteo's shape with random weights.

    Args:
        path: the folder to make.

    Returns:
        The folder.
    """
    import torch

    from tpurec.bundle import write_bundle
    from tpurec.config import to_toml
    from tpurec.embeddings import to_torch
    from tpurec.features import Ladder, Schema, pack
    from tpurec.features.transform import Transformer
    from tpurec.models import ModelConfig, TablesConfig, build_model

    schema = Schema.load("criteo")
    configs = ModelConfig(), TablesConfig()
    model = build_model(*configs, schema).eval()
    random = np.random.default_rng(0)
    columns = {feature.column: pa.array(random.integers(0, 1000, 64).astype(np.float32)) for feature in schema.dense}
    for feature in schema.sparse:
        columns[feature.column] = pa.array([f"{number:08x}" for number in random.integers(0, 2**32, 64)])
    examples = pa.table(columns)
    batch = to_torch(pack(Transformer(schema)(examples, labels=False), 64, Ladder((64,))))
    with torch.inference_mode():
        scores = torch.sigmoid(model(batch.dense, batch.features)).numpy()
    recipe = to_toml({"model": {"name": configs[0].name}})
    write_bundle(
        path, model=model, schema=schema, recipe_text=recipe, examples=examples, expected_scores=scores, metrics={},
        source={},
    )  # fmt: skip
    return path


if __name__ == "__main__":
    main()
