"""The user's own code, named `module:factory` in a recipe or on the command line."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tpurec.errors import ConfigError


def load_factory(name: str, where: str) -> Any:
    """Import what `module:factory` names; the current folder counts, whichever way tpurec was started.

    Args:
        name: module and attribute, such as `shop.models:two_tower`.
        where: how an error names the setting, such as `model.name = 'shop.models:two_tower'`.

    Returns:
        The attribute.

    Raises:
        ConfigError: the module or the attribute is not there.
    """
    module_name, _, factory_name = name.partition(":")
    if "" not in sys.path:
        # As `python -m` does for the current folder, but last: a file there must not stand in for a package.
        sys.path.append("")
    try:
        return getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {error}.", "Write module:factory; the module must be installed or in the current folder."
        ) from error
