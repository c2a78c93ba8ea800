"""Set-up of the emulated tier: a PJRT plugin for the CPU, fetched once and checked, and a shim built around it.

The plugin is an unofficial binary from the package index, used by these tests and by nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

WHEEL = "xla-cpu-pjrt==0.0.1"
WHEEL_SHA256 = "55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc"
SHIM_SOURCE = Path(__file__).with_name("shim.c")
PLUGIN = Path("xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so")
_HEADERS = Path("xla_plugins/xla_cpu_pjrt/include")


class Unavailable(Exception):
    """The tier cannot run here; the text says why."""


@dataclass(frozen=True)
class Emulator:
    """The two libraries.

    Args:
        plugin: the PJRT plugin for the CPU.
        shim: what torch_tpu loads in place of libtpu.
    """

    plugin: Path
    shim: Path


def prepare(cache: Path) -> Emulator:
    """Fetch and build what is not there yet.

    Args:
        cache: a folder that lives as long as the environment.

    Returns:
        Paths of the libraries.

    Raises:
        Unavailable: torch_tpu, gcc or C headers are missing, or the wheel cannot be fetched or is not the pinned one.
    """
    if importlib.util.find_spec("torch_tpu") is None:
        raise Unavailable("torch_tpu is not installed (pip install 'tpurec[tpu]')")
    compiler = shutil.which("gcc")
    if compiler is None:
        raise Unavailable("gcc is not installed (apt-get install gcc libc6-dev, or make system-packages)")
    cache.mkdir(parents=True, exist_ok=True)
    plugin = cache / PLUGIN
    if not plugin.exists():
        _fetch(cache)
    source = SHIM_SOURCE.read_bytes()
    shim = cache / f"libshim-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not shim.exists():
        unfinished = shim.with_suffix(".tmp")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wno-cast-function-type"]
        command += ["-I", str(cache / _HEADERS), "-o", str(unfinished), str(SHIM_SOURCE), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            _check_headers(compiler)
            raise RuntimeError(f"gcc cannot build {SHIM_SOURCE.name}:\n{built.stderr}")
        unfinished.replace(shim)
    return Emulator(plugin, shim)


def _check_headers(compiler: str) -> None:
    """A compiler without the C library's headers builds nothing; that is the machine's state, not the shim's."""
    command = [compiler, "-x", "c", "-E", "-"]
    found = subprocess.run(command, input="#include <stdio.h>", capture_output=True, text=True, check=False)
    if found.returncode:
        raise Unavailable("gcc has no C headers (apt-get install libc6-dev, or make system-packages)")


def _fetch(cache: Path) -> None:
    folder = cache / "download"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    fetched = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if fetched.returncode or len(wheels) != 1:
        reason = (fetched.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise Unavailable(f"{WHEEL} cannot be fetched: {reason}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise Unavailable(f"{WHEEL}: sha256 {digest} is not the pinned one")
    unpacked = cache / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(unpacked)
    top = PLUGIN.parts[0]
    shutil.rmtree(cache / top, ignore_errors=True)
    (unpacked / top).replace(cache / top)
    shutil.rmtree(unpacked)
    shutil.rmtree(folder)
