"""`import tpurec` is light, and works without the optional parts."""

import subprocess
import sys

import pytest

from tpurec import extras
from tpurec.errors import MissingExtra

HEAVY = ("torch", "torchrec", "jax", "jaxlib", "ray", "fbgemm_gpu", "torch_tpu", "libtpu", "fastapi", "plotly")
# Modules of the lower layers that planner, readers and request path import: none of them may need the extras.
LIGHT_MODULES = (
    "tpurec",
    "tpurec.bundle",
    "tpurec.cli",
    "tpurec.config",
    "tpurec.extras",
    "tpurec.features",
    "tpurec.models",
    "tpurec.reporting",
    "tpurec.topology",
)


def _python(code):
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_neither_torch_nor_torchrec_nor_jax_nor_ray(module):
    """Case 37."""
    loaded = _python(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert set(HEAVY).isdisjoint(loaded)


@pytest.mark.parametrize("module", [*LIGHT_MODULES, "pipelines.scoring", "serving.app"])
def test_import_works_with_the_optional_parts_unimportable(module):
    """Case 37: not installed, and installed but broken, look the same to an import hook that refuses."""
    code = (
        "import sys\n"
        "blocked = ('torch_tpu', 'jax', 'ray', 'libtpu')\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        f"import {module}\n"
        "print(all(name not in sys.modules for name in blocked))\n"
    )
    assert _python(code).strip() == "True"


@pytest.mark.parametrize(("module", "extra"), [("ray.data", "ray"), ("torch_tpu", "tpu")])
def test_a_missing_extra_is_named_with_the_install_line(module, extra, monkeypatch):
    """Case 37."""
    top = module.partition(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(top + ".")]:
        monkeypatch.delitem(sys.modules, name)

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == top:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    with pytest.raises(MissingExtra) as caught:
        extras.require(module, "--engine ray")
    assert "--engine ray needs" in caught.value.problem and repr(top) in caught.value.problem
    assert f"pip install 'tpurec[{extra}]'" in caught.value.remedy


def test_an_extra_that_is_installed_but_broken_keeps_its_own_error(tmp_path, monkeypatch):
    package = tmp_path / "libtpu"
    package.mkdir()
    (package / "__init__.py").write_text("import a_module_that_is_missing_inside")
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing_inside"):
        extras.require("libtpu", "the TPU compiler")
