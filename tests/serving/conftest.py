"""One exported bundle, and its application, for the tests of this folder."""

from pathlib import Path

import pytest

from tests.bundle.small import write_small_bundle
from tpurec.bundle import Bundle


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory) -> Path:
    return write_small_bundle(tmp_path_factory.mktemp("serving") / "small")


@pytest.fixture(scope="session")
def loaded(small_bundle) -> Bundle:
    return Bundle.load(small_bundle)
