"""The folder of checkpoints: what is complete, what is kept, and what a killed owner left behind.

A folder named `step-...` is complete. Hidden ones are not: `.unfinished-step-...` is being written or removed, and
`.replaced-step-...` was complete and makes room for another of the same step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path

from tpurec.sharding.checkpoint_manifest import MANIFEST, read_manifest

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is.

    Args:
        folder: of the checkpoints.
        step: optimizer steps done.

    Returns:
        Its folder.
    """
    return folder / f"step-{step:08d}"


def unfinished_folder(final: Path) -> Path:
    """Where a checkpoint is written.

    Args:
        final: where it will be.

    Returns:
        A hidden folder beside it.
    """
    return final.with_name(_UNFINISHED + final.name)


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
    scored = [(score, path) for path in checkpoints if (score := _score(path)) is not None]
    if scored:
        top = max(score for score, _ in scored)
        return next(path for score, path in scored if score == top)
    return checkpoints[-1] if checkpoints else None


def _score(path: Path) -> float | None:
    """From the first lines, as both versions are laid out: a manifest of a thousand ranks takes seconds to parse."""
    try:
        with (path / MANIFEST).open("rb") as stream:
            lines = list(islice(stream, 8))
    except FileNotFoundError:
        return None  # its owner has just removed it
    for line in lines:
        if line.startswith(b' "score":'):
            try:
                score = json.loads(line.decode().partition(":")[2].strip().rstrip(","))
            except ValueError:
                break
            if score is None or isinstance(score, (int, float)):
                return score
    return read_manifest(path).score


def put_in_place(unfinished: Path) -> None:
    """Give a completely written checkpoint its name; one of the same step is replaced.

    Args:
        unfinished: of `unfinished_folder`; its files are synced.
    """
    final = unfinished.with_name(unfinished.name.removeprefix(_UNFINISHED))
    replaced = final.with_name(_REPLACED + final.name)
    _sync_folder(unfinished)
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    _sync_folder(final.parent)
    if replaced.exists():
        _remove(replaced)


def give_up(final: Path) -> None:
    """Remove what was written of a checkpoint; one of the same step that it was to replace stays.

    Args:
        final: where it would have been.
    """
    shutil.rmtree(unfinished_folder(final), ignore_errors=True)
    _put_back(final.with_name(_REPLACED + final.name))


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed owner left half-written or half-removed.

    Args:
        folder: of the checkpoints.
    """
    for replaced in folder.glob(f"{_REPLACED}*"):
        _put_back(replaced)
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        _delete(leftover)


def prune(folder: Path, keep_last: int) -> None:
    """Remove all checkpoints but the newest and the best.

    Args:
        folder: of the checkpoints.
        keep_last: how many of the newest stay.
    """
    best = best_checkpoint(folder)
    for path in list_checkpoints(folder)[:-keep_last]:
        if path != best:
            _remove(path)


def _put_back(replaced: Path) -> None:
    """Killed between the two renames of a replacement, the older one is all there is."""
    final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
    if final.exists():
        if replaced.exists():
            _remove(replaced)
    elif replaced.exists():
        replaced.rename(final)


def _remove(folder: Path) -> None:
    """Rename before removing, so that a kill in between leaves no folder that looks complete."""
    leaving = folder.with_name(f"{_UNFINISHED}removed-{folder.name.removeprefix(_REPLACED)}")
    folder.rename(leaving)
    _delete(leaving)


def _delete(folder: Path) -> None:
    """Of a link to a folder, for which someone may have made room elsewhere, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
