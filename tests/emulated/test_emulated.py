"""Runs the files of `device/` in processes of their own, where `torch.device("tpu")` is the CPU in disguise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = sorted(path.name for path in (Path(__file__).parent / "device").glob("check_*.py"))


@pytest.mark.emulated
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_emulated_tpu(emulator, name):
    """All tests of one file pass there; its output is shown if one does not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.emulated.runtime", "-o", "python_files=check_*.py"]
    # torch_tpu says that its interfaces are experimental; dynamo instantiates what torch deprecates to instantiate.
    command += ["-W", "ignore:<TorchTpu/:UserWarning"]
    command += ["-W", "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"]
    command += ["-p", "no:cacheprovider", f"tests/emulated/device/{name}"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    summary = done.stdout.strip().splitlines()[-1:] or ["no output"]
    print(f"{name}: {summary[0]}; not run on hardware")
    assert done.returncode == 0, f"{name}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
