"""What a conversion has finished: kept in a manifest, found again by the next run of the same command."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipelines.data.conversion_unit import ConversionUnit, UnitResult
from pipelines.data.output_folder import OutputFolder, read_manifest, write_manifest
from pipelines.data.row_counts import RowCounts
from pipelines.data.training_parquet import UNFINISHED, WrittenFile

_PROGRESS = "_progress.json"
_PROGRESS_KIND = "tpurec.converting"
_MOVED = ".moved"


def finished_units(
    manifest: dict[str, Any] | None, digest: str, units: Sequence[ConversionUnit], folder: Path
) -> dict[str, UnitResult]:
    """Find units that an earlier run finished and whose input has not changed since.

    Args:
        manifest: of that run, with `schema_sha256` and `units`; or None.
        digest: SHA-256 of the schema now.
        units: the work now.
        folder: where that run's files are.

    Returns:
        Results by stem of the unit now; the files have the names of that run.
    """
    if manifest is None or manifest.get("schema_sha256") != digest:
        return {}
    by_place = {(entry["path"], entry["start"]): entry for entry in manifest["units"]}
    results = {}
    for unit in units:
        identity = unit.identity()
        entry = by_place.get((identity["path"], identity["start"]))
        if entry is None or any(entry[key] != value for key, value in identity.items()):
            continue
        files = tuple(WrittenFile(**file) for file in entry["files"])
        if all(_is_there(folder / file.name, file) for file in files):
            results[unit.stem] = UnitResult(unit, files, RowCounts.from_plain(entry["counts"]))
    return results


def take_over(
    folder: OutputFolder, existing: dict[str, Any] | None, digest: str, units: Sequence[ConversionUnit]
) -> dict[str, UnitResult]:
    """Bring finished files of an interrupted run and of an existing OUT into the partial folder, and remove the rest.

    Args:
        folder: entered.
        existing: manifest of the existing OUT, or None.
        digest: SHA-256 of the schema.
        units: the work.

    Returns:
        Results of finished units by stem, with the files' names as they are now.
    """
    partial, moved = folder.partial, folder.partial / _MOVED
    shutil.rmtree(moved, ignore_errors=True)
    moved.mkdir()
    interrupted = read_manifest(partial / _PROGRESS, _PROGRESS_KIND)
    taken: dict[str, UnitResult] = {}
    for manifest, source in ((interrupted, partial), (existing, folder.out)):
        for stem, result in finished_units(manifest, digest, units, source).items():
            if stem in taken:
                continue
            files = []
            for number, file in enumerate(result.files):
                renamed = dataclasses.replace(file, name=f"{stem}-{number:03d}.parquet")
                _link(source / file.name, moved / renamed.name)
                files.append(renamed)
            taken[stem] = dataclasses.replace(result, files=tuple(files))
    # The old record goes first: it must never be read beside files that have got other names.
    (partial / _PROGRESS).unlink(missing_ok=True)
    for path in partial.iterdir():
        if path != moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in moved.iterdir():
        os.replace(path, partial / path.name)
    moved.rmdir()
    if taken:
        write_progress(partial, digest, taken.values())
    return taken


def write_progress(partial: Path, digest: str, done: Iterable[UnitResult]) -> None:
    """Record what is finished.

    Args:
        partial: the partial folder.
        digest: SHA-256 of the schema.
        done: finished units.
    """
    units = [plain_unit(result) for result in done]
    write_manifest(partial / _PROGRESS, {"kind": _PROGRESS_KIND, "schema_sha256": digest, "units": units})


def remove_unfinished(partial: Path) -> None:
    """Remove the files that were being written.

    Args:
        partial: the partial folder.
    """
    for path in partial.glob(f"{UNFINISHED}*"):
        path.unlink()


def remove_progress(partial: Path) -> None:
    """Remove the record, since all is finished.

    Args:
        partial: the partial folder.
    """
    (partial / _PROGRESS).unlink(missing_ok=True)


def plain_unit(result: UnitResult) -> dict[str, Any]:
    """A finished unit as plain values.

    Args:
        result: of the unit.

    Returns:
        Values for JSON that `finished_units` reads.
    """
    files = [dataclasses.asdict(file) for file in result.files]
    return {**result.unit.identity(), "files": files, "counts": result.counts.to_plain()}


def _is_there(path: Path, file: WrittenFile) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
