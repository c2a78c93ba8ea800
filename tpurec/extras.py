"""Optional parts of the distribution: import them, or say how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from tpurec.errors import MissingExtra

# Top-level module -> the extra in pyproject.toml that brings it.
EXTRA_OF_MODULE = {
    "ray": "ray",
    "torch_tpu": "tpu",
    "libtpu": "tpu",
    "matplotlib": "dev",
}


def require(module: str, purpose: str) -> ModuleType:
    """Import a module of an extra.

    Args:
        module: dotted module name, such as `ray.data`.
        purpose: what needs it, for the error text, such as `--engine ray`.

    Returns:
        The imported module.

    Raises:
        MissingExtra: the module's distribution is not installed; the text has the install line.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Something else is missing: the extra is there but broken, and hiding that would send people the wrong way.
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        extra = EXTRA_OF_MODULE[top]
        raise MissingExtra(
            f"{purpose} needs {top!r}, which is not installed.", f"Install it with: pip install 'tpurec[{extra}]'"
        ) from error
