"""A user's own model is found by name."""

import sys

import pytest

from tpurec.errors import ConfigError
from tpurec.models.factory import load_factory


@pytest.fixture
def started_as_a_script(monkeypatch, tmp_path):
    """As the installed command `tpurec` is: the current folder is not among the places of modules."""
    (tmp_path / "factory_of_this_test.py").write_text("def make(): return 7\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    yield
    sys.modules.pop("factory_of_this_test", None)


def test_a_module_in_the_current_folder_is_found(started_as_a_script):
    assert load_factory("factory_of_this_test:make", "model.name")() == 7


def test_a_file_in_the_current_folder_does_not_stand_in_for_another_module(started_as_a_script, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_factory("colorsys:rgb_to_hsv", "model.name")(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize("name", ["factory_of_this_test:nothing", "no_such_module_at_all:make"])
def test_what_is_not_there_is_named_with_its_setting(started_as_a_script, name):
    with pytest.raises(ConfigError, match=r"model\.name: .*(nothing|no_such_module_at_all)"):
        load_factory(name, "model.name")
