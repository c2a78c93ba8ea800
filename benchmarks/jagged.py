"""What libtpu makes of the jagged ops: compile time, temporaries and HBM bytes, at the shapes of real models.

python -m benchmarks.jagged [--chips v6e] [--only NAME] [--json]

Nothing here runs on a TPU and no time but the compiler's is measured. The programs are plain JAX. Temporaries are the
compiler's memory analysis; HBM bytes are its cost analysis, in which a gather or a scatter of single words counts as
what it may touch. Both are set against the least: every argument read once, every result written once. "TorchRec" is
what TorchRec 1.9.2 moves over the host's bus for the same op, as it computes it on the host: arguments there, results
back. Ours moves nothing (tests/emulated/device/check_jagged.py counts it).

`--chips` is a list such as `7x,v6e`; `--only` compiles the ops whose names contain it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ops that TorchRec's `torchrec.experimental.torch_tpu.pallas.dispatcher` sends through the host.
THROUGH_HOST = {"permute_jagged", "block_bucketize", "invert_permute", "permute_pooled"}
SECONDS = 600  # one program; a sort or scatter of a million words takes the compiler a minute


def main() -> None:
    """Parse the options, compile every program in a process of its own, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jagged", description=__doc__)
    parser.add_argument("--chips", default="v6e", help="generations, separated by commas")
    parser.add_argument("--only", default="", help="part of an op's name")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(compile_one(*json.loads(options.worker))))
        return
    rows = []
    requested = requests(options.chips.split(","), options.only)
    for request in requested:
        rows.append(measured(request))
        print(f"\r{len(rows)} of {len(requested)} programs compiled", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
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


def measured(request: tuple[str, str, str]) -> dict[str, Any]:
    """Compile in a process of its own.

    Args:
        request: chip, op, sizes.

    Returns:
        A row; what does not compile has an `error`.
    """
    row = dict(zip(("chip", "op", "sizes"), request, strict=True))
    command = [sys.executable, "-m", "benchmarks.jagged", "--worker", json.dumps(request)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"not compiled in {SECONDS} s"}
    if done.returncode:
        return row | {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return row | json.loads(done.stdout.splitlines()[-1])


def compile_one(chip: str, name: str, sizes: str) -> dict[str, Any]:
    """In the worker: compile one program, and read what the compiler says.

    Args:
        chip: generation.
        name: of the op.
        sizes: of the shapes.

    Returns:
        Compile seconds, and bytes: least, counted, temporary, and over the host's bus by TorchRec (None: it has no such
        op) and here.
    """
    from tests.kernels.tools.jagged_programs import compiled
    from tpurec.kernels.ahead_of_time import target

    device = target(chip)
    started = time.monotonic()
    program, least = compiled(device, name, sizes)
    return {
        "compile_seconds": round(time.monotonic() - started, 2),
        "least_hbm_bytes": least,
        "hbm_bytes": int(program.cost_analysis()["bytes accessed"]),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "host_bytes": 0,
        "torchrec_host_bytes": least if name in THROUGH_HOST else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people.

    Args:
        rows: as `--json` prints them.
    """
    print("chip op                            sizes     compile s  least MB  temp/least  bytes/least  TorchRec host MB")
    for row in rows:
        head = f"{row['chip']:<4} {row['op']:<29} {row['sizes']:<9}"
        if "error" in row:
            print(f"{head}  {row['error'][:90]}")
            continue
        least, host = row["least_hbm_bytes"], row["torchrec_host_bytes"]
        print(
            f"{head} {row['compile_seconds']:>9.1f} {least / 1e6:>9.2f} {row['temp_bytes'] / least:>11.2f} "
            f"{row['hbm_bytes'] / least:>12.2f} {host / 1e6 if host else float('nan'):>17.2f}".replace("nan", "  -")
        )


if __name__ == "__main__":
    main()
