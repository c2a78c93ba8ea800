"""Bytes of a text file, plain or compressed, in blocks of whole lines."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import IO

import pyarrow as pa

from pipelines.data.inputs import InputFile
from tpurec.errors import DataError

BLOCK_BYTES = 8 << 20
# A longer line is no row of a click log: the file is something else, and must not be read into memory whole.
MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def line_blocks(
    file: InputFile, start: int = 0, stop: int | None = None, block_bytes: int = BLOCK_BYTES
) -> Generator[bytes]:
    """Read a file, or a range of a plain one, in blocks of whole lines.

    Args:
        file: a text file.
        start: first byte; not 0 only for plain files, and then the first of a line.
        stop: behind the last byte; None for the end of the file.
        block_bytes: about how much to give at a time.

    Yields:
        Non-empty blocks of whole lines. Every line ends in a newline, the last one of the file perhaps not. A
        byte-order mark is left out.

    Raises:
        DataError: compressed data that is broken or cut short, or a line that is too long.
    """
    with _open(file) as stream:
        if start:
            stream.seek(start)
        rest = b""
        position = start
        while True:
            wanted = block_bytes if stop is None else min(block_bytes, stop - position)
            piece = _read(stream, file, wanted)
            if position == 0:
                piece = piece.removeprefix(_BYTE_ORDER_MARK)
            if not piece:
                break
            position += len(piece)
            cut = piece.rfind(b"\n") + 1
            if cut:
                yield rest + piece[:cut]
                rest = piece[cut:]
                continue
            rest += piece
            _refuse_long_line(file, len(rest))
        if rest:
            yield rest


def line_ranges(file: InputFile, range_bytes: int) -> list[tuple[int, int | None]]:
    """Cut a text file into ranges of whole lines that can be read apart.

    Args:
        file: a text file.
        range_bytes: about how long a range is.

    Returns:
        Pairs (start, stop) for `line_blocks`; just one, with stop None, for a compressed file.

    Raises:
        DataError: a line that is too long.
    """
    if file.compression is not None:
        return [(0, None)]
    size = file.path.stat().st_size
    starts = [0]
    with file.path.open("rb") as stream:
        for near in range(range_bytes, size, range_bytes):
            if near <= starts[-1]:
                continue
            stream.seek(near - 1)  # a line that begins exactly at `near` begins the range
            begin = near - 1 + _length_of_line(stream, file)
            if begin < size:
                starts.append(begin)
    return list(zip(starts, [*starts[1:], size], strict=True))


def count_lines(file: InputFile, stop: int) -> int:
    """Count the lines of the beginning of a file.

    Args:
        file: a plain text file.
        stop: behind its last byte to look at, the first byte of a line.

    Returns:
        Number of lines.
    """
    return sum(block.count(b"\n") for block in line_blocks(file, 0, stop)) if stop else 0


def first_line(file: InputFile) -> bytes:
    """Read the first line.

    Args:
        file: a text file.

    Returns:
        The line without its end; empty if the file is.

    Raises:
        DataError: as `line_blocks`.
    """
    with contextlib.closing(line_blocks(file, block_bytes=1 << 16)) as blocks:
        return next(blocks, b"").partition(b"\n")[0].removesuffix(b"\r")


def _open(file: InputFile) -> IO[bytes]:
    try:
        if file.compression is None:
            return file.path.open("rb")
        return pa.input_stream(str(file.path), compression=file.compression)
    except OSError as error:
        raise DataError(f"{file}: cannot be opened: {error}.", "Check the path.") from None


def _read(stream: IO[bytes], file: InputFile, size: int) -> bytes:
    try:
        return stream.read(size)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{file}: cannot be read to its end: {reason}.", "The file is broken or was cut short: fetch it again."
        ) from None


def _length_of_line(stream: IO[bytes], file: InputFile) -> int:
    """Bytes from here to behind the next newline, or to the end of the file."""
    length = 0
    while piece := stream.read(1 << 16):
        cut = piece.find(b"\n")
        if cut >= 0:
            return length + cut + 1
        length += len(piece)
        _refuse_long_line(file, length)
    return length


def _refuse_long_line(file: InputFile, length: int) -> None:
    if length > MAX_LINE_BYTES:
        raise DataError(f"{file}: a line is longer than {MAX_LINE_BYTES >> 20} MiB.", "This is no text file with rows.")
