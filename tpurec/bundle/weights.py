"""A model's weights, as tables and the rest; and reading them back with every name, shape and dtype checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tpurec.bundle.manifest import DENSE, BundleError, Manifest

if TYPE_CHECKING:
    from torch import Tensor, nn

# TorchRec's names of a table's weights in a state_dict: of pooled and of unpooled lookups.
_TABLE_KEY = re.compile(r"^(?:(.*)\.)?(?:embedding_bags|(embeddings))\.([^.]+)\.weight$")


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's state_dict.

    Args:
        model: any module.

    Returns:
        Weights and buffers that belong to no embedding collection, and the tables; both by state_dict key, the tensors
        being views of the model's own.
    """
    from torchrec.modules.embedding_modules import EmbeddingCollectionInterface

    # Others may call a module `embeddings`, too.
    unpooled = {path for path, module in model.named_modules() if isinstance(module, EmbeddingCollectionInterface)}
    state, tables = model.state_dict(), {}
    for key in list(state):
        found = _TABLE_KEY.match(key)
        if found and (found[2] is None or (found[1] or "") in unpooled):
            tables[key] = state.pop(key)
    return state, tables


def table_name(key: str) -> str:
    """The table that a state_dict key belongs to.

    Args:
        key: a key of the second mapping of `split_state`.

    Returns:
        The table's name.
    """
    return _TABLE_KEY.match(key).group(3)


def load_weights(model: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Read a bundle's weights into a model of the same structure; one table at a time, straight from the mapped file.

    Args:
        model: what the bundle's recipe builds.
        folder: the bundle.
        manifest: its manifest, checked.

    Raises:
        BundleError: a weight that is missing, surplus, or of another shape or dtype; names file and weight.
    """
    dense, tables = split_state(model)
    _load_file(folder / DENSE, dense)
    wanted = {entry.key for entry in manifest.tables.values()}
    if wanted != set(tables):
        missing, surplus = sorted(set(tables) - wanted), sorted(wanted - set(tables))
        what = f"has no table {missing[0]!r}" if missing else f"has a table {surplus[0]!r} that the model has not"
        raise BundleError(f"{folder}: the bundle {what}.", "Recipe and tables do not belong together; export it again.")
    for name, entry in manifest.tables.items():
        target = tables[entry.key]
        stated = ([entry.num_embeddings, entry.embedding_dim], entry.dtype)
        if stated != (list(target.shape), _dtype(target)):
            raise BundleError(
                f"{folder}: table {name!r} is {_shown(*stated)}, schema and recipe say "
                f"{_shown(list(target.shape), _dtype(target))}.",
                "Schema, recipe and tables do not belong together; export the bundle again.",
            )
        _load_file(folder / entry.file, {"weight": target})


def _load_file(path: Path, targets: Mapping[str, Tensor]) -> None:
    import torch

    found = dict(_tensors(path))
    missing, surplus = sorted(set(targets) - set(found)), sorted(set(found) - set(targets))
    if missing or surplus:
        what = f"has no weight {missing[0]!r}" if missing else f"has a weight {surplus[0]!r} that the model has not"
        raise BundleError(f"{path}: {what}.", "Recipe and weights do not belong together; export the bundle again.")
    with torch.no_grad():
        for key, target in targets.items():
            source = found[key]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise BundleError(
                    f"{path}: weight {key!r} is {_shown(list(source.shape), _dtype(source))}, the model expects "
                    f"{_shown(list(target.shape), _dtype(target))}.",
                    "Recipe and weights do not belong together; export the bundle again.",
                )
            target.copy_(source)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated over)
                yield key, file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path}: cannot be read: {error}.", "Export the bundle again.") from None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shown(shape: list[int], dtype: str) -> str:
    return f"{dtype} {shape}"
