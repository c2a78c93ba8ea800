"""The emulated TPU, or the reason why it cannot be had here."""

import sys
from pathlib import Path

import pytest

from tests.emulated.setup import Unavailable, prepare

CACHE = Path(sys.prefix) / "emulated-tpu"


@pytest.fixture(scope="session")
def emulator():
    """The two libraries, fetched and built; skips where that is not possible."""
    try:
        return prepare(CACHE)
    except Unavailable as reason:
        pytest.skip(f"emulated TPU: {reason}")
