"""The planning problems that the planner's benchmark solves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tpurec.sharding.tables import FeatureSpec, TableSpec, read_tables

MLPERF = Path(__file__).resolve().parents[1] / "examples" / "mlperf_dlrm_v2" / "tables.toml"
BATCH_SIZE = 65_536
# name -> number of tables (26: the MLPerf ones; "long bags" hold 5 to 60 ids each), bytes of weights, slice
PROBLEMS: dict[str, tuple[int, float, str]] = {
    "mlperf v6e-16": (26, 0, "v6e-16"),
    "mlperf v6e-64": (26, 0, "v6e-64"),
    "mlperf v6e-256": (26, 0, "v6e-256"),
    "mlperf v5p-2048": (26, 0, "v5p-2048"),
    "200 tables 16 GB v6e-256": (200, 16e9, "v6e-256"),
    "200 tables 2000 GB v6e-256": (200, 2e12, "v6e-256"),
    "200 tables long bags v6e-256": (200, 2e11, "v6e-256"),
    "1000 tables 16 GB v5p-2048": (1000, 16e9, "v5p-2048"),
    "1000 tables 2000 GB v5p-2048": (1000, 2e12, "v5p-2048"),
}


def problem(name: str) -> tuple[list[TableSpec], str]:
    """Make a problem.

    Args:
        name: a key of PROBLEMS.

    Returns:
        Tables and the slice's name.
    """
    count, num_bytes, slice_ = PROBLEMS[name]
    if count == 26:
        return list(read_tables(MLPERF).tables), slice_
    return (long_bag_tables if "long bags" in name else mixed_tables)(count, num_bytes), slice_


def mixed_tables(count: int, num_bytes: float, seed: int = 0) -> list[TableSpec]:
    """Tables of mixed sizes: rows spread evenly in log from 100 to 200 million, then scaled to a total.

    Dims are 16 to 128; four of five features have one id, the others 2 to 20.

    Args:
        count: how many.
        num_bytes: weights of all together.
        seed: of the random numbers.

    Returns:
        The tables.
    """
    rng = np.random.default_rng(seed)
    dims = rng.choice([16, 32, 64, 128], count, p=[0.1, 0.2, 0.4, 0.3])
    rows = np.exp(rng.uniform(np.log(100), np.log(2e8), count))
    rows = np.maximum(1, (rows * num_bytes / (rows * dims * 4).sum()).astype(np.int64))
    ids = np.where(rng.random(count) < 0.8, 1, rng.integers(2, 21, count))
    return [
        TableSpec(f"t{i}", int(rows[i]), int(dims[i]), (FeatureSpec(f"f{i}", float(ids[i])),)) for i in range(count)
    ]


def long_bag_tables(count: int, num_bytes: float, seed: int = 0) -> list[TableSpec]:
    """Tables of dim 128 whose bags hold 5 to 60 ids: rows spread evenly in log from 10^3 to 10^7.5, scaled to a total.

    Args:
        count: how many.
        num_bytes: weights of all together.
        seed: of the random numbers.

    Returns:
        The tables.
    """
    rng = np.random.default_rng(seed)
    rows = 10 ** rng.uniform(3, 7.5, count)
    rows = np.maximum(1, (rows * num_bytes / (rows * 128 * 4).sum()).astype(np.int64))
    ids = rng.integers(5, 61, count)
    return [TableSpec(f"t{i}", int(rows[i]), 128, (FeatureSpec(f"f{i}", float(ids[i])),)) for i in range(count)]
