"""`tpurec doctor` reports what is there, and survives what is missing or broken."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.commands import doctor
from pipelines.commands.doctor import Finding, Package
from pipelines.device import EXECUTIONS
from tests.emulated import setup
from tests.emulated.conftest import CACHE
from tests.tiers import BUDGETS


def _all_available():
    return {name: Finding(True, "1", "") for name in (*doctor.PACKAGES, *doctor.PROGRAMS, "emulator")}


@pytest.mark.multiprocess
def test_one_entry_a_component_with_available_version_and_reason():
    child = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(child.stdout)
    wanted = {"python", "torch", "torchrec", "fbgemm", "jax", "ray", "torch_tpu", "libtpu", "gcc", "chromium"}
    assert wanted <= set(found)
    modes = {f"execution.{name}" for names in EXECUTIONS.values() for name in names}
    assert {"device.cpu", "device.tpu", "emulator", "tests.default", *modes} <= set(found)
    # What the tier's own set-up says: it needs no plugin that is installed, it fetches one.
    possible = all(found[name]["available"] for name in doctor.TIERS["emulated"])
    assert found["tests.emulated"]["available"] == possible
    for name, entry in found.items():
        assert set(entry) == {"available", "version", "reason", "remedy"}, name
        assert entry["reason"], name
    assert found["torch"]["available"] and found["torch"]["version"].startswith("2.13.0")


def test_a_package_that_is_not_installed_is_named_with_the_install_line():
    finding = doctor.probe_package(Package("no-such-distribution", "pass", "pip install it"))
    assert not finding.available and finding.version is None
    assert "no-such-distribution" in finding.reason and finding.remedy == "pip install it"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
        ("raise ImportError('libfoo.so: undefined symbol')", "libfoo.so: undefined symbol"),
    ],
)
def test_an_import_that_aborts_hangs_or_fails_is_a_reason_and_not_a_crash(code, reason):
    started = time.monotonic()
    finding = doctor.probe_package(Package("pytest", code, seconds=2))
    assert not finding.available and finding.version
    assert reason in finding.reason
    assert time.monotonic() - started < 30


def test_a_program_that_is_missing_or_broken_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "on the PATH" in doctor.probe_program(("gcc",), "install gcc").reason
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    finding = doctor.probe_program(("gcc",), "install gcc")
    assert not finding.available and "exit code 3" in finding.reason
    broken.write_text("#!/bin/sh\necho 'gcc (Debian 12.2.0-14) 12.2.0'\n")
    assert doctor.probe_program(("gcc",), "install gcc") == Finding(True, "12.2.0", str(broken))


def test_without_a_chip_no_tensor_is_put_on_a_tpu(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("creating a tpu tensor without a chip aborts the process")

    monkeypatch.setattr(doctor, "run_python", refuse)
    found = doctor.probe_devices(_all_available(), pci=tmp_path)
    assert not found["device.tpu"].available
    modes = doctor.execution_modes({**_all_available(), **found})
    assert modes["execution.eager"].available
    for name in EXECUTIONS["tpu"]:
        mode = modes[f"execution.{name}"]
        assert not mode.available and "no TPU chip is attached" in mode.reason and "tests.emulated" in mode.remedy


def test_with_a_chip_every_mode_is_available_on_it():
    found = _all_available() | {"device.tpu": Finding(True, "4 x v6e", "a tensor was made on it")}
    modes = doctor.execution_modes(found)
    assert all(modes[f"execution.{name}"].available for names in EXECUTIONS.values() for name in names)
    assert modes["execution.compile"].reason == "the whole step is one program a shape, on 4 x v6e"


def test_the_emulator_is_looked_for_where_the_tests_put_it(tmp_path):
    assert doctor.EMULATOR.relative_to(CACHE.name) == setup.PLUGIN and CACHE.parent == Path(sys.prefix)
    assert not doctor.probe_emulator(tmp_path).available
    (tmp_path / doctor.EMULATOR).parent.mkdir(parents=True)
    (tmp_path / doctor.EMULATOR).write_bytes(b"")
    assert doctor.probe_emulator(tmp_path).available
    found = _all_available() | {"emulator": Finding(False, None, "not fetched yet")}
    tier = doctor.runnable_tiers(found)["tests.emulated"]
    assert tier.available and "fetches the emulator first" in tier.reason


def test_a_missing_package_takes_away_the_tiers_and_modes_that_need_it(tmp_path):
    found = _all_available()
    found["fbgemm"] = Finding(False, None, "not installed", "install fbgemm")
    found |= doctor.probe_devices(found, pci=tmp_path)
    assert not doctor.execution_modes(found)["execution.eager"].available
    tiers = doctor.runnable_tiers(found)
    assert not tiers["tests.default"].available and tiers["tests.compile"].available
    assert (
        tiers["tests.default"].reason == "fbgemm is not available" and tiers["tests.default"].remedy == "install fbgemm"
    )


def test_every_test_tier_has_an_entry():
    assert set(doctor.TIERS) == set(BUDGETS)
    assert {need for needs in doctor.TIERS.values() for need in needs} <= set(doctor.PACKAGES) | set(doctor.PROGRAMS)


def test_a_folder_named_like_a_package_in_the_current_folder_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)
    assert doctor.run_python("import pytest", 30) == ""
    assert doctor.run_python("import torch", 60) == ""


def test_that_programs_can_be_compiled_is_said_only_where_libtpu_is(tmp_path):
    found = _all_available()
    assert "can still be compiled" in doctor.probe_devices(found, pci=tmp_path)["device.tpu"].remedy
    found["libtpu"] = Finding(False, None, "not installed")
    assert doctor.probe_devices(found, pci=tmp_path)["device.tpu"].remedy == ""
