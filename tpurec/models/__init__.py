"""A recipe's [model] and [tables] to a TorchRec module. Importing this package loads neither torch nor torchrec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpurec.models.config import ModelConfig, TableOverride, TablesConfig
from tpurec.models.tables import TableSpec, table_specs

if TYPE_CHECKING:
    from tpurec.models.build import build_model, table_optimizer

__all__ = [
    "ModelConfig",
    "TableOverride",
    "TableSpec",
    "TablesConfig",
    "build_model",
    "table_optimizer",
    "table_specs",
]


def __getattr__(name: str) -> Any:
    if name in ("build_model", "table_optimizer"):
        from tpurec.models import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
