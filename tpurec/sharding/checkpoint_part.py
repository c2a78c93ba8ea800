"""One rank's part of a checkpoint: the pieces it writes, as one safetensors file, and how the parts make a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpurec.sharding.checkpoint_manifest import (
    CheckpointError,
    StoredPiece,
    StoredTensor,
    key_in_file,
    rows_and_columns,
)
from tpurec.sharding.pieces import TensorPiece, whole
from tpurec.sharding.regions import Region, find_gap_or_clash
from tpurec.sharding.safetensors_storage import SAFETENSORS_DTYPES, header_of, write_file


class RankPart:
    """What one rank writes.

    Args:
        rank: this rank.
        tensors: whole tensors, alike on every rank; rank 0 writes them.
        pieces: what this rank holds of tensors that are spread over ranks.

    Raises:
        CheckpointError: a tensor is given twice, or has a dtype that safetensors has not.
    """

    def __init__(self, rank: int, tensors: Mapping[str, torch.Tensor], pieces: Iterable[TensorPiece]) -> None:
        self.file = f"rank-{rank:05d}.safetensors"
        self._known: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._written: dict[str, TensorPiece] = {}
        for name, tensor in tensors.items():
            self._add(whole(name, tensor.detach()), write=rank == 0)
        for piece in pieces:
            if piece.name in tensors:
                raise CheckpointError(f"{piece.name!r} is given both as a whole tensor and as a piece.")
            self._add(piece, write=piece.writes and piece.region.size > 0)

    def _add(self, piece: TensorPiece, write: bool) -> None:
        if piece.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{piece.name!r}: {piece.dtype} cannot be saved.")
        kind = (str(piece.dtype).removeprefix("torch."), piece.global_shape)
        if self._known.setdefault(piece.name, kind) != kind:
            raise CheckpointError(
                f"{piece.name!r} is {_shown(kind)} in one piece and {_shown(self._known[piece.name])}."
            )
        if write:
            key = key_in_file(piece.name, piece.global_shape, piece.region)
            if key in self._written:
                raise CheckpointError(f"{key!r} is given twice.")
            self._written[key] = piece

    def snapshot(self) -> None:
        """Copy what is to be written into host memory, so that training can go on meanwhile."""
        for key, piece in self._written.items():
            copied = piece.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._written[key] = replace(piece, tensor=copied)

    def describe(self) -> dict[str, Any]:
        """What this rank will write, as JSON, for `merge`.

        Returns:
            The file's bytes, and every tensor with this rank's regions of it.
        """
        regions: dict[str, list[list[int]]] = {name: [] for name in self._known}
        for piece in self._written.values():
            r = piece.region
            regions[piece.name].append([r.row_start, r.row_step, r.num_rows, r.column_start, r.column_stop])
        return {
            "bytes": self.num_bytes,
            "tensors": {name: [dtype, list(shape), regions[name]] for name, (dtype, shape) in self._known.items()},
        }

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if this rank writes none."""
        tensors = self._tensors()
        return (
            len(header_of(tensors)[0]) + sum(t.numel() * t.element_size() for t in tensors.values()) if tensors else 0
        )

    def write(self, folder: Path, progress: Callable[[int], None]) -> dict[str, Any] | None:
        """Write the file.

        Args:
            folder: where to.
            progress: takes the bytes just written.

        Returns:
            Size and checksums as JSON; None if this rank writes nothing.

        Raises:
            OSError: it cannot be written.
        """
        if not folder.is_dir():
            raise OSError(f"{folder} is not there; the checkpoints must be on a file system that all ranks share")
        if not self._written:
            return None
        written = write_file(folder / self.file, self._tensors(), progress)
        return {
            "file": self.file,
            "bytes": written.num_bytes,
            "header_sha256": written.header_sha256,
            "blocks": {key: [rows, digests] for key, (rows, digests) in written.blocks.items()},
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {key: piece.tensor for key, piece in self._written.items()}


@dataclass(frozen=True)
class MergedTensor:
    """A tensor as the ranks' parts make it up.

    Args:
        dtype: such as `float32`.
        shape: of the whole tensor.
        regions: rank and region of each piece.
    """

    dtype: str
    shape: tuple[int, ...]
    regions: list[tuple[int, Region]]


def merge(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, MergedTensor]:
    """Check that the parts of all ranks make whole tensors.

    Args:
        descriptions: what `RankPart.describe` gave, by rank.

    Returns:
        Name to tensor.

    Raises:
        CheckpointError: ranks disagree about a tensor, or rows or columns are written by no rank or by several.
    """
    merged: dict[str, MergedTensor] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, regions) in description["tensors"].items():
            tensor = merged.setdefault(name, MergedTensor(dtype, tuple(shape), []))
            if (tensor.dtype, list(tensor.shape)) != (dtype, shape):
                raise CheckpointError(
                    f"{name!r} is {_shown((dtype, shape))} on rank {rank} and {_shown((tensor.dtype, tensor.shape))} "
                    "on another"
                )
            tensor.regions.extend((rank, Region(*region)) for region in regions)
    for name, tensor in merged.items():
        regions = [region for _, region in tensor.regions]
        problem = find_gap_or_clash(regions, *rows_and_columns(tensor.shape))
        if problem is not None:
            raise CheckpointError(f"{name!r}: {problem}")
    return merged


def stored_tensors(
    merged: Mapping[str, MergedTensor], written: Sequence[Mapping[str, Any] | None]
) -> tuple[dict[str, StoredTensor], dict[str, dict[str, Any]]]:
    """Put together what the manifest says of tensors and files.

    Args:
        merged: of `merge`.
        written: what `RankPart.write` gave, by rank.

    Returns:
        The tensors, and the files with size and checksum of the header.
    """
    tensors = {}
    for name, tensor in merged.items():
        pieces = []
        for rank, region in tensor.regions:
            file = written[rank]
            assert file is not None, "a rank with regions has written a file"
            block_rows, digests = file["blocks"][key_in_file(name, tensor.shape, region)]
            pieces.append(StoredPiece(file["file"], region, block_rows, tuple(digests)))
        tensors[name] = StoredTensor(tensor.dtype, tensor.shape, tuple(pieces))
    files = {
        file["file"]: {"bytes": file["bytes"], "header_sha256": file["header_sha256"]}
        for file in written
        if file is not None
    }
    return tensors, files


def _shown(kind: tuple[str, Sequence[int]]) -> str:
    return f"{kind[0]} {list(kind[1])}"
