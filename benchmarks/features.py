"""How fast raw Criteo rows become packed batches on one core, and what the transform costs beside reading its input.

python -m benchmarks.features [--rows 200000] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tpurec.features import Columns, Ladder, PackedBatch, Schema, Transformer, columns_from_rows, pack

BATCH_SIZE = 4096
REPEATS = 5


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    result = measure(options.rows)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<52}{value:>16,.2f}")


def measure(num_rows: int) -> dict[str, float]:
    """Measure every stage on the same rows.

    Args:
        num_rows: rows of the table.

    Returns:
        Rows per second by stage, and ratios.
    """
    schema = Schema.load("criteo")
    table = criteo_like(schema, num_rows)
    transformer = Transformer(schema)
    columns = transformer(table)
    order = np.random.default_rng(1).permutation(num_rows)
    ladder = Ladder.for_batch(BATCH_SIZE)
    batch = pack(columns.take(order[:BATCH_SIZE]), BATCH_SIZE, ladder)
    request = table.slice(0, 512).drop_columns("label").to_pylist()
    text = [feature.column for feature in schema.sparse]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        pq.write_table(table, file)

        def read() -> pa.Table:
            return pq.read_table(file, use_threads=False, read_dictionary=text)

        encoded = read()
        rates = {
            "read Parquet, ids as dictionaries, rows/s": _rate(num_rows, read),
            "transform, ids as strings, rows/s": _rate(num_rows, lambda: transformer(table)),
            "transform, ids as dictionaries, rows/s": _rate(num_rows, lambda: transformer(encoded)),
        }
    rates["shuffle and pack, rows/s"] = _rate(num_rows, lambda: _shuffle_and_pack(columns, order, ladder))
    rates["batch to bytes and back, rows/s"] = _rate(BATCH_SIZE, lambda: PackedBatch.from_bytes(batch.to_bytes()))
    rates["512 request rows checked and transformed, rows/s"] = _rate(
        len(request), lambda: columns_from_rows(transformer, request)
    )
    ratio = rates["transform, ids as dictionaries, rows/s"] / rates["read Parquet, ids as dictionaries, rows/s"]
    return {**rates, "ratio transform / read, ids as dictionaries": ratio}


def criteo_like(schema: Schema, num_rows: int) -> pa.Table:
    """Random rows in Criteo's columns: blanks, negatives, ids of power-law frequencies.

    Args:
        schema: `criteo`.
        num_rows: how many.

    Returns:
        The table, in storage types.
    """
    rng = np.random.default_rng(0)
    arrays = [pa.array(rng.integers(0, 2, num_rows).astype(np.float32))]
    for _ in schema.dense:
        values = rng.integers(-2, 10_000, num_rows).astype(np.float32)
        arrays.append(pa.array(values, mask=rng.random(num_rows) < 0.3))
    for position, _ in enumerate(schema.sparse):
        ids = (rng.zipf(1.2, num_rows) * 2_654_435_761) % 2**32
        blank = rng.random(num_rows) < (0.2 if position % 3 == 0 else 0.0)
        arrays.append(pa.array(np.char.mod("%08x", ids).tolist(), pa.string(), mask=blank))
    return pa.Table.from_arrays(arrays, schema=schema.arrow_schema())


def _shuffle_and_pack(columns: Columns, order: np.ndarray, ladder: Ladder) -> None:
    for start in range(0, len(order), BATCH_SIZE):
        pack(columns.take(order[start : start + BATCH_SIZE]), BATCH_SIZE, ladder)


def _rate(rows: int, work: Callable[[], object]) -> float:
    """Rows a second of the fastest of a few repeats: the one least disturbed."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return rows / min(seconds)


if __name__ == "__main__":
    main()
