"""A folder of data that appears whole or not at all: built beside its place, then renamed into it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from tpurec import atomic
from tpurec.errors import DataError


class OutputFolder:
    """Context manager around the building of one output folder.

    Rows are written into `.NAME.partial` beside OUT; `publish` renames it to OUT. If the block is left by an exception,
    the partial folder is removed, unless `keep_partial` was set. Two processes cannot build the same OUT at once.

    Args:
        out: the folder to make; it may exist if it is empty, or if this kind of data made it and `overwrite` is set.
        kind: the value of `kind` in the manifest, such as `tpurec.synth`.
        manifest: name of the manifest file in the folder.
        overwrite: allow that an existing OUT of the same kind is replaced.

    Raises:
        DataError: OUT exists and may not be replaced, or another process is building it.
    """

    def __init__(self, out: str | Path, kind: str, manifest: str, overwrite: bool = False) -> None:
        # Not resolved further than to an absolute path: a user's link to a folder keeps working.
        self.out = Path(os.path.abspath(out))
        self.partial = self.out.parent / f".{self.out.name}.partial"
        self.kind, self.manifest, self.overwrite = kind, manifest, overwrite
        self.keep_partial = False
        self._lock: int | None = None

    def __enter__(self) -> OutputFolder:
        self._refuse_foreign()
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise DataError(
                f"{self.out}: another process is writing it.", "Wait for it, or choose another OUT."
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.keep_partial:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def clear(self) -> None:
        """Remove what an earlier, killed run left in the partial folder."""
        for path in self.partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def existing(self) -> dict[str, Any] | None:
        """Manifest of the OUT that exists.

        Returns:
            The parsed manifest; None if OUT does not exist, is empty, or was not made by this kind of data.
        """
        return read_manifest(self.out / self.manifest, self.kind)

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and put the folder in place.

        Args:
            manifest: plain values; `kind` is added.
        """
        write_manifest(self.partial / self.manifest, {"kind": self.kind, **manifest})
        old = self.out.parent / f".{self.out.name}.old"
        if old.exists():
            shutil.rmtree(old)
        if self.out.exists() and any(self.out.iterdir()):
            os.rename(self.out, old)
        os.rename(self.partial, self.out)
        shutil.rmtree(old, ignore_errors=True)

    def _refuse_foreign(self) -> None:
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise DataError(f"{self.out}: is a file, a folder is to be written there.", "Choose another OUT.")
        if not any(self.out.iterdir()):
            return
        if self.existing() is None:
            raise DataError(
                f"{self.out}: is not empty, and was not written by this command.", "Choose another OUT, or remove it."
            )
        if not self.overwrite:
            raise DataError(f"{self.out}: exists already.", "Add --overwrite to replace it, or choose another OUT.")


def read_manifest(path: Path, kind: str) -> dict[str, Any] | None:
    """Read a manifest.

    Args:
        path: the file.
        kind: the value of `kind` that it must have.

    Returns:
        The parsed manifest; None if the file is absent, is not JSON, or is of another kind.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("kind") == kind else None


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, atomically.

    Args:
        path: the file.
        manifest: plain values.
    """
    atomic.write_text(path, json.dumps(manifest, indent=1))
