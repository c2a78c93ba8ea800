"""Writing a bundle: into a temporary folder beside the target, checked by loading it back, then renamed into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tpurec
from tpurec.bundle.bundle import EXPECTED_SCORE, Bundle
from tpurec.bundle.manifest import (
    DENSE,
    EXAMPLES,
    MANIFEST,
    RECIPE,
    SCHEMA,
    TABLES,
    BundleError,
    Manifest,
    TableEntry,
    file_entry,
    read_manifest,
    version_of,
)
from tpurec.bundle.weights import split_state, table_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tpurec.features import Schema


def write_bundle(
    path: str | Path,
    *,
    model: nn.Module,
    schema: Schema,
    recipe_text: str,
    examples: pa.Table,
    expected_scores: np.ndarray,
    metrics: Mapping[str, Any],
    source: Mapping[str, Any],
) -> Manifest:
    """Write a bundle, atomically: `path` is absent, or what it was before, until everything is written and checked.

    Args:
        path: the folder to make. A bundle that is there is replaced; anything else that is there is left alone.
        model: what `tpurec.models.build_model` gave, trained. To check the bundle it is loaded back into this very
            model, so that no table is held twice; a failure may leave the model with other weights.
        schema: transforms the rows that the model was trained on.
        recipe_text: the resolved recipe, TOML; its sections [model] and [tables] rebuild the model.
        examples: at least one raw row, with every column of the schema's features.
        expected_scores: float32 [len(examples)], what training's evaluation says about them.
        metrics: of these weights.
        source: which checkpoint this was.

    Returns:
        The manifest.

    Raises:
        BundleError: something else is at `path`, an example's score is not finite, or the bundle, once loaded, scores
            its examples otherwise.
    """
    path = Path(path)
    _check_target(path)
    if not len(examples) or not np.isfinite(expected_scores).all():
        bad = int((~np.isfinite(expected_scores)).sum())
        raise BundleError(
            f"{bad} of the model's scores for {len(examples)} example rows are not finite.",
            "The training diverged: lower the learning rate, or export an earlier checkpoint.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp's 0700 would keep the service's user out
        manifest = _write_files(temporary, model, schema, recipe_text, examples, expected_scores, metrics, source)
        Bundle.reload(temporary, model).check_examples()
        for file in (*manifest.files, MANIFEST):
            _flush(temporary / file)
        _move_into_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def _check_target(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and (not any(path.iterdir()) or (path / MANIFEST).is_file()):
        if (path / MANIFEST).is_file():
            read_manifest(path)  # the manifest of something else is an error, not a thing to replace
        return
    raise BundleError(f"{path}: exists and is not a bundle.", "Choose another path, or remove it first.")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # such as on a full disk
        raise BundleError(f"{path.name}: cannot be written: {error}.", "Check permissions and free space.") from None


def _write_files(
    folder: Path,
    model: nn.Module,
    schema: Schema,
    recipe_text: str,
    examples: pa.Table,
    expected_scores: np.ndarray,
    metrics: Mapping[str, Any],
    source: Mapping[str, Any],
) -> Manifest:
    (folder / SCHEMA).write_text(schema.to_text(), encoding="utf-8")
    (folder / RECIPE).write_text(recipe_text, encoding="utf-8")
    columns = schema.columns(labels=False)
    with_scores = examples.select(columns).append_column(EXPECTED_SCORE, pa.array(expected_scores, pa.float32()))
    pq.write_table(with_scores.replace_schema_metadata(None), folder / EXAMPLES)

    dense, table_weights = split_state(model)
    _save({key: tensor.contiguous() for key, tensor in dense.items()}, folder / DENSE)
    (folder / TABLES).mkdir()
    tables: dict[str, TableEntry] = {}
    for key, weight in table_weights.items():
        name = _unused(table_name(key), tables)
        file = f"{TABLES}/{_file_stem(name)}.safetensors"
        _save({"weight": weight.contiguous()}, folder / file)
        rows, dim = weight.shape
        tables[name] = TableEntry(file, key, rows, dim, str(weight.dtype).removeprefix("torch."))

    names = [SCHEMA, RECIPE, DENSE, EXAMPLES, *(entry.file for entry in tables.values())]
    files = {name: file_entry(folder / name) for name in names}
    manifest = Manifest(
        version=version_of(files),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tpurec_version=tpurec.__version__,
        schema_fingerprint=schema.fingerprint(),
        files=files,
        tables=tables,
        metrics={key: _finite(value) for key, value in metrics.items()},
        counts={
            "tables": len(tables),
            "table_rows": sum(entry.num_embeddings for entry in tables.values()),
            "table_parameters": sum(entry.num_embeddings * entry.embedding_dim for entry in tables.values()),
            "dense_parameters": sum(tensor.numel() for tensor in dense.values()),
            "examples": len(examples),
        },
        source=dict(source),
    )
    (folder / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
    return manifest


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """Two collections of one model may each have a table of the same name."""
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def _file_stem(name: str) -> str:
    return quote(name, safe="~").replace(".", "%2E")


def _finite(value: Any) -> Any:
    """JSON knows no NaN: an undefined metric is null."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
    else:
        previous = Path(tempfile.mkdtemp(prefix=f".{path.name}.previous.", dir=path.parent)) / path.name
        path.rename(previous)
        try:
            temporary.rename(path)
        except BaseException:
            previous.rename(path)
            raise
        finally:
            shutil.rmtree(previous.parent, ignore_errors=True)
    _flush(path.parent)
