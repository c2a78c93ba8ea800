"""What libtpu makes of the kernels: compile time, memory, bundles per row and HBM bytes, beside TorchRec's, in one run.

python -m benchmarks.kernels [--chips 7x,v6e,v5p,v5e] [--full] [--jagged] [--plot FILE] [--json]

Nothing here runs on a TPU and no time but the compiler's is measured. Memory is the compiler's own analysis; bundles
are counted in its dump; HBM bytes are those of the DMAs that the kernels issue for uniform ids, and for TorchRec's
dense backward, which is plain XLA, those of its cost analysis. XLA's SparseDenseMatmul custom calls ("xla") get their
ids cut into partitions, sorted and made unique by the host, and step Adagrad with an accumulator per element; their
bundles and HBM bytes are not counted: libtpu's cost analysis is no evidence for SparseCore programs.

`--chips` is a list such as `7x,v6e`; `--full` adds all dims and every MLPerf DLRM-v2 table, `--jagged` the jagged ops
(`benchmarks.jagged`). Adam and row-wise Adam are updated at the first shape, beside the same in plain JAX.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import jagged

ROOT = Path(__file__).resolve().parents[1]
KEYS = (
    "chip", "op", "optimizer", "implementation", "num_rows", "embedding_dim", "num_bags", "ids_per_bag", "dtype",
    "compile_seconds", "argument_bytes", "alias_bytes", "temp_bytes", "bundles_per_row", "floor_bundles_per_row",
    "hbm_bytes", "least_hbm_bytes",
)  # fmt: skip
BATCH = 4096
OPS = ("embedding_bag", "embedding_update")
RULE = "rowwise_adagrad"
MOMENTS = ("adam", "rowwise_adam")
SHAPES = [
    {"num_rows": 1 << 20, "embedding_dim": 128, "num_bags": BATCH, "ids_per_bag": 20},
    # 26 one-hot features of one stack, as of Criteo, and the MLPerf DLRM-v2 table of 3,067,956 rows.
    {"num_rows": 40_000_000, "embedding_dim": 16, "num_bags": 26 * BATCH // 16, "ids_per_bag": 1},
    {"num_rows": 3_067_956, "embedding_dim": 128, "num_bags": BATCH, "ids_per_bag": 3},
]
PLOT_ROWS = (100_000, 1 << 20, 4 << 20, 40_000_000)
OTHERS = {"torchrec", "xla"}
ERROR = re.compile(r"^[\w.]+(Error|Exception|Limit)\b")  # a message may have several lines


def main() -> None:
    """Parse the options, compile every program in a process of its own, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--chips", default="7x,v6e,v5p,v5e", help="generations, separated by commas")
    parser.add_argument("--full", action="store_true", help="all dims and the MLPerf DLRM-v2 tables too")
    parser.add_argument("--jagged", action="store_true", help="the jagged ops too")
    parser.add_argument("--cache", default="", help="folder of results of jagged ops to use and to add to")
    parser.add_argument("--plot", type=Path, help="compile for this plot only: bytes per step against table rows")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(compile_one(json.loads(options.worker))))
        return
    chips = options.chips.split(",")
    rows = measure(plot_requests(chips) if options.plot else requests(chips, options.full))
    of_jagged = []
    if options.jagged:
        of_jagged = jagged.measure(jagged.requests(chips, ""), options.cache)
    if options.plot:
        plot(options.plot, rows)
    if options.json:
        print(json.dumps(rows + of_jagged))
    else:
        print_table(rows)
        if of_jagged:
            print()
            jagged.print_table(of_jagged)


def requests(chips: list[str], full: bool) -> list[dict[str, Any]]:
    """What a run compiles.

    Args:
        chips: generations.
        full: all shapes; otherwise `SHAPES`.

    Returns:
        Chip, op, implementation (None for what `tpurec` chooses), dtype and shape of each program.
    """
    from tpurec.topology.chips import chip

    found = []
    for shape in SHAPES + (full_shapes() if full else []):
        for name in (name for name in chips if fits(name, shape)):
            others = ["torchrec"] if shape["embedding_dim"] % 16 == 0 else []  # it takes no other dim
            others += ["xla"] if chip(name).sparse_core and (full or shape == SHAPES[0]) else []
            found += [
                {"chip": name, "op": op, "implementation": implementation, "dtype": "float32", **shape}
                for implementation in (None, *others)
                for op in OPS
            ]
    found += [
        {"chip": name, "op": OPS[1], "optimizer": rule, "implementation": by, "dtype": "float32", **SHAPES[0]}
        for name in chips
        for rule in MOMENTS
        for by in (None, "plain")
    ]
    return found


def measure(requested: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compile two programs at a time.

    Args:
        requested: as `requests` makes them.

    Returns:
        A row of `KEYS` for each; what does not compile has an `error` and nulls.
    """
    rows = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for row in pool.map(measured, requested):
            rows.append(row)
            print(f"\r{len(rows)} of {len(requested)} programs compiled", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def full_shapes() -> list[dict[str, int]]:
    """The other dims, one-hot Criteo, and the different MLPerf DLRM-v2 tables at the batch of one of 16 devices."""
    shapes = [
        {"num_rows": 1 << 20, "embedding_dim": dim, "num_bags": BATCH, "ids_per_bag": ids}
        for dim in (8, 16, 32, 64, 128, 256)
        for ids in (1, 20)
    ]
    tables = tomllib.loads((ROOT / "examples/mlperf_dlrm_v2/tables.toml").read_text())["tables"]
    sizes = {(table["num_embeddings"], int(table["features"][0]["ids_per_example"])) for table in tables}
    mlperf = {"embedding_dim": 128, "num_bags": BATCH}
    shapes += [{"num_rows": rows, "ids_per_bag": ids, **mlperf} for rows, ids in sorted(sizes)]
    shapes += [
        {"num_rows": rows, "embedding_dim": dim, "num_bags": BATCH, "ids_per_bag": 20}
        for rows, dim in ((4 << 20, 64), (40_000_000, 16))
    ]
    return [shape for shape in shapes if shape not in SHAPES]


def fits(name: str, shape: dict[str, int]) -> bool:
    """Whether table and row-wise state leave a tenth of the device's memory free."""
    from tpurec.topology.chips import chip

    return shape["num_rows"] * (shape["embedding_dim"] + 1) * 4 < 0.9 * chip(name).usable_hbm_bytes


def measured(request: dict[str, Any]) -> dict[str, Any]:
    """One row of the result; what does not compile has an `error` and nulls."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(
            os.environ, LIBTPU_INIT_ARGS=f"--xla_sc_dump_bundles_to={folder}", JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1"
        )
        worker = json.dumps(request | {"dump": folder})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels", "--worker", worker],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    row = dict.fromkeys(KEYS) | {key: request[key] for key in KEYS if key in request}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        told = [index for index, line in enumerate(lines) if ERROR.match(line)]
        told = [line for line in lines[told[-1] if told else -1 :] if not line.startswith(("---", "For simplicity"))]
        return row | {"error": " ".join(told)[:300]}
    return row | json.loads(done.stdout.splitlines()[-1])


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """In the worker: compile one program, and read what the compiler says."""
    from tpurec.kernels.ahead_of_time import target

    device = target(request["chip"])
    make = {"torchrec": _torchrec, "xla": _xla}.get(request["implementation"], _ours)
    function, arguments, donate, implementation, hbm = make(device, request)
    started = time.monotonic()
    compiled = device.compile(function, *arguments, donate=donate)
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    dense = implementation == "torchrec" and request["op"] == "embedding_update"
    if dense or implementation == "plain":
        hbm = int(compiled.cost_analysis()["bytes accessed"])
    core, words = device.chip.sparse_core, request["embedding_dim"]
    counted = core and not dense and implementation not in ("xla", "plain")
    vectors = max(words / core.num_lanes, 1) if core else None
    return {
        "implementation": implementation,
        "compile_seconds": round(seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        # TorchRec's backward is XLA's own program: it has no loop over rows to compare.
        "bundles_per_row": bundles_per_row(request["dump"], request["op"], vectors) if counted else None,
        "floor_bundles_per_row": vectors,
        "hbm_bytes": hbm,
        "least_hbm_bytes": _least(request),
    }


def _ids(request: dict[str, Any]) -> Any:
    import numpy as np

    count = request["num_bags"] * request["ids_per_bag"]
    return np.random.default_rng(0).integers(0, request["num_rows"], count)


def _least(request: dict[str, Any]) -> int:
    import numpy as np

    from tpurec.kernels.embedding_update import least_hbm_bytes
    from tpurec.kernels.optimizers import RowOptimizer
    from tpurec.kernels.storage import Storage

    ids = _ids(request)
    storage = Storage(request["num_rows"], request["embedding_dim"])
    rule = RowOptimizer("adagrad" if request["implementation"] == "xla" else request.get("optimizer") or RULE)
    least = least_hbm_bytes(storage, rule, request["num_bags"], len(ids), len(np.unique(ids)), False)
    return least["lookup" if request["op"] == "embedding_bag" else "update"]


def _ours(device: Any, request: dict[str, Any]) -> tuple:
    import numpy as np

    from tests.kernels.tools import programs
    from tpurec.kernels.dedup import sort_hbm_bytes
    from tpurec.kernels.dispatch import Shape, choose
    from tpurec.kernels.storage import Storage

    op, ids = request["op"], _ids(request)
    sizes = {"num_rows": request["num_rows"], "dim": request["embedding_dim"]}
    sizes |= {"num_bags": request["num_bags"], "ids_per_bag": request["ids_per_bag"]}
    build = programs.lookup if op == "embedding_bag" else programs.update
    if op == "embedding_bag":
        optimizer = ""
    else:
        optimizer = sizes["optimizer"] = request.get("optimizer") or RULE
    shape = Shape(Storage(sizes["num_rows"], sizes["dim"]), sizes["num_bags"], len(ids), optimizer=optimizer)
    choice = choose(op, shape, device.chip, request["implementation"])
    if request["implementation"]:
        sizes["implementation"] = request["implementation"]
    count = getattr(choice.module, "hbm_bytes", None)
    if count is None:
        hbm = None
    elif op == "embedding_bag":
        on_sparse_core = choice.implementation == "sparsecore"
        hbm = count(shape, device.chip, choice.config, len(ids)) if on_sparse_core else count(shape, choice.config, ids)
    elif choice.implementation == "sparsecore":
        hbm = count(shape, device.chip, choice.config, len(ids), len(np.unique(ids)), False)
    else:
        hbm = count(shape, choice.config, np.sort(ids).tolist(), False)
    if hbm is not None and op == "embedding_update":
        hbm += sort_hbm_bytes(len(ids), False)
    return *build(device, **sizes), choice.implementation, hbm


def _torchrec(device: Any, request: dict[str, Any]) -> tuple:
    """TorchRec 1.9.2's kernel, and its dense backward followed by a dense row-wise Adagrad step."""
    import jax.numpy as jnp

    kernel = _torchrec_module()
    rows, dim, num_bags = request["num_rows"], request["embedding_dim"], request["num_bags"]
    num_ids = num_bags * request["ids_per_bag"]
    table, ids = device.array((rows, dim), jnp.float32), device.array((num_ids,), jnp.int32)
    offsets = device.array((num_bags + 1,), jnp.int32)
    if request["op"] == "embedding_bag":

        def lookup(table, ids, offsets):
            return kernel.run_sc_pooled_lookup(ids, offsets, table, dim)

        hbm = num_ids * (dim + 1) * 4 + (num_bags + 1) * 4 + num_bags * dim * 4
        return lookup, (table, ids, offsets), (), "torchrec", hbm

    def step(table, state, gradient, ids, offsets):
        dense = kernel.embedding_pooled_lookup_bwd_jax(gradient, ids, offsets, rows, dim)
        state = state + (dense * dense).mean(1)
        return table - 0.1 * dense / (jnp.sqrt(state) + 1e-8)[:, None], state

    arguments = (table, device.array((rows,), jnp.float32), device.array((num_bags, dim), jnp.float32), ids, offsets)
    return step, arguments, (0, 1), "torchrec", None


def _torchrec_module() -> Any:
    """Its file alone: importing torchrec would take seconds in every worker, and this file needs only jax."""
    package = importlib.util.find_spec("torchrec").submodule_search_locations[0]
    path = Path(package) / "experimental/torch_tpu/pallas/pooled_lookup_offset.py"
    spec = importlib.util.spec_from_file_location("torchrec_pooled_lookup", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _xla(device: Any, request: dict[str, Any]) -> tuple:
    from benchmarks import kernels_xla

    shape = (request["num_rows"], request["embedding_dim"], request["num_bags"], request["ids_per_bag"])
    return *kernels_xla.program(device, request["op"], *shape), "xla", None


def bundles_per_row(folder: str | Path, op: str, vectors: float) -> float | None:
    """Bundles of the innermost loop that loads rows, over the rows that a trip loads (a power of two of them).

    Args:
        folder: dumps of one program.
        op: the update's loop over occurrences keeps its sums in registers and stores nothing, which tells it from the
            optimizer's loop over rows.
        vectors: loads of one row.

    Returns:
        Bundles, or None if no loop loads a row.
    """
    from tests.kernels.tools.bundles import loops_of

    loops = [loop for path in Path(folder).iterdir() for loop in loops_of(path.read_text(errors="replace"))]
    inner = [loop for loop in loops if loop.innermost and loop.operations["load"] >= vectors]
    if op == "embedding_update":
        inner = [loop for loop in inner if not loop.operations["store"]]
    if not inner:
        return None
    walk = max(inner, key=lambda loop: loop.operations["load"])
    rows = 2 ** int(walk.operations["load"] / vectors).bit_length() // 2
    return round(walk.bundles / rows, 2)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people.

    Args:
        rows: as `--json` prints them.
    """
    print(
        "chip op                  by           rows x dim      bags x ids  compile s  alias MB  temp MB  bundles "
        "(floor) bytes/least"
    )
    for row in rows:
        shape = f"{row['num_rows']:>9} x {row['embedding_dim']:<4} {row['num_bags']:>5} x {row['ids_per_bag']:<3}"
        head = f"{row['chip']:<4} {_named(row):<19} {row['implementation'] or '?':<11} {shape}"
        if "error" in row:
            print(f"{head}  does not compile: {row['error'][:90]}")
            continue
        bundles = (
            f"{row['bundles_per_row']:>7} ({row['floor_bundles_per_row']:g})" if row["bundles_per_row"] else " " * 11
        )
        ratio = f"{row['hbm_bytes'] / row['least_hbm_bytes']:>9.2f}" if row["hbm_bytes"] else ""
        print(
            f"{head} {row['compile_seconds']:>8.1f} {row['alias_bytes'] / 1e6:>10.1f} {row['temp_bytes'] / 1e6:>9.2f} "
            f"{bundles:>14} {ratio}".rstrip()
        )
    for chip in dict.fromkeys(row["chip"] for row in rows):
        for name in ("ours", "torchrec"):
            step = [row for row in rows if row["chip"] == chip and _is_first_shape(row) and row["hbm_bytes"]]
            step = [row for row in step if name == _whose(row)]
            if len(step) == 2:
                ratio = sum(row["hbm_bytes"] for row in step) / sum(row["least_hbm_bytes"] for row in step)
                print(
                    f"{chip} {name}: lookup + update at 1M x 128, {BATCH} x 20 ids: {ratio:.2f} x the least HBM bytes"
                )


def _named(row: dict[str, Any]) -> str:
    return f"{row['op'].removeprefix('embedding_')} {row['optimizer'] or ''}".strip()


def _is_first_shape(row: dict[str, Any]) -> bool:
    return not row["optimizer"] and all(row[key] == value for key, value in SHAPES[0].items())


def _whose(row: dict[str, Any]) -> str:
    return row["implementation"] if row["implementation"] in OTHERS else "ours"


def plot_requests(chips: list[str]) -> list[dict[str, Any]]:
    """What the plot needs.

    Args:
        chips: generations; the first is drawn.

    Returns:
        Lookup and update of dim 128 for each number of rows, ours and TorchRec's.
    """
    shapes = [{"num_rows": rows, "embedding_dim": 128, "num_bags": BATCH, "ids_per_bag": 20} for rows in PLOT_ROWS]
    return [
        {"chip": chips[0], "op": op, "implementation": implementation, "dtype": "float32", **shape}
        for shape in shapes
        if fits(chips[0], shape)
        for implementation in (None, "torchrec")
        for op in OPS
    ]


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the HBM bytes of a step against the rows of the table.

    Args:
        path: image to write.
        rows: lookup and update of each number of rows, of one chip; a step of which a part does not compile is left
            out.
    """
    from tpurec.extras import require

    pyplot = require("matplotlib.pyplot", "--plot")
    lines: dict[str, dict[int, list[int | None]]] = {}
    for row in rows:
        lines.setdefault(_whose(row), {}).setdefault(row["num_rows"], []).append(row["hbm_bytes"])
    figure, axes = pyplot.subplots()
    for name, steps in lines.items():
        points = [(num_rows, sum(both)) for num_rows, both in sorted(steps.items()) if all(both)]
        if points:
            axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.set(
        xlabel="rows of the table",
        ylabel="HBM bytes per step",
        title=f"{rows[0]['chip']}, dim 128, {BATCH} bags x 20 uniform ids",
    )
    axes.legend()
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    figure.savefig(partial)
    partial.replace(path)


if __name__ == "__main__":
    main()
