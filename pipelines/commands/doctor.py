"""`tpurec doctor`: what is installed, which device there is, and what would run here, or why not.

Every package is imported in a child process with a time limit: a broken installation may hang or abort at import, and
doctor is what one runs then. No tensor is put on a TPU unless one is attached: without a chip that aborts the process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipelines.device import EXECUTIONS
from pipelines.tpu import PCI_DEVICES, attached_chips
from tpurec.reporting import JsonOption, Reporter

IMPORT_SECONDS = 90.0
PROGRAM_SECONDS = 20.0
TPU_SECONDS = 180.0


@dataclass(frozen=True)
class Finding:
    """What doctor found out about one component.

    Args:
        available: it works here.
        version: its version, or what stands for one; None if not known.
        reason: what was seen, or why it is not available.
        remedy: what to do about it; empty if there is nothing to do.
    """

    available: bool
    version: str | None
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Package:
    """A package to probe.

    Args:
        distribution: its name for pip.
        code: what a child process runs to prove that it works.
        remedy: what to do if it is missing.
        seconds: time limit of that child process.
    """

    distribution: str
    code: str
    remedy: str = "Reinstall tpurec: this is one of its own dependencies."
    seconds: float = IMPORT_SECONDS


_TPU_REMEDY = "Needed for TPU only: pip install 'tpurec[tpu]'"
_TEST_REMEDY = "Needed for tests only: pip install 'tpurec[test]'"
PACKAGES = {
    "torch": Package("torch", "import torch; assert float(torch.ones(2).sum()) == 2.0"),
    "torchrec": Package("torchrec", "import torchrec; torchrec.EmbeddingBagCollection"),
    "fbgemm": Package(
        "fbgemm-gpu-cpu",
        "import torch, fbgemm_gpu; "
        "assert torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int32)).tolist() == [0, 1, 2]",
    ),
    "jax": Package("jax", "import jax; from jax.experimental import pallas"),
    "ray": Package("ray", "import ray, ray.data, ray.train", "Needed for --engine ray only: pip install 'tpurec[ray]'"),
    "torch_tpu": Package("torch-tpu", "import torch, torch_tpu", _TPU_REMEDY),
    "libtpu": Package("libtpu", "import libtpu, ctypes; ctypes.CDLL(libtpu.get_library_path())", _TPU_REMEDY),
    "fastapi": Package("fastapi", "import fastapi, uvicorn, prometheus_client"),
    "pytest": Package("pytest", "import pytest, pytest_timeout, hypothesis", _TEST_REMEDY),
    "selenium": Package("selenium", "from selenium import webdriver", _TEST_REMEDY),
}
PROGRAMS = {
    "gcc": (("gcc",), "Needed to compile the test shim: apt-get install gcc"),
    "chromium": (
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell"),
        "Needed for browser tests only: apt-get install chromium",
    ),
}
# Test tier -> the components it needs (tests/tiers.py runs them).
TIERS = {
    "default": ("torch", "torchrec", "fbgemm", "jax", "fastapi", "pytest"),
    "compile": ("jax", "libtpu", "pytest"),
    "interpret": ("jax", "pytest"),
    "multiprocess": ("torch", "torchrec", "fbgemm", "pytest"),
    "ray": ("torch", "torchrec", "fbgemm", "ray", "pytest"),
    "browser": ("selenium", "chromium", "pytest"),
    "emulated": ("torch", "torchrec", "fbgemm", "torch_tpu", "libtpu", "jax", "gcc", "pytest"),
    "slow": ("torch", "torchrec", "fbgemm", "pytest"),
}
MODES = {
    "compile": "the whole step is one program a shape",
    "strict": "each operation is a program",
    "debug": "as strict, and the host waits for each",
    "defer_and_fuse": "operations are collected and fused",
}
# Where the set-up of the tier `emulated` keeps what it fetches (tests/emulated/setup.py), below the environment.
EMULATOR = Path("emulated-tpu/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so")


def doctor(as_json: JsonOption = False) -> None:
    """Show what is installed, which device there is, and what would run here, or why not."""
    reporter = Reporter(as_json)
    probes: dict[str, Callable[[], Finding]] = {
        **{name: lambda package=package: probe_package(package) for name, package in PACKAGES.items()},
        **{name: lambda program=program: probe_program(*program) for name, program in PROGRAMS.items()},
    }
    workers = max(1, min(4, os.cpu_count() or 1))
    with (
        reporter.progress("probe", total=len(probes), unit="components") as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        futures = {name: pool.submit(probe) for name, probe in probes.items()}
        found = {"python": _python()}
        for name, future in futures.items():
            found[name] = future.result()
            advance(1)
    found["emulator"] = probe_emulator()
    found |= probe_devices(found)
    found |= execution_modes(found)
    found |= runnable_tiers(found)
    reporter.result({name: asdict(finding) for name, finding in found.items()}, lambda console: _draw(console, found))


def _python() -> Finding:
    return Finding(True, platform.python_version(), f"{sys.executable} on {platform.platform()}")


def probe_package(package: Package) -> Finding:
    """Find out whether a package is installed and works.

    Args:
        package: what to import, and how.

    Returns:
        The finding; a crash or a hang of the import is a reason, not a failure of doctor.
    """
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, None, f"the package {package.distribution!r} is not installed", package.remedy)
    problem = run_python(package.code, package.seconds)
    if problem:
        return Finding(
            False, version, f"installed, but it does not work: {problem}", f"Reinstall {package.distribution}."
        )
    return Finding(True, version, "imported in a process of its own")


def run_python(code: str, seconds: float) -> str:
    """Run code in a child Python.

    Args:
        code: the program.
        seconds: time limit.

    Returns:
        Empty if it succeeded; else one line that says what went wrong.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "JAX_PLATFORMS": "cpu"}
    try:
        # -P: a folder named like a package, in the current folder, must not stand in for it.
        child = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return str(error)
    if child.returncode < 0:
        return f"the process died of {signal.Signals(-child.returncode).name}"
    lines = child.stderr.strip().splitlines()
    return "" if child.returncode == 0 else (lines[-1] if lines else f"exit code {child.returncode}")


def probe_program(names: tuple[str, ...], remedy: str) -> Finding:
    """Find a program on the PATH.

    Args:
        names: the names it may have, the best first.
        remedy: what to do if there is none.

    Returns:
        The finding, with the program's own version line.
    """
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return Finding(False, None, f"none of {', '.join(names)} is on the PATH", remedy)
    try:
        child = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=PROGRAM_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, None, f"{path} --version: {error}", remedy)
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        return Finding(False, None, f"{path} --version: exit code {child.returncode}", remedy)
    version = re.search(r"\d+(\.\d+)+", lines[0])
    return Finding(True, version[0] if version else lines[0], path)


def probe_emulator(prefix: Path = Path(sys.prefix)) -> Finding:
    """Find out whether the tests can put a `tpu` device on this CPU at once.

    Args:
        prefix: of the Python environment.

    Returns:
        The finding.
    """
    plugin = prefix / EMULATOR
    if plugin.exists():
        return Finding(True, None, f"the tests put a tpu device on this CPU: {plugin}")
    return Finding(
        False,
        None,
        "not fetched yet",
        "Needed for tests only: `python -m tests.tiers emulated` fetches it from the package index.",
    )


def probe_devices(found: Mapping[str, Finding], pci: Path = PCI_DEVICES) -> dict[str, Finding]:
    """Find out which devices a run could use.

    Args:
        found: findings about torch, torch_tpu and libtpu.
        pci: folder in which the kernel lists PCI devices.

    Returns:
        Entries `device.cpu` and `device.tpu`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = Finding(found["torch"].available, f"{cores} cores", platform.processor() or platform.machine())
    return {"device.cpu": cpu, "device.tpu": _probe_tpu(found, attached_chips(pci))}


def _probe_tpu(found: Mapping[str, Finding], chips: list[str]) -> Finding:
    if not chips:
        compiles = "TPU programs can still be compiled here." if found["libtpu"].available else ""
        return Finding(False, None, "no TPU chip is attached to this host", compiles)
    version = f"{len(chips)} x {chips[0]}"
    missing = [name for name in ("torch", "torch_tpu", "libtpu") if not found[name].available]
    if missing:
        return Finding(False, version, f"chips are attached, but {_list(missing)} not available", _TPU_REMEDY)
    problem = run_python("import torch, torch_tpu; assert torch.ones(2, device='tpu').cpu().sum() == 2", TPU_SECONDS)
    if problem:
        remedy = "Is another process holding the chips?"
        return Finding(False, version, f"chips are attached, but a tensor could not be made: {problem}", remedy)
    return Finding(True, version, "a tensor was made on it")


def execution_modes(found: Mapping[str, Finding]) -> dict[str, Finding]:
    """Say which ways to execute a training step there are here.

    Args:
        found: findings so far, devices included.

    Returns:
        One entry `execution.NAME` for each value of a recipe's device.execution.
    """
    missing = [name for name in ("torch", "torchrec", "fbgemm") if not found[name].available]
    reason = f"{_list(missing)} not available" if missing else "on the CPU: tables in FBGEMM's fused kernels"
    modes = {name: Finding(not missing, None, reason, "See above." if missing else "") for name in EXECUTIONS["cpu"]}
    tpu = found["device.tpu"]
    for name in EXECUTIONS["tpu"]:
        reason = f"{MODES[name]}, on {tpu.version}" if tpu.available else f"{MODES[name]}; {tpu.reason}"
        remedy = "" if tpu.available else "The tests run it on this CPU: see tests.emulated."
        modes[name] = Finding(tpu.available, None, reason, remedy)
    return {f"execution.{name}": finding for name, finding in modes.items()}


def runnable_tiers(found: Mapping[str, Finding]) -> dict[str, Finding]:
    """Say which test tiers can run here.

    Args:
        found: findings so far.

    Returns:
        One entry `tests.NAME` for each tier of tests/tiers.py.
    """
    tiers = {}
    for tier, needs in TIERS.items():
        missing = [name for name in needs if not found[name].available]
        reason = f"{_list(missing)} not available" if missing else f"needs {', '.join(needs)}"
        remedy = " ".join(dict.fromkeys(found[name].remedy for name in missing))
        if tier == "emulated" and not missing and not found["emulator"].available:
            reason += "; fetches the emulator first, from the package index"
        tiers[f"tests.{tier}"] = Finding(not missing, None, reason, remedy)
    return tiers


def _list(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _draw(console: Console, found: Mapping[str, Finding]) -> None:
    for name, finding in found.items():
        line = Text(f"{name:<26}")
        line.append("yes  " if finding.available else "no   ", style="green" if finding.available else "red")
        remedy = f"  {finding.remedy}" if finding.remedy and not finding.available else ""
        line.append(f"{finding.version or '-':<12} {finding.reason}{'.' if remedy else ''}{remedy}")
        console.print(line, soft_wrap=True)
