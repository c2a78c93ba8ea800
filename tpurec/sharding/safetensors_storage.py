"""Safetensors files, written and read block by block, with a checksum a block.

A block is whole rows, `BLOCK_BYTES` at most (one row at least): what a process holds in memory beyond its tensors, and
what one checksum covers, so that a rank verifies all it reads and reads nothing else.
`torch.distributed.checkpoint` serves here no longer: a chunk of its metadata is a box of adjacent rows, and the modulo
rule gives a rank every n-th row, which would be one chunk a row. Files of whole tensors carry the metadata that its
`HuggingFaceStorageReader` asks for, so that PyTorch reads a checkpoint of one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)

BLOCK_BYTES = 16 << 20
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

# https://huggingface.co/docs/safetensors/index#format
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class WrittenFile:
    """What was written.

    Args:
        num_bytes: of the file.
        header_sha256: of everything before the data.
        blocks: key to rows a block, and the blocks' SHA-256.
    """

    num_bytes: int
    header_sha256: str
    blocks: dict[str, tuple[int, list[str]]]


def rows_per_block(tensor: torch.Tensor) -> int:
    """How many rows of a tensor make a block.

    Args:
        tensor: any shape; one without dimensions is one row.

    Returns:
        1 or more.
    """
    row_bytes = tensor[:1].numel() * tensor.element_size() if tensor.dim() and tensor.numel() else 1
    return max(1, BLOCK_BYTES // row_bytes)


def header_of(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """Lay out a file.

    Args:
        tensors: key to tensor.

    Returns:
        Everything before the data, and the keys in the order of the data.
    """
    # Large elements first, so that every tensor is aligned as the format asks.
    order = sorted(tensors, key=lambda key: -tensors[key].element_size())
    offsets = {key: {SAVED_OFFSETS_KEY: [0] * tensors[key].dim()} for key in order}
    header: dict[str, Any] = {
        "__metadata__": {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
    }
    position = 0
    for key in order:
        end = position + tensors[key].numel() * tensors[key].element_size()
        header[key] = {
            "dtype": SAFETENSORS_DTYPES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], progress: Callable[[int], None] = lambda num_bytes: None
) -> WrittenFile:
    """Write one safetensors file and sync it, a block at a time.

    Args:
        path: a file that does not exist yet.
        tensors: key to tensor; any device and strides.
        progress: takes the bytes just written; what it raises ends the writing.

    Returns:
        Size and checksums.

    Raises:
        OSError: it cannot be written.
    """
    header, order = header_of(tensors)
    blocks: dict[str, tuple[int, list[str]]] = {}
    with path.open("xb") as stream:
        _write(stream, header)
        for key in order:
            tensor = tensors[key].detach()
            rows = tensor if tensor.dim() else tensor.reshape(1)
            step = rows_per_block(rows)
            digests = []
            for begin in range(0, rows.shape[0], step):
                block = rows[begin : begin + step].cpu().contiguous().view(-1).view(torch.uint8)
                view = memoryview(block.numpy())
                digests.append(hashlib.sha256(view).hexdigest())
                _write(stream, view)
                progress(len(view))
            blocks[key] = (step, digests)
        stream.flush()
        os.fsync(stream.fileno())
        return WrittenFile(stream.tell(), hashlib.sha256(header).hexdigest(), blocks)


def _write(stream: BinaryIO, data: bytes | memoryview) -> None:
    stream.write(data)


class SafetensorsFile:
    """An open safetensors file; close it, or use it in a `with`.

    Args:
        path: the file; not a symbolic link.

    Raises:
        OSError: it cannot be opened.
        ValueError: what is wrong with its header.
    """

    def __init__(self, path: Path) -> None:
        self._stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0)
        try:
            self.num_bytes = os.fstat(self._stream.fileno()).st_size
            prefix = self._stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(self.num_bytes - 8, MAX_HEADER_BYTES):
                raise ValueError("it is no safetensors file: its header has no valid length")
            text = self._stream.read(length)
            self.header_sha256 = hashlib.sha256(prefix + text).hexdigest()
            try:
                self._entries = json.loads(text)
                self._entries.pop("__metadata__", None)
            except (ValueError, AttributeError, TypeError):
                raise ValueError("it is no safetensors file: its header is not JSON") from None
            self._data_start = 8 + length
        except BaseException:
            self._stream.close()
            raise
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def keys(self) -> set[str]:
        """What the file holds."""
        return set(self._entries)

    def find_problem(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
        """Check that the file holds a tensor as expected.

        Args:
            key: in the file.
            dtype: expected.
            shape: expected.

        Returns:
            None, or what is wrong.
        """
        entry = self._entries.get(key)
        if entry is None:
            return f"it lacks {key!r}"
        size = dtype.itemsize
        for length in shape:
            size *= length
        try:
            begin, end = entry["data_offsets"]
            good = (entry["dtype"], tuple(entry["shape"])) == (SAFETENSORS_DTYPES[dtype], shape)
            good = good and begin >= 0 and end - begin == size and self._data_start + end <= self.num_bytes
        except (KeyError, TypeError, ValueError):
            good = False
        return None if good else f"{key!r} is {entry}, expected is {SAFETENSORS_DTYPES[dtype]} {list(shape)}"

    def block(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], first: int, stop: int, sha256: str | None
    ) -> torch.Tensor:
        """Read some rows.

        Args:
            key: in the file; `find_problem` has seen it.
            dtype: of the tensor.
            shape: of the tensor.
            first: first row.
            stop: the row behind the last.
            sha256: of these rows; None to take them as they are.

        Returns:
            `[stop - first, ...]`, valid until the next call.

        Raises:
            ValueError: the rows are not those of the checksum, or the file ends before them.
        """
        rows = torch.Size((stop - first, *shape[1:]))
        row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        num_bytes = rows.numel() * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        view = memoryview(self._buffer.numpy())[:num_bytes]
        position = self._data_start + self._entries[key]["data_offsets"][0] + first * row_bytes
        self._stream.seek(position)
        done = 0
        while done < num_bytes:
            got = self._stream.readinto(view[done:])
            if not got:
                raise ValueError(f"it ends within {key!r}")
            done += got
        if sha256 is not None and hashlib.sha256(view).hexdigest() != sha256:
            raise ValueError(f"its contents changed since it was written: rows {first} to {stop} of {key!r}")
        return self._buffer[:num_bytes].view(dtype).view(rows)


def blocks_of(num_rows: int, block_rows: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of the blocks of a tensor.

    Args:
        num_rows: of the tensor.
        block_rows: rows a block.

    Yields:
        Number, first row, the row behind the last.
    """
    for number, first in enumerate(range(0, num_rows, block_rows)):
        yield number, first, min(first + block_rows, num_rows)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: the file.

    Returns:
        64 hex digits.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
