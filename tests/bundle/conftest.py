"""One exported bundle for all tests of this folder; copy it before changing it."""

from pathlib import Path

import pytest

from tests.bundle.small import write_small_bundle


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory) -> Path:
    return write_small_bundle(tmp_path_factory.mktemp("bundle") / "small")
