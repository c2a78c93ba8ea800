"""Kernel tests run jax on the CPU, whatever is plugged in; the compile tier needs libtpu but no TPU."""

import importlib.util

import pytest

from tpurec.kernels.ahead_of_time import prepare

prepare()  # before anything loads libtpu


def pytest_collection_modifyitems(items):
    """Say why compile tests cannot run where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(pytest.mark.skip(reason="libtpu is not installed: pip install 'tpurec[test]'"))
