"""Storage of `torch.distributed.checkpoint` in safetensors files, written and read piece by piece.

PyTorch's own `hf_storage` has the format right, and its reader reads what is written here, but it builds a whole file
in memory before it writes, and reads a whole tensor before it copies: a second copy of every table. These two
subclasses move `PIECE_BYTES` at a time, and the writer takes the checksum on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

PIECE_BYTES = 16 << 20

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


class SafetensorsWriter(HuggingFaceStorageWriter):
    """Writes one safetensors file a rank, and keeps size and SHA-256 of every file in `files`.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.files: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors (called by `torch.distributed.checkpoint.save`).

        Args:
            plan: what this rank writes.
            planner: gives the tensors.

        Returns:
            A finished future with one result a tensor; its `storage_data` is (file name, bytes, SHA-256).
        """
        done: Future[list[WriteResult]] = Future()
        name = f"rank-{plan.storage_data['shard_index'] - 1:05d}.safetensors"
        size, digest = _write_file(Path(self.path) / name, plan.items, planner)
        done.set_result([WriteResult(item.index, size, (name, size, digest)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect the files of all ranks (called on the coordinator); nothing is written.

        Args:
            metadata: of the state dict.
            results: what each rank's `write_data` returned.
        """
        for rank_results in results:
            for name, size, digest in {result.storage_data for result in rank_results}:
                self.files[name] = {"bytes": size, "sha256": digest}


class SafetensorsReader(HuggingFaceStorageReader):
    """Reads what `SafetensorsWriter` wrote, in pieces.

    Args:
        folder: the checkpoint's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        stored = f.get_slice(req.storage_index.fqn)
        target = planner.resolve_tensor(req).detach()
        begins = list(req.storage_offsets)
        if target.size() != torch.Size(req.lengths):
            raise ValueError(f"{req.storage_index.fqn}: {tuple(target.size())} is asked for, {req.lengths} is stored")
        if target.dim() == 0:
            target.copy_(stored[...])
        else:
            row_bytes = max(1, target[:1].numel() * target.element_size())
            step = max(1, PIECE_BYTES // row_bytes)
            rest = tuple(slice(b, b + n) for b, n in zip(begins[1:], target.shape[1:], strict=True))
            for row in range(0, target.shape[0], step):
                end = min(row + step, target.shape[0])
                target[row:end].copy_(stored[(slice(begins[0] + row, begins[0] + end), *rest)])
        planner.commit_tensor(req, target)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: the file.

    Returns:
        64 hex digits.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> tuple[int, str]:
    tensors = {item.index.fqn: planner.resolve_data(item).detach() for item in items}
    # Large elements first, so that every tensor is aligned as the format asks.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: list(item.index.offset or ())} for item in items}
    for name in names:
        offsets[name][SAVED_OFFSETS_KEY] = offsets[name][SAVED_OFFSETS_KEY] or [0] * tensors[name].dim()
    header: dict[str, Any] = {
        "__metadata__": {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
    }
    position = 0
    for name in names:
        end = position + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as stream:
        _write(stream, digest, struct.pack("<Q", len(text)) + text)
        for name in names:
            flat = tensors[name].contiguous().view(-1)
            step = max(1, PIECE_BYTES // flat.element_size())
            for begin in range(0, flat.numel(), step):
                piece = flat[begin : begin + step].cpu().view(torch.uint8)
                _write(stream, digest, memoryview(piece.numpy()))
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell(), digest.hexdigest()


def _write(stream: BinaryIO, digest: Any, piece: bytes | memoryview) -> None:
    digest.update(piece)
    stream.write(piece)
