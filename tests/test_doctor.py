"""`tpurec doctor` reports what is there, and survives what is missing or broken."""

import json
import os
import stat
import subprocess
import sys
import time

import pytest

from pipelines.commands import doctor
from pipelines.commands.doctor import Finding, Package
from tests.tiers import BUDGETS


def _all_available():
    return {name: Finding(True, "1", "") for name in (*doctor.PACKAGES, *doctor.PROGRAMS)}


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
    assert {"device.cpu", "device.tpu", "execution.cpu", "execution.compile", "tests.default"} <= set(found)
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


def test_chips_are_counted_from_the_pci_bus(tmp_path):
    for slot, vendor, device in (
        ("00:01", "0x1ae0", "0x006f"),
        ("00:02", "0x1ae0", "0x006f"),
        ("00:03", "0x8086", "0x1"),
    ):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(vendor + "\n")
        (tmp_path / slot / "device").write_text(device + "\n")
    (tmp_path / "00:04").mkdir()  # a device whose files cannot be read
    assert doctor.attached_chips(tmp_path) == ["v6e", "v6e"]
    assert doctor.attached_chips(tmp_path / "absent") == []


def test_without_a_chip_no_tensor_is_put_on_a_tpu(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("creating a tpu tensor without a chip aborts the process")

    monkeypatch.setattr(doctor, "run_python", refuse)
    found = doctor.probe_devices(_all_available(), pci=tmp_path)
    assert not found["device.tpu"].available
    modes = doctor.execution_modes({**_all_available(), **found})
    assert modes["execution.cpu"].available and not modes["execution.compile"].available


def test_a_missing_package_takes_away_the_tiers_and_modes_that_need_it(tmp_path):
    found = _all_available()
    found["fbgemm"] = Finding(False, None, "not installed", "install fbgemm")
    found |= doctor.probe_devices(found, pci=tmp_path)
    assert not doctor.execution_modes(found)["execution.cpu"].available
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
