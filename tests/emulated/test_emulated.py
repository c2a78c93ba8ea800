"""Runs the files of `device/` in processes of their own, where `torch.device("tpu")` is the CPU in disguise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Path("tests/emulated/device")
# Files that share a process, as its start takes ten seconds of CPU time, and programs that one has compiled serve the
# others. Those that plant faults, change the mode of execution or count programs have one each.
TOGETHER = {
    "jagged": ("check_jagged.py", "check_fbgemm_names.py", "check_torchrec_*.py"),
    "tables": (
        "check_ops.py",
        "check_sequence.py",
        "check_collections.py",
        "check_device_checks.py",
        "check_training.py",
    ),
}
_SHARED = {
    name: sorted(path.name for pattern in patterns for path in (ROOT / DEVICE).glob(pattern))
    for name, patterns in TOGETHER.items()
}
_ALONE = {path.name for path in (ROOT / DEVICE).glob("check_*.py")}.difference(*_SHARED.values())
CHECKS = _SHARED | {name: [name] for name in sorted(_ALONE)}


@pytest.mark.emulated
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_emulated_tpu(emulator, name):
    """All tests of a process pass there; its output is shown if one does not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.emulated.runtime", "-o", "python_files=check_*.py"]
    # torch_tpu says that its interfaces are experimental; dynamo instantiates what torch deprecates to instantiate.
    command += ["-W", "ignore:<TorchTpu/:UserWarning"]
    command += ["-W", "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"]
    command += ["-p", "no:cacheprovider", *(str(DEVICE / file) for file in CHECKS[name])]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False)
    summary = done.stdout.strip().splitlines()[-1:] or ["no output"]
    print(f"{name}: {summary[0]}; not run on hardware")
    assert done.returncode == 0, f"{name}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
