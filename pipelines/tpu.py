"""Find and start the TPU of this host. Looking for one touches no device, and loads neither torch nor libtpu."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.device import DeviceConfig
from tpurec.errors import ConfigError
from tpurec.kernels.limits import problem_of_rows
from tpurec.models.tables import TableSpec

if TYPE_CHECKING:
    import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")  # where the kernel lists them
# PCI ids of TPU chips (source: jax 0.10.2, jax/_src/hardware_utils.py).
_GOOGLE_PCI_VENDOR = "0x1ae0"
_CHIP_OF_PCI_DEVICE = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}
# The recipe's words for torch_tpu's eager modes. Under `compile` the little that is not compiled runs as by default.
EAGER_MODES = {
    "compile": "DEFER_NEVER",
    "strict": "DEFER_NEVER",
    "debug": "DEFER_NEVER_AND_LAUNCH_BLOCKING",
    "defer_and_fuse": "DEFER_AND_FUSE",
}


def attached_chips(pci: Path = PCI_DEVICES) -> list[str]:
    """List the TPU chips on this host's PCI bus.

    Args:
        pci: folder in which the kernel lists PCI devices.

    Returns:
        One generation name a chip, such as `v6e`.
    """
    chips = []
    for device in sorted(pci.glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _GOOGLE_PCI_VENDOR and kind in _CHIP_OF_PCI_DEVICE:
            chips.append(_CHIP_OF_PCI_DEVICE[kind])
    return chips


def require_device(config: DeviceConfig) -> None:
    """Refuse a device that this host does not have, before any data is read.

    Without a chip libtpu must not even be asked: it looks for one through the cloud's metadata service, for minutes.

    Args:
        config: the recipe's section [device].

    Raises:
        ConfigError: there is no TPU.
        MissingExtra: there is one, but not the software for it.
    """
    if config.kind != "tpu":
        return
    binding = sys.modules.get("tpurec.ops._tpu")  # importing it takes seconds; unless it is there, nothing is bound
    if binding is None or binding.bound() is None:
        _chip()


def check_tables(specs: Iterable[TableSpec]) -> None:
    """Refuse tables that the kernels cannot take as they are, before there is a RUN; of shards the planner decides.

    Args:
        specs: the tables of a recipe that trains in one process.

    Raises:
        ConfigError: naming the first such table, and what is wrong with its dim or dtype.
    """
    for spec in specs:
        refused = problem_of_rows(spec.embedding_dim, spec.dtype)
        if refused is not None:
            raise ConfigError(f"device.kind = 'tpu': table {spec.name!r}: {refused[0]}", refused[1])


def start_tpu(config: DeviceConfig) -> torch.device:
    """Bind the ops to the TPU and set the mode in which it executes.

    Args:
        config: with `kind = "tpu"`.

    Returns:
        The device.

    Raises:
        ConfigError: there is no TPU.
        MissingExtra: torch_tpu is not installed.
    """
    import torch

    from tpurec.ops import _tpu

    if _tpu.bound() is None:
        _tpu.bind(_tpu.Config(chip=_chip()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="<TorchTpu/")  # that eager modes are experimental
        # For all threads: backward passes run in threads of their own.
        torch.tpu.eager_mode = torch.tpu.EagerMode[EAGER_MODES[str(config.execution)]]
    return torch.device("tpu")


def _chip() -> str:
    from tpurec.extras import require

    chips = attached_chips()
    if not chips:
        raise ConfigError(
            "device.kind = 'tpu': no TPU chip is attached to this host.",
            "Set device.kind=cpu, or train on a TPU host; `tpurec doctor` says what is here.",
        )
    require("torch_tpu", "device.kind = 'tpu'")
    return chips[0]
