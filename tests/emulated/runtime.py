"""Makes `torch.device("tpu")` exist in this process, on the CPU. Import it before anything imports torch_tpu.

As a pytest plugin (`-p tests.emulated.runtime`) it is imported before any test file.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.emulated.setup import prepare

CACHE = Path(sys.prefix) / "emulated-tpu"
programs = {"compiled": 0}
_captured: list[bytes] | None = None
_library: ctypes.CDLL | None = None
_keep: list[object] = []  # what C code holds pointers to


def start() -> None:
    """Load the shim, register the device, and bind the ops with the plain-JAX implementations.

    Raises:
        Unavailable: as of `prepare`.
        RuntimeError: the plugin cannot be loaded.
    """
    emulator = prepare(CACHE)
    # What torch_tpu and jax read when they are imported.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["TPU_LIBRARY_PATH"] = str(emulator.shim)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    _configure(emulator.shim, emulator.plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tcmalloc, at import
        import torch_tpu  # noqa: F401
        from torch_tpu import _loader

        os.environ["TPU_LIBRARY_PATH"] = str(emulator.shim)  # importing libtpu may have set it
        _loader._init_device("tpu")

    from tpurec.ops import _tpu

    _tpu.bind(_tpu.Config(implementation="plain"))


class Kind(enum.IntEnum):
    """What the shim records, by its numbers."""

    TO_DEVICE = 0
    TO_HOST = 1
    ON_DEVICE = 2
    EXECUTION = 3
    NEW_RESULT = 4
    RESULT_IN_PLACE = 5


class _Event(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int64), ("bytes", ctypes.c_int64))


def record(large_bytes: int = 0) -> None:
    """Start a new record of what the device is asked to do.

    Args:
        large_bytes: results of a program that are as large as this are recorded; 0 for none.
    """
    _library.emulator_record(large_bytes)


def recorded() -> list[tuple[Kind, int]]:
    """The record so far.

    Returns:
        Kind and bytes of every transfer between host and device (`TO_DEVICE`, `TO_HOST`), copy of a buffer
        (`ON_DEVICE`), execution of a program (0 bytes) and large result of one: in memory of its own (`NEW_RESULT`), or
        in that of an argument (`RESULT_IN_PLACE`).
    """
    count = ctypes.c_int64()
    events = _library.emulator_events(ctypes.byref(count))
    return [(Kind(events[at].kind), events[at].bytes) for at in range(count.value)]


@contextmanager
def capture() -> Iterator[list[bytes]]:
    """Collect the programs that torch_tpu compiles meanwhile, as it gives them to the compiler of a TPU.

    Yields:
        StableHLO, as portable artifacts or text; programs with Pallas kernels are among them, although what follows,
        the compilation for the CPU, refuses those.
    """
    global _captured
    _captured = []
    try:
        yield _captured
    finally:
        _captured = None


def _configure(shim: Path, plugin: Path) -> None:
    from jax._src.interpreters import mlir as jax_mlir
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import stablehlo

    stablehlo.register_stablehlo_passes()
    claimed = [int(part) for part in stablehlo.get_current_version().split(".")]
    real = (ctypes.c_int64 * 3)()

    def rewrite(code: int, size: int, new_size: ctypes._Pointer) -> int | None:
        # The CPU plugin is older than torch_tpu: composites become calls, and the program is written in its version.
        try:
            artifact = ctypes.string_at(code, size)
            if _captured is not None:
                _captured.append(artifact)
            with jax_mlir.make_ir_context() as context:
                if b"StableHLO" in artifact[:20]:
                    module = stablehlo.deserialize_portable_artifact(context, artifact)
                else:
                    module = ir.Module.parse(artifact)
                pipeline = "builtin.module(func.func(stablehlo-legalize-composite-to-call),inline,symbol-dce)"
                passmanager.PassManager.parse(pipeline).run(module.operation)
                result = stablehlo.serialize_portable_artifact(module, ".".join(str(part) for part in real))
            buffer = ctypes.create_string_buffer(result, len(result))
            _keep[1:] = [buffer]
            new_size[0] = len(result)
            programs["compiled"] += 1
            return ctypes.addressof(buffer)
        except Exception:  # none can pass through the shim; without a program it fails the compilation, as it should
            traceback.print_exc()
            return None

    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, size_pointer)(rewrite)
    _keep.append(callback)
    global _library
    _library = ctypes.CDLL(str(shim))
    _library.emulator_configure.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    _library.emulator_record.argtypes = [ctypes.c_size_t]
    _library.emulator_events.restype = ctypes.POINTER(_Event)
    status = _library.emulator_configure(
        str(plugin).encode(), ctypes.cast(callback, ctypes.c_void_p), (ctypes.c_int64 * 3)(*claimed), real
    )
    if status:
        raise RuntimeError(f"{plugin} cannot be loaded")


start()
