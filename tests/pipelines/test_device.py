"""Threads of the step."""

import os

from pipelines.device import DeviceConfig


def test_0_threads_leaves_cores_to_the_readers_and_one_to_the_step(monkeypatch):
    for cores, readers, expected in [(2, 1, 1), (8, 1, 7), (8, 3, 5), (1, 1, 1), (2, 4, 1)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert DeviceConfig().num_threads(readers) == expected
    assert DeviceConfig(threads=3).num_threads(1) == 3
