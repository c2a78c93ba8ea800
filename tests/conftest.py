"""Fixtures that every tier shares."""

import os
from pathlib import Path

import pytest

# As `tpurec.cli` does: without it `import torch` loads torch_tpu, whose warning is an error here.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with small real data sets beside the repository; tests that use it skip without it."""
    if not _SHARED_DATA.is_dir():
        pytest.skip("the real data sets are not beside this repository (../shared/data)")
    return _SHARED_DATA
