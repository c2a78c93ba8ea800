"""Compile what torch_tpu gives to a compiler for a TPU that is not there, with libtpu, and read the result.

libtpu is the library in whose place the emulator's shim stands: it loads in a process of its own.

python -m tests.emulated.chips PROGRAM CHIP LARGE_BYTES
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Name what is there already, or what another instruction makes.
_NO_RESULT = {"parameter", "bitcast", "get-tuple-element", "tuple", "call", "opt-barrier", "while", "conditional"}
# A kernel's own result: whether that is a new array or an argument's is what the alias bytes say.
_OF_KERNELS = {"custom-call", "async-start", "async-update", "async-done"}
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = (\(?[^=]*?) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Report:
    """What libtpu made of a program.

    Args:
        argument_bytes: of all arguments.
        alias_bytes: of arguments whose memory the results take over.
        temp_bytes: temporaries in HBM.
        kernels: calls of Mosaic (Pallas) kernels.
        large: instructions outside of kernels that make an array of `large_bytes` or more: opcode and shape.
    """

    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    kernels: int
    large: list[str]


def compile_for(program: bytes, chip: str, large_bytes: int) -> Report:
    """Compile a program in a process of its own.

    Args:
        program: StableHLO, as `tests.emulated.runtime.capture` gives it.
        chip: the generation.
        large_bytes: from which size on an array is listed in `large`.

    Returns:
        The report.

    Raises:
        RuntimeError: it does not compile, with the end of the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        command = [sys.executable, "-m", "tests.emulated.chips", str(path), chip, str(large_bytes)]
        # The emulator's settings point at its shim.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{chip}: {done.stderr.strip()[-2000:]}")
    return Report(**json.loads(done.stdout.splitlines()[-1]))


def large_results(hlo: str, large_bytes: int) -> list[str]:
    """Find instructions that make large arrays.

    Args:
        hlo: text of an optimized module.
        large_bytes: the limit.

    Returns:
        Opcode and shape of each instruction outside of Mosaic kernels with an array of that size in its result.
    """
    found = []
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match.group(2) in _NO_RESULT | _OF_KERNELS:
            continue
        for dtype, dims in _ARRAY.findall(match.group(1)):
            size = _ITEM_BYTES.get(dtype, 4)
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            if size >= large_bytes:
                found.append(f"{match.group(2)} {dtype}[{dims}]")
    return found


def _compile(path: Path, chip: str, large_bytes: int) -> Report:
    from jax._src import compiler
    from jax._src.interpreters import mlir as jax_mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import stablehlo

    from tpurec.kernels.ahead_of_time import target

    stablehlo.register_stablehlo_passes()
    device = target(chip).mesh.devices.flat[0]
    program = path.read_bytes()
    dump = path.parent / "dump"
    with jax_mlir.make_ir_context() as context:
        if b"StableHLO" in program[:20]:
            module = stablehlo.deserialize_portable_artifact(context, program)
        else:
            module = ir.Module.parse(program)
        # Without a chip, jaxlib writes programs in an old version of StableHLO, which has no composites with regions;
        # libtpu turns them into calls as well.
        passes = "builtin.module(func.func(stablehlo-legalize-composite-to-call),inline,symbol-dce)"
        passmanager.PassManager.parse(passes).run(module.operation)
        # `Executable.hlo_modules` fails for SparseCore programs of libtpu 0.0.52: the compiler's own dump has the text.
        overrides = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        options = compiler.get_compile_options(1, 1, env_options_overrides=overrides)
        memory = device.client.compile(module, _jax.DeviceList((device,)), options).get_compiled_memory_stats()
    (optimized,) = dump.glob("*.after_optimizations.txt")
    hlo = optimized.read_text()
    return Report(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        hlo.count('custom_call_target="tpu_custom_call"'),
        large_results(hlo, large_bytes),
    )


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_compile(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))
