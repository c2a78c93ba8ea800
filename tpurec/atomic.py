"""Files that are there either whole or as they were before, also after a crash or a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Give a name beside a file to write to; what was written takes the file's place if the block ends well.

    It is synced to disk first, so that the rename never becomes durable before the contents. If the block raises, the
    file stays as it was and what was written is removed. Permissions are those of any new file (umask).

    Args:
        path: the file; its folder exists. An existing file is replaced.

    Yields:
        An existing, empty file in the same folder, hidden, to write to or to replace.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with new_file(f"{folder.name}/scores") as unfinished:
    ...     _ = unfinished.write_text("0.5")
    >>> os.listdir(folder.name)
    ['scores']
    >>> folder.cleanup()
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield unfinished
        _sync(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file so that it is there either whole or as it was before.

    Args:
        path: the file; its folder exists.
        text: its contents, written as UTF-8 with line ends as they are.

    Raises:
        OSError: see `new_file`.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file so that it is there either whole or as it was before.

    Args:
        path: the file; its folder exists.
        data: its contents.

    Raises:
        OSError: see `new_file`.
    """
    with new_file(path) as unfinished:
        unfinished.write_bytes(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
