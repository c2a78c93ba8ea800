"""Count instruction bundles in what libtpu compiles for the SparseCore.

A bundle is what a vector subcore issues in one cycle, so bundles of the innermost loop are cycles of work per trip, as
long as nothing waits. Dumps are switched on when libtpu loads: each count compiles in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OPERATIONS = {
    "load": r"\bvld\b(?!\.)",
    "indexed_load": r"\bvld\.(?:idx|msk)",
    "store": r"\bvst\b(?!\.)",
    "add_store": r"\bvst\.(?:add|idx\.add|idx\.msk\.add)",
    "stream": r"\bstream\.",
    "dma": r"\bdma\.",
    "wait": r"\bswait\b",
}


@dataclass
class Loop:
    """One loop of a program.

    Args:
        label: its label in the dump.
        bundles: bundles of one trip, delay slots included.
        innermost: no other loop lies inside of it.
        operations: how often each kind of instruction occurs in it.
    """

    label: str
    bundles: int
    innermost: bool
    operations: Counter = field(default_factory=Counter)


def count(builder: str, chip: str, **arguments: Any) -> dict[str, list[Loop]]:
    """Compile a program in a process of its own and count its SparseCore bundles.

    Args:
        builder: `module:function`; called with a `tpurec.kernels.ahead_of_time.Target` and `arguments`, it returns the
            function, its abstract arguments and the donated positions.
        chip: the generation.
        arguments: plain values for the builder.

    Returns:
        The loops of each vector-subcore program, by the name of the dump file.

    Raises:
        RuntimeError: the program does not compile, with the end of the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, LIBTPU_INIT_ARGS=f"--xla_sc_dump_bundles_to={folder}", JAX_PLATFORMS="cpu")
        request = json.dumps({"builder": builder, "chip": chip, "arguments": arguments})
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernels.tools.bundles", request],
            env=environment,
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{builder} for {chip}: {done.stderr.strip()[-2000:]}")
        return {path.name: loops_of(path.read_text(errors="replace")) for path in sorted(Path(folder).iterdir())}


def loops_of(dump: str) -> list[Loop]:
    """Parse one dump.

    Args:
        dump: the text of a `--xla_sc_dump_bundles_to` file.

    Returns:
        The loops of the vector-subcore program (`tec`), in order of their ends.
    """
    bundles, labels = _tec_program(dump)
    spans = []
    for index, text in enumerate(bundles):
        for label in re.findall(r"sbr\.rel (?:@!?p\d+ )?(\.LBB\d+_\d+)", text):
            if label in labels and labels[label] <= index:
                delay = re.search(re.escape(label) + r"-\.Ltmp\d+, \$(\d+)", text)
                end = min(index + (int(delay.group(1)) if delay else 0), len(bundles) - 1)
                spans.append((labels[label], end, label))
    loops = []
    for start, end, label in spans:
        body = bundles[start : end + 1]
        inner = not any((s, e) != (start, end) and start <= s and e <= end for s, e, _ in spans)
        stalls = sum(int(slots, 16) for text in body for slots in re.findall(r"sdelay \$0x([0-9a-f]+)", text))
        operations = Counter()
        for name, pattern in _OPERATIONS.items():
            operations[name] = sum(len(re.findall(pattern, text)) for text in body)
        loops.append(Loop(label, len(body) + stalls, inner, operations))
    return loops


def _tec_program(dump: str) -> tuple[list[str], dict[str, int]]:
    bundles: list[str] = []
    labels: dict[str, int] = {}
    inside = False
    for line in dump.splitlines():
        if line in ("scs", "tec", "tac"):
            inside = line == "tec"
        elif inside and (label := re.match(r"^(\.?[\w.$]+):\s*$", line)):
            labels[label.group(1)] = len(bundles)
        elif inside and (bundle := re.match(r"^0x[0-9a-f]+: (.*)$", line)):
            bundles.append(bundle.group(1))
        elif inside and bundles:
            bundles[-1] += " " + line.strip()
    return bundles, labels


def _compile(request: dict[str, Any]) -> None:
    from tpurec.kernels.ahead_of_time import target

    module, _, name = request["builder"].partition(":")
    device = target(request["chip"])
    function, arguments, donate = getattr(importlib.import_module(module), name)(device, **request["arguments"])
    device.compile(function, *arguments, donate=donate)


if __name__ == "__main__":
    _compile(json.loads(sys.argv[1]))
