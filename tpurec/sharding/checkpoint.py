"""Checkpoints of a training run: `torch.distributed.checkpoint`, safetensors storage, a JSON manifest; no pickle.

A checkpoint is a folder `step-00001234` with safetensors files and `manifest.json`: the files with sizes and SHA-256,
the tensors with dtypes and shapes, and the caller's JSON state. It is written beside its place, synced, and renamed, so
a folder of that name is always complete. Tensors are loaded in place; one missing or one too many is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tpurec.errors import TpurecError
from tpurec.sharding.safetensors_storage import SafetensorsReader, SafetensorsWriter, sha256_of

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


class CheckpointError(TpurecError):
    """A checkpoint that cannot be read, or does not fit the model and optimizers it is loaded into."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The recipe's section [checkpoint]. Validation always writes one too, so that the best can be kept.

    Args:
        every_steps: steps between checkpoints; a killed run loses at most so many.
        keep_last: newest checkpoints to keep; the best one is kept besides.
    """

    every_steps: int = 1000
    keep_last: int = 2

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_last < 1:
            raise ValueError("every_steps and keep_last must be 1 or more")


@dataclass(frozen=True)
class CheckpointManifest:
    """What `manifest.json` of one checkpoint says.

    Args:
        folder: the checkpoint.
        step: optimizer steps done.
        score: how good it is, higher is better; None if it was not evaluated.
        state: the caller's JSON state.
        tensors: name to `dtype` and `shape`.
        files: name to `bytes` and `sha256`.
    """

    folder: Path
    step: int
    score: float | None
    state: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]


class Checkpointer:
    """Saves checkpoints into one folder and keeps the last few and the best.

    Only one process may own the folder; what a killed owner left half-written is removed.

    Args:
        folder: holds the checkpoints; made if needed.
        keep_last: newest checkpoints to keep; the best one is kept besides.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Write one checkpoint, then remove those that need not be kept.

        Args:
            step: optimizer steps done; names the checkpoint. One of the same step is replaced.
            tensors: name to tensor; read before this returns.
            state: everything else; plain JSON values, no NaN.
            score: how good it is, higher is better; None if it was not evaluated.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: it cannot be written, such as on a full disk; nothing is left of it then.
        """
        final = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f"{_UNFINISHED}{final.name}"
        unfinished.mkdir()
        try:
            writer = SafetensorsWriter(unfinished)
            with _one_process(f"{final}: cannot be written"):
                dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
            manifest = {
                "version": FORMAT_VERSION,
                "step": step,
                "score": score,
                "state": dict(state),
                "files": writer.files,
                "tensors": {name: _describe(tensor) for name, tensor in tensors.items()},
            }
            _write_synced(unfinished / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False))
            _sync_folder(unfinished)
            self._remove(final)
            unfinished.rename(final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _sync_folder(self.folder)
        self._prune()
        return final

    def _prune(self) -> None:
        kept = list_checkpoints(self.folder)
        best = best_checkpoint(self.folder)
        for folder in kept[: -self.keep_last]:
            if folder != best:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Rename before removing, so that a kill in between leaves no folder that looks complete."""
        if folder.exists():
            leaving = self.folder / f"{_UNFINISHED}removed-{folder.name}"
            folder.rename(leaving)
            shutil.rmtree(leaving)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder.

    Args:
        folder: as given to `Checkpointer`; it may be missing.

    Returns:
        Checkpoint folders, by ascending step.
    """
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest score, the earliest of equals.

    Args:
        folder: as given to `Checkpointer`.

    Returns:
        Its folder; the newest one if none has a score; None if there is none.

    Raises:
        CheckpointError: a manifest cannot be read.
    """
    checkpoints = list_checkpoints(folder)
    scored = [(manifest.score, path) for path in checkpoints if (manifest := read_manifest(path)).score is not None]
    if scored:
        top = max(score for score, _ in scored)
        return next(path for score, path in scored if score == top)
    return checkpoints[-1] if checkpoints else None


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest.

    Args:
        folder: the checkpoint.

    Returns:
        Its contents.

    Raises:
        CheckpointError: there is none, it is damaged, or its version is not known.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["version"]
        if version == FORMAT_VERSION:
            keys = ("step", "score", "state", "tensors", "files")
            return CheckpointManifest(folder, **{key: values[key] for key in keys})
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a checkpoint: it has no {MANIFEST}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r}).", _use_older(folder)) from None
    raise CheckpointError(
        f"{path}: format version {version}; this software reads version {FORMAT_VERSION}.", "Use a matching version."
    )


def load_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, only: str = "", verify: bool = True
) -> CheckpointManifest:
    """Load a checkpoint's tensors in place.

    Args:
        folder: the checkpoint.
        tensors: name to the tensor that is overwritten.
        only: load just the names with this prefix, such as `model.`; others in the checkpoint are left alone.
        verify: compare the files' SHA-256 first.

    Returns:
        The manifest, with the JSON state.

    Raises:
        CheckpointError: names of checkpoint and `tensors` differ, a shape or dtype differs, or a file is damaged;
            nothing was loaded then.
    """
    manifest = read_manifest(folder)
    stored = {name: entry for name, entry in manifest.tensors.items() if name.startswith(only)}
    _check_names(folder, stored, tensors)
    for name, tensor in tensors.items():
        wanted, there = _describe(tensor), stored[name]
        if wanted != there:
            raise CheckpointError(
                f"{folder}: {name!r} is {there['dtype']} {there['shape']}, "
                f"here it is {wanted['dtype']} {wanted['shape']}.",
                "Load it with the recipe and schema it was trained with.",
            )
    _check_files(manifest, verify)
    with _one_process(f"{folder}: cannot be read"):
        dcp.load(dict(tensors), storage_reader=SafetensorsReader(folder), no_dist=True)
    return manifest


@contextmanager
def _one_process(problem: str) -> Iterator[None]:
    """Call DCP without a process group; undo its wrapping of what went wrong, an interrupt included."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(f"{problem}: {cause}.") from cause


def _check_names(folder: Path, stored: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    missing, extra = sorted(tensors.keys() - stored.keys()), sorted(stored.keys() - tensors.keys())
    if missing or extra:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has {_listed(extra)}, which nothing here takes"] if extra else []
        raise CheckpointError(
            f"{folder}: the checkpoint {' and '.join(parts)}.",
            "Load it with the model, tables and optimizers it was trained with.",
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_files(manifest: CheckpointManifest, verify: bool) -> None:
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if (
            Path(name).name != name or path.is_symlink()
        ):  # a checkpoint may come from elsewhere: nothing outside is read
            raise CheckpointError(
                f"{manifest.folder}: the file {name!r} of its manifest lies outside of it.",
                _use_older(manifest.folder),
            )
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise CheckpointError(f"{path}: {found}, {entry['bytes']} bytes are expected.", _use_older(manifest.folder))
        if verify and sha256_of(path) != entry["sha256"]:
            raise CheckpointError(f"{path}: its contents changed since it was written.", _use_older(manifest.folder))


def _use_older(folder: Path) -> str:
    return f"Remove the folder {folder} to go on from an older checkpoint."


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
