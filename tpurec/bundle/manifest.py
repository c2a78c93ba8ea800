"""The bundle's manifest: which files there are, what they must contain, and how both are checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpurec.config import from_mapping
from tpurec.errors import ConfigError, TpurecError

FORMAT = "tpurec-bundle"
FORMAT_VERSION = 2  # 1, which has no checksum of the manifest itself, is read too

MANIFEST = "manifest.json"
SEAL = "manifest_sha256"
SCHEMA = "schema.toml"
RECIPE = "recipe.toml"
DENSE = "dense.safetensors"
EXAMPLES = "examples.parquet"
TABLES = "tables"
_REQUIRED = (SCHEMA, RECIPE, DENSE, EXAMPLES)
# A file of a bundle is one of the required ones or a direct child of tables/. Nothing else is ever opened, so that no
# manifest can point outside of its folder.
_TABLE_FILE = re.compile(r"tables/[A-Za-z0-9_%+~-][A-Za-z0-9_%+~.-]*\.safetensors")
_CHUNK_BYTES = 1 << 22


class BundleError(TpurecError):
    """A bundle that is damaged, incomplete, or not one that this software can read."""


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle.

    Args:
        bytes: its size.
        sha256: of its content, 64 hex digits.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TableEntry:
    """One embedding table.

    Args:
        file: the file that holds it, under the name `weight`.
        key: its key in the model's state_dict.
        num_embeddings: rows.
        embedding_dim: columns.
        dtype: of the weights, as torch writes it without `torch.`.
    """

    file: str
    key: str
    num_embeddings: int
    embedding_dim: int
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    Args:
        version: identifies the model: 16 hex digits made from the checksums of all files, so that equal content has
            an equal version and any change another.
        created: time of the export, UTC, ISO 8601.
        tpurec_version: of the software that wrote it.
        schema_fingerprint: of the schema, see `Schema.fingerprint`.
        files: per relative path, its size and checksum; every file but the manifest.
        tables: per table name, where it is and its shape.
        metrics: of the exported checkpoint, as measured in training.
        counts: sizes worth knowing at a glance: tables, table_rows, table_parameters, dense_parameters, examples.
        source: where it came from: step and epoch of the checkpoint, and the like.
        format: always `tpurec-bundle`.
        format_version: of this file layout.
    """

    version: str
    created: str
    tpurec_version: str
    schema_fingerprint: str
    files: dict[str, FileEntry]
    tables: dict[str, TableEntry]
    metrics: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def to_text(self) -> str:
        """Write the manifest as JSON text.

        Returns:
            Text that `read_manifest` accepts.
        """
        return sealed(dataclasses.asdict(self))


def sealed(mapping: Mapping[str, Any]) -> str:
    """Write a manifest with its own checksum: the files' sums say nothing of the tables' shapes, metrics and source.

    Args:
        mapping: the manifest's keys and plain values; an older checksum among them is replaced.

    Returns:
        JSON text; `manifest_sha256` is that of the other keys, sorted, as JSON without blanks.
    """
    values = {key: value for key, value in mapping.items() if key != SEAL}
    return json.dumps({**values, SEAL: _digest(values)}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a bundle's manifest; opens no other file.

    Args:
        folder: the bundle.

    Returns:
        The manifest; its paths are safe to open below `folder`.

    Raises:
        BundleError: no bundle there, of another format version, or a manifest that contradicts itself.
    """
    path = folder / MANIFEST
    if path.is_symlink():
        raise BundleError(f"{path}: is a symbolic link; a bundle holds its files itself.", "Copy the file there.")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        found = "no such folder" if not folder.exists() else f"it has no {MANIFEST}"
        raise BundleError(f"{folder}: not a bundle: {found}.", "Make one with `tpurec export RUN BUNDLE`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}.") from None
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not valid JSON: {error}.", "Export the bundle again.") from None
    if not isinstance(mapping, dict) or mapping.get("format") != FORMAT:
        raise BundleError(f"{path}: not the manifest of a tpurec bundle (its format is not {FORMAT!r}).")
    version = mapping.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise BundleError(
            f"{path}: bundle format version {version!r}; this software reads versions 1 and {FORMAT_VERSION}.",
            "Export it again with this version, or use the version that wrote it "
            f"(tpurec {mapping.get('tpurec_version', 'unknown')}).",
        )
    seal = mapping.pop(SEAL, None)
    if seal != (None if version == 1 else _digest(mapping)):
        raise BundleError(
            f"{path}: its contents changed since it was written.", "Copy the bundle again, or export it again."
        )
    try:
        manifest = from_mapping(Manifest, mapping, str(path))
    except ConfigError as error:
        raise BundleError(error.problem, error.remedy) from None
    _check_paths(manifest, path)
    return manifest


def _check_paths(manifest: Manifest, path: Path) -> None:
    for name in manifest.files:
        if name not in _REQUIRED and not _TABLE_FILE.fullmatch(name):
            raise BundleError(f"{path}: names the file {name!r}, which no bundle has.", "Do not use this bundle.")
    missing = [name for name in _REQUIRED if name not in manifest.files]
    missing += [entry.file for entry in manifest.tables.values() if entry.file not in manifest.files]
    if missing:
        raise BundleError(f"{path}: does not list {', '.join(missing)}.", "Export the bundle again.")
    surplus = {name for name in manifest.files if name.startswith(TABLES)} - {t.file for t in manifest.tables.values()}
    if surplus:
        raise BundleError(f"{path}: lists {', '.join(sorted(surplus))}, which is no table's file.")
    if manifest.version != version_of(manifest.files):
        raise BundleError(
            f"{path}: version {manifest.version!r} does not fit the checksums that it lists.",
            "The manifest was changed after the export; export the bundle again.",
        )


def version_of(files: dict[str, FileEntry]) -> str:
    """Make the model's version from its files.

    Args:
        files: relative path to entry.

    Returns:
        16 hex digits.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name].sha256}\n".encode())
    return digest.hexdigest()[:16]


def file_entry(path: Path) -> FileEntry:
    """Measure a file.

    Args:
        path: the file.

    Returns:
        Its size and checksum; the file is read in pieces, whatever its size.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileEntry(size, digest.hexdigest())


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Compare files with the manifest's sizes and checksums.

    Args:
        folder: the bundle.
        manifest: its manifest.
        names: which files; by default all of them.

    Raises:
        BundleError: naming the first file that is missing, is a link, or differs.
    """
    for name in manifest.files if names is None else names:
        path, wanted = folder / name, manifest.files[name]
        if path.is_symlink() or path.parent.is_symlink():
            raise BundleError(f"{path}: is a symbolic link; a bundle holds its files itself.", "Copy the file there.")
        if not path.is_file():
            raise BundleError(f"{path}: is missing.", "Copy the whole bundle folder, or export it again.")
        found = file_entry(path)
        if found != wanted:
            what = f"{found.bytes} bytes, {wanted.bytes} expected" if found.bytes != wanted.bytes else "other content"
            raise BundleError(
                f"{path}: damaged: {what} (sha256 {found.sha256[:12]}, the manifest says {wanted.sha256[:12]}).",
                "Copy the bundle again, or export it again.",
            )
