"""Load a checkpoint into tensors that need not be cut as it is: any world size, any plan, or no plan at all.

Each process takes from the files the blocks that hold rows of its own, one at a time, and checks each against its
checksum; no process talks to another. Names, dtypes, shapes and the completeness of the pieces are checked before
anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpurec.sharding import safetensors_storage
from tpurec.sharding.checkpoint_manifest import (
    RELOAD,
    CheckpointError,
    CheckpointManifest,
    StoredPiece,
    StoredTensor,
    key_in_file,
    read_manifest,
    shape_in_file,
)
from tpurec.sharding.pieces import TensorPiece, whole
from tpurec.sharding.regions import Overlap, intersect
from tpurec.sharding.safetensors_storage import SafetensorsFile, blocks_of, sha256_of

_Target = tuple[Overlap, torch.Tensor]  # the overlap's first region is the stored one


def load_checkpoint(
    folder: Path | str,
    tensors: Mapping[str, torch.Tensor],
    *,
    pieces: Iterable[TensorPiece] = (),
    only: str = "",
    prefix: str = "",
    partial: bool = False,
    verify: bool = True,
) -> CheckpointManifest:
    """Load a checkpoint's tensors in place.

    Args:
        folder: the checkpoint.
        tensors: name to the whole tensor that is overwritten, such as a model's `state_dict()`.
        pieces: what this process holds of tensors that are spread over ranks; of each at least one, empty or not.
        only: load just the names with this prefix, such as `model.`; others in the checkpoint are left alone.
        prefix: what the checkpoint's names have before those of `tensors`, such as `model.`; names without it are left
            alone. Pieces are named in full.
        partial: leave alone what the checkpoint has and nothing here takes, instead of refusing it.
        verify: compare what is read with the SHA-256 of when it was written.

    Returns:
        The manifest, with the JSON state.

    Raises:
        CheckpointError: names of checkpoint and `tensors` differ, a dtype or shape differs, rows or columns are in no
            piece or in several, or numbers differ that are one tensor here; nothing was loaded then. Or a file is
            missing or damaged: tensors may be overwritten in part.

    Example:
        >>> load_checkpoint(folder, model.state_dict(), prefix="model.")
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    wanted = [whole(prefix + name, tensor.detach()) for name, tensor in tensors.items()] + list(pieces)
    begin = only or prefix
    stored = {name: entry for name, entry in manifest.tensors.items() if name.startswith(begin)}
    _check_names(folder, stored, {piece.name for piece in wanted}, partial)
    for piece in wanted:
        _check_fit(manifest, stored[piece.name], piece)
    _check_complete(manifest, {piece.name for piece in wanted})
    _check_folder(manifest)
    _check_shared(manifest, wanted, verify)
    _take(manifest, wanted, verify)
    return manifest


def verify_checkpoint(folder: Path | str) -> CheckpointManifest:
    """Read a whole checkpoint and compare it with its checksums; nothing is loaded.

    Args:
        folder: the checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: naming the file, tensor and rows that are missing, extra, there twice, or changed.
    """
    manifest = read_manifest(folder)
    _check_folder(manifest)
    _check_complete(manifest, manifest.tensors.keys())
    for file, pieces in _by_file(manifest).items():
        with _opened(manifest, file, pieces, verify=True) as stream:
            for name, piece in pieces:
                _read(stream, name, manifest.tensors[name], piece, None, verify=True)
    return manifest


def _check_names(folder: Path, stored: Mapping[str, Any], wanted: set[str], partial: bool) -> None:
    missing, extra = sorted(wanted - stored.keys()), [] if partial else sorted(stored.keys() - wanted)
    if missing or extra:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has {_listed(extra)}, which nothing here takes"] if extra else []
        raise CheckpointError(f"{folder}: the checkpoint {' and '.join(parts)}.", RELOAD)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_fit(manifest: CheckpointManifest, stored: StoredTensor, piece: TensorPiece) -> None:
    dtype = str(piece.dtype).removeprefix("torch.")
    if (dtype, piece.global_shape) != (stored.dtype, stored.shape):
        raise CheckpointError(
            f"{manifest.folder}: {piece.name!r} is {stored.dtype} {list(stored.shape)}, "
            f"here it is {dtype} {list(piece.global_shape)}.",
            "Load it with the recipe and schema it was trained with.",
        )


def _check_complete(manifest: CheckpointManifest, names: Iterable[str]) -> None:
    for name in sorted(names):
        if (problem := manifest.tensors[name].find_problem()) is not None:
            raise manifest.damaged(manifest.folder, f"{name!r}: {problem}")


def _check_folder(manifest: CheckpointManifest) -> None:
    """A file too many, too few, cut short, or outside: a checkpoint may come from elsewhere, nothing else is read."""
    extra = {path.name for path in manifest.folder.glob("*.safetensors")} - manifest.files.keys()
    if extra:
        raise manifest.damaged(manifest.folder / min(extra), "not in the checkpoint's manifest")
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if Path(name).name != name or path.is_symlink():
            raise manifest.damaged(manifest.folder, f"the file {name!r} of its manifest lies outside of it")
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise manifest.damaged(path, f"{found}, {entry['bytes']} bytes are expected")
    unlisted = {piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces} - manifest.files.keys()
    if unlisted:
        raise manifest.damaged(manifest.folder, f"a piece is in {min(unlisted)!r}, which its manifest does not list")


def _check_shared(manifest: CheckpointManifest, wanted: Iterable[TensorPiece], verify: bool) -> None:
    """Tables of one storage have one number of updates: of two in the checkpoint, the last one read would hold."""
    groups: dict[int, list[TensorPiece]] = {}
    for piece in wanted:
        if not piece.tensor.dim() and piece.tensor.device.type == "cpu":
            groups.setdefault(piece.tensor.data_ptr(), []).append(piece)
    shared = [
        [replace(piece, tensor=torch.zeros_like(piece.tensor)) for piece in group]
        for group in groups.values()
        if len({piece.name for piece in group}) > 1
    ]
    if shared:
        _take(manifest, [piece for group in shared for piece in group], verify)
    for first, *others in shared:
        for other in others:
            if not torch.equal(first.tensor, other.tensor):
                raise CheckpointError(
                    f"{manifest.folder}: {first.name!r} is {first.tensor.item()} and {other.name!r} is "
                    f"{other.tensor.item()}; here they are one number.",
                    RELOAD,
                )


def _take(manifest: CheckpointManifest, wanted: Iterable[TensorPiece], verify: bool) -> None:
    pieces_by_file = _by_file(manifest)
    for file, reads in _plan_reads(manifest.tensors, wanted).items():
        with _opened(manifest, file, pieces_by_file[file], verify) as stream:
            for (name, piece), targets in reads.items():
                _read(stream, name, manifest.tensors[name], piece, targets, verify)


def _plan_reads(
    stored: Mapping[str, StoredTensor], wanted: Iterable[TensorPiece]
) -> dict[str, dict[tuple[str, StoredPiece], list[_Target]]]:
    """File to stored piece to the targets that take from it, so that every block is read once."""
    work: dict[str, dict[tuple[str, StoredPiece], list[_Target]]] = {}
    for piece in wanted:
        for source in stored[piece.name].pieces:
            overlap = intersect(source.region, piece.region)
            if overlap is not None:
                reads = work.setdefault(source.file, {})
                reads.setdefault((piece.name, source), []).append((overlap, piece.tensor.detach()))
    return work


def _by_file(manifest: CheckpointManifest) -> dict[str, list[tuple[str, StoredPiece]]]:
    found: dict[str, list[tuple[str, StoredPiece]]] = {file: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            found[piece.file].append((name, piece))
    return found


@contextmanager
def _opened(
    manifest: CheckpointManifest, file: str, pieces: Iterable[tuple[str, StoredPiece]], verify: bool
) -> Iterator[SafetensorsFile]:
    path, entry = manifest.folder / file, manifest.files[file]
    if verify and manifest.version == 1 and sha256_of(path) != entry["sha256"]:
        raise manifest.damaged(path, "its contents changed since it was written")
    listed = {key_in_file(name, manifest.tensors[name].shape, piece.region) for name, piece in pieces}
    try:
        with SafetensorsFile(path) as stream:
            if extra := sorted(stream.keys() - listed):
                raise ValueError(f"it holds {extra[0]!r}, which the checkpoint's manifest does not list")
            if verify and manifest.version > 1 and stream.header_sha256 != entry["header_sha256"]:
                raise ValueError("its contents changed since it was written: the header")
            yield stream
    except (OSError, ValueError) as error:
        raise manifest.damaged(path, str(error)) from None


def _read(
    stream: SafetensorsFile,
    name: str,
    tensor: StoredTensor,
    piece: StoredPiece,
    targets: list[_Target] | None,
    verify: bool,
) -> None:
    """Copy the rows of a stored piece to those that take them; without targets, read all of it."""
    key = key_in_file(name, tensor.shape, piece.region)
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype not in safetensors_storage.SAFETENSORS_DTYPES:
        raise ValueError(f"{name!r} has an unknown dtype {tensor.dtype!r}")
    shape = shape_in_file(tensor.shape, piece.region)
    if (problem := stream.find_problem(key, dtype, shape)) is not None:
        raise ValueError(problem)
    block_rows = piece.block_rows
    if not piece.sha256:
        row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        block_rows = max(1, safetensors_storage.BLOCK_BYTES // max(1, row_bytes))
    for number, first, stop in blocks_of(piece.region.num_rows, block_rows):
        parts = None if targets is None else [part for target in targets if (part := _part(first, stop, target))]
        if parts == []:
            continue
        digest = piece.sha256[number] if verify and piece.sha256 else None
        block = stream.block(key, dtype, shape, first, stop, digest)
        for source_rows, target_rows, overlap, target in parts or ():
            source = block[source_rows]
            if target.dim() > 1:
                source = source[:, slice(*overlap.first_columns)]
                target[target_rows, slice(*overlap.second_columns)].copy_(source)
            elif target.dim():
                target[target_rows].copy_(source)
            else:
                target.copy_(source[0])


def _part(first: int, stop: int, target: _Target) -> tuple[slice, slice, Overlap, torch.Tensor] | None:
    """The rows of an overlap that lie in a block, as slices of the block and of the target."""
    overlap, tensor = target
    (start, step), (target_start, target_step) = overlap.first, overlap.second
    begin = max(0, -((start - first) // step))
    end = min(overlap.num_rows, -((start - stop) // step))
    if begin >= end:
        return None
    source_first = start + begin * step - first
    source_last = start + (end - 1) * step - first
    target_first, target_last = target_start + begin * target_step, target_start + (end - 1) * target_step
    return (
        slice(source_first, source_last + 1, step),
        slice(target_first, target_last + 1, target_step),
        overlap,
        tensor,
    )
