"""A file is whole or as it was, whatever happens while it is written."""

import os
import stat

import pytest

from tpurec import atomic


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    atomic.write_text(path, "a\nä")
    assert path.read_bytes() == "a\nä".encode()
    atomic.write_bytes(str(path), b"b")
    assert path.read_bytes() == b"b"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_write_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(error), atomic.new_file(path) as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == "old"
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_rename_that_fails_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "out"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        atomic.write_text(folder, "a file cannot take a folder's place")
    assert os.listdir(tmp_path) == ["out"]


def test_contents_are_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("sync"), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("rename"), replace(*names)))
    atomic.write_text(tmp_path / "a", "text")
    assert calls == ["sync", "rename", "sync"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
