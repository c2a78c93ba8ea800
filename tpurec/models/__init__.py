"""A recipe's [model] and [tables] to a TorchRec module. Importing this loads neither torch nor torchrec."""

from tpurec.models.config import ModelConfig, TableOverride, TablesConfig

__all__ = ["ModelConfig", "TableOverride", "TablesConfig"]
