"""What libtpu makes of the jagged ops: compile time, temporaries and counted bytes, at the shapes of real models.

python -m benchmarks.jagged [--chips v6e] [--only NAME] [--cache FOLDER] [--json]

Nothing here runs on a TPU and no time but the compiler's is measured, in seconds of CPU. The programs are plain JAX.
Temporaries are the compiler's memory analysis. *Counted* are the bytes of its cost analysis, which takes a tile of
memory for every word or row that a gather or scatter touches, also in VMEM; HBM bytes are those of the arrays that lie
in HBM (`hlo_bytes.py`), or the same where the program has parts for a SparseCore, of which libtpu prints no text. All
are set against the least: every argument read once, every result written once. "TorchRec" is what TorchRec 1.9.2 moves
over the host's bus for the same op, as it computes it on the host: arguments there, results back. Ours moves nothing
(tests/emulated/device/check_jagged.py counts it).

`--chips` is a list such as `7x,v6e`; `--only` compiles the ops whose names contain it; `--cache` keeps results in a
folder by a hash of the program, the chip and libtpu's version, so that a second run compiles only what has changed.
`python -m benchmarks.kernels --jagged` prints these rows with those of the lookup and the update.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ops that TorchRec's `torchrec.experimental.torch_tpu.pallas.dispatcher` sends through the host.
_FORMAT = "1"  # of a kept result
THROUGH_HOST = {"permute_jagged", "block_bucketize", "invert_permute", "permute_pooled"}


def main() -> None:
    """Parse the options, compile every chip's programs in a process of its own, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jagged", description=__doc__)
    parser.add_argument("--chips", default="v6e", help="generations, separated by commas")
    parser.add_argument("--only", default="", help="part of an op's name")
    parser.add_argument("--cache", default="", help="folder of results to use and to add to")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for request in json.loads(options.worker):
            print(json.dumps(compile_one(*request, options.cache)), flush=True)
        return
    rows = measure(requests(options.chips.split(","), options.only), options.cache)
    if options.json:
        print(json.dumps(rows))
    else:
        print_table(rows)


def requests(chips: list[str], only: str) -> list[tuple[str, str, str]]:
    """What a run compiles.

    Args:
        chips: generations.
        only: part of an op's name.

    Returns:
        Chip, op and sizes of each program.
    """
    from tests.kernels.tools.jagged_programs import PROGRAMS

    return [
        (chip, name, sizes) for chip in chips for name, one in PROGRAMS.items() if only in name for sizes in one.sizes
    ]


def measure(requested: list[tuple[str, str, str]], cache: str = "") -> list[dict[str, Any]]:
    """Compile chip after chip, and say on stderr what is being compiled.

    Args:
        requested: as `requests` makes them.
        cache: folder of results; empty for none.

    Returns:
        A row for each; what does not compile has an `error`.
    """
    rows: list[dict[str, Any]] = []
    for chip in dict.fromkeys(chip for chip, *_ in requested):
        left = [request for request in requested if request[0] == chip]
        while left:  # a process ends with the first program that does not compile
            for result in _worker(left, cache):
                rows.append(dict(zip(("chip", "op", "sizes"), left.pop(0), strict=True)) | result)
                following = f", now {' '.join(left[0])}" if left else ""
                print(f"{len(rows)} of {len(requested)} jagged programs{following}", file=sys.stderr, flush=True)
    return rows


def _worker(requested: list[tuple[str, str, str]], cache: str) -> Iterator[dict[str, Any]]:
    """Results of the first requests, the last of them an error if the process ended before all were compiled."""
    command = [sys.executable, "-m", "benchmarks.jagged", "--cache", cache, "--worker", json.dumps(requested)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads would fill up
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        done = 0
        for line in process.stdout:
            done += 1
            yield json.loads(line)
        process.wait()
        errors.seek(0)
        told = errors.read().strip().splitlines()
    if done < len(requested):
        yield {"error": (told or ["no message"])[-1][:300]}


def compile_one(chip: str, name: str, sizes: str, cache: str = "") -> dict[str, Any]:
    """In the worker: compile one program, and read what the compiler says.

    Args:
        chip: generation.
        name: of the op.
        sizes: of the shapes.
        cache: folder of results; empty for none.

    Returns:
        Compile seconds of CPU, and bytes: least, counted, in HBM, temporary, and over the host's bus by TorchRec (None:
        it has no such op) and here.
    """
    from tests.kernels.tools.jagged_programs import lowered
    from tpurec.kernels.ahead_of_time import target

    program, least = lowered(target(chip), name, sizes)
    text = "\n".join((_FORMAT, chip, version("libtpu"), program.as_text()))
    known = Path(cache) / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if cache and known.exists():
        return json.loads(known.read_text(encoding="utf-8"))
    started = time.process_time()
    made = program.compile()
    seconds, counted = time.process_time() - started, int(made.cost_analysis()["bytes accessed"])
    row = {
        "compile_seconds": round(seconds, 2),
        "least_hbm_bytes": least,
        "counted_bytes": counted,
        "hbm_bytes": min(counted, _hbm_bytes(made) or counted),
        "temp_bytes": made.memory_analysis().temp_size_in_bytes,
        "host_bytes": 0,
        "torchrec_host_bytes": least if name in THROUGH_HOST else None,
    }
    if cache:
        known.parent.mkdir(parents=True, exist_ok=True)
        partial = known.with_suffix(".partial")
        partial.write_text(json.dumps(row), encoding="utf-8")
        partial.replace(known)
    return row


def _hbm_bytes(program: Any) -> int | None:
    import jax

    from benchmarks.hlo_bytes import hbm_bytes

    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:  # parts of it run on a SparseCore
        return None
    return hbm_bytes(text)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people.

    Args:
        rows: as `--json` prints them.
    """
    print("chip op                            sizes     compile s least MB  temp/least  HBM/least  counted/least  host")
    for row in rows:
        head = f"{row['chip']:<4} {row['op']:<29} {row['sizes']:<9}"
        if "error" in row:
            print(f"{head}  {row['error'][:90]}")
            continue
        least, host = row["least_hbm_bytes"], row["torchrec_host_bytes"]
        ratios = [row[key] / least for key in ("temp_bytes", "hbm_bytes", "counted_bytes")]
        print(
            f"{head} {row['compile_seconds']:>9.1f} {least / 1e6:>9.2f} {ratios[0]:>11.2f} {ratios[1]:>10.2f} "
            f"{ratios[2]:>14.2f}  {f'{host / 1e6:.1f} MB' if host else ''}".rstrip()
        )


if __name__ == "__main__":
    main()
