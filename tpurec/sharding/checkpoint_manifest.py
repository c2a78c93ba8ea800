"""What `manifest.json` of a checkpoint says: step and state, the tensors, and which piece of each is in which file.

Version 2. Version 1 (whole tensors, one checksum a file) is read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

from tpurec.errors import TpurecError
from tpurec.sharding.regions import Region, find_gap_or_clash

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_SEAL = ',\n "sha256": "'
RELOAD = "Load it with the model, tables and optimizers it was trained with."


class CheckpointError(TpurecError):
    """A checkpoint that cannot be written or read, or does not fit the model and optimizers it is loaded into."""


@dataclass(frozen=True)
class StoredPiece:
    """Rows and columns of a tensor in one file.

    Args:
        file: its name.
        region: what it holds.
        block_rows: rows that one checksum covers; the last block may have fewer.
        sha256: of the blocks; empty in version 1, which has one checksum a file.
    """

    file: str
    region: Region
    block_rows: int
    sha256: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks its rows make."""
        return ceil(self.region.num_rows / self.block_rows)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        dtype: such as `float32`.
        shape: of the whole tensor.
        pieces: together every row and column of it.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def find_problem(self) -> str | None:
        """Check that the pieces hold every row and column exactly once.

        Returns:
            None, or what is missing or there twice.
        """
        return find_gap_or_clash([piece.region for piece in self.pieces], *rows_and_columns(self.shape))


@dataclass(frozen=True)
class CheckpointManifest:
    """What `manifest.json` of one checkpoint says.

    Args:
        folder: the checkpoint.
        step: optimizer steps done.
        score: how good it is, higher is better; None if it was not evaluated.
        state: the caller's JSON state.
        tensors: by name.
        files: name to `bytes` and `header_sha256` (version 1: `sha256` of the whole file).
        world_size: ranks that wrote it.
        version: of the format.
    """

    folder: Path
    step: int
    score: float | None
    state: dict[str, Any]
    # Not shown by repr: a notebook's last line would fill pages.
    tensors: dict[str, StoredTensor] = field(repr=False)
    files: dict[str, dict[str, Any]] = field(repr=False)
    world_size: int = 1
    version: int = FORMAT_VERSION

    def damaged(self, path: Path, what: str) -> CheckpointError:
        """An error for a file that is not as it was written.

        Args:
            path: the file.
            what: what is wrong with it.

        Returns:
            The error, to be raised.
        """
        return CheckpointError(f"{path}: {what}.", use_older(self.folder))


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """See a tensor as rows and columns.

    Args:
        shape: of any tensor.

    Returns:
        Sizes of the first two dimensions; 1 for one that it does not have.
    """
    rows, columns = (*shape, 1, 1)[:2]
    return rows, columns


def whole_region(shape: tuple[int, ...]) -> Region:
    """All rows and columns of a tensor.

    Args:
        shape: of any tensor.

    Returns:
        The region.
    """
    rows, columns = rows_and_columns(shape)
    return Region(0, 1, rows, 0, columns)


def key_in_file(name: str, shape: tuple[int, ...], region: Region) -> str:
    """What a piece is called in its safetensors file.

    Args:
        name: of the tensor.
        shape: of the whole tensor.
        region: of the piece.

    Returns:
        The name; with the slice behind it, in NumPy's notation, if the piece is not the whole.

    Example:
        >>> key_in_file("t.weight", (1000, 64), Region(1, 4, 250, 0, 64))
        't.weight[1:998:4, 0:64]'
    """
    if region == whole_region(shape):
        return name
    text = str(region)
    return name + (text if len(shape) > 1 else text.split(",")[0] + "]")


def shape_in_file(shape: tuple[int, ...], region: Region) -> tuple[int, ...]:
    """The shape of a piece.

    Args:
        shape: of the whole tensor.
        region: of the piece.

    Returns:
        `(rows, columns, ...)`, with as many dimensions as the tensor.
    """
    return (region.num_rows, region.num_columns, *shape[2:])[: len(shape)]


def manifest_text(
    step: int,
    score: float | None,
    state: str,
    world_size: int,
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, Mapping[str, Any]],
) -> str:
    """Write a manifest, one tensor a line.

    Args:
        step: as in `CheckpointManifest`.
        score: as there.
        state: as JSON text.
        world_size: ranks that wrote it.
        tensors: as there.
        files: as there.

    Returns:
        JSON text.
    """
    head = {"version": FORMAT_VERSION, "step": step, "score": score, "world_size": world_size}
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
    lines.append(f' "state": {state}')
    lines.append(f' "files": {_object(files)}')
    lines.append(f' "tensors": {_object({name: _tensor_json(tensor) for name, tensor in tensors.items()})}')
    return sealed("{\n" + ",\n".join(lines))


def sealed(body: str) -> str:
    """End a manifest with its own checksum: a flipped digit in the state would else resume somewhere else.

    Args:
        body: a JSON object up to its last value.

    Returns:
        The object, with the SHA-256 of `body` as its last value.
    """
    return f'{body}{_SEAL}{sha256(body.encode()).hexdigest()}"\n}}\n'


def read_manifest(folder: Path | str) -> CheckpointManifest:
    """Read a checkpoint's manifest.

    Args:
        folder: the checkpoint.

    Returns:
        Its contents.

    Raises:
        CheckpointError: there is none, it is a link or damaged, or its version is not known.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if path.is_symlink():  # as `checkpoint_load` says of the other files: nothing outside of the folder is read
        raise CheckpointError(f"{path}: is a link; a checkpoint's files are its own.", "Copy what it links to.")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
        version = values["version"]
        if version in (1, FORMAT_VERSION):
            body, seal, _ = text.rpartition(_SEAL)
            if (seal or version != 1) and sealed(body) != text:
                raise ValueError("its contents changed since it was written")
            return _read(folder, values, version)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: not a checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.", use_older(folder)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # no UTF-8, no JSON, or others
        raise CheckpointError(f"{path}: damaged ({error!r}).", use_older(folder)) from None
    raise CheckpointError(
        f"{path}: format version {version}; this software reads versions 1 and {FORMAT_VERSION}.",
        "Use a matching version.",
    )


def use_older(folder: Path) -> str:
    """The remedy for a damaged checkpoint.

    Args:
        folder: the checkpoint.

    Returns:
        One sentence.
    """
    return f"Remove the folder {folder} to go on from an older checkpoint."


def _object(values: Mapping[str, Any]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


def _tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    pieces = [
        {
            "file": piece.file,
            "rows": [piece.region.row_start, piece.region.row_step, piece.region.num_rows],
            "columns": [piece.region.column_start, piece.region.column_stop],
            "block_rows": piece.block_rows,
            "sha256": list(piece.sha256),
        }
        for piece in tensor.pieces
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}


def _read(folder: Path, values: dict[str, Any], version: int) -> CheckpointManifest:
    checksum = "sha256" if version == 1 else "header_sha256"
    files = {
        name: {"bytes": _int(entry["bytes"]), checksum: _text(entry[checksum])}
        for name, entry in values["files"].items()
    }
    score = values["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float, type(None))):
        raise TypeError(f"the score is {score!r}")
    return CheckpointManifest(
        folder,
        _int(values["step"]),
        score,
        dict(values["state"]),
        _read_tensors_of_version_1(values) if version == 1 else _read_tensors(values),
        files,
        1 if version == 1 else _int(values["world_size"]),
        version,
    )


def _read_tensors(values: dict[str, Any]) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in values["tensors"].items():
        pieces = []
        for piece in entry["pieces"]:
            start, step, number = map(_int, piece["rows"])
            first, stop = map(_int, piece["columns"])
            digests = tuple(map(_text, piece["sha256"]))
            region = Region(start, step, number, first, stop)
            stored = StoredPiece(_text(piece["file"]), region, _int(piece["block_rows"]), digests)
            if step < 1 or number < 0 or stored.block_rows < 1 or len(stored.sha256) != stored.num_blocks:
                raise ValueError(f"{name}: a piece of {stored.file} is not as it was written")
            pieces.append(stored)
        tensors[name] = StoredTensor(_text(entry["dtype"]), tuple(map(_int, entry["shape"])), tuple(pieces))
    return tensors


def _read_tensors_of_version_1(values: dict[str, Any]) -> dict[str, StoredTensor]:
    (file,) = values["files"]  # version 1 was written by one process only
    tensors = {}
    for name, entry in values["tensors"].items():
        shape = tuple(map(_int, entry["shape"]))
        # One block, cut up when it is read: there is no checksum that would fix its size.
        piece = StoredPiece(file, whole_region(shape), max(1, rows_and_columns(shape)[0]), ())
        tensors[name] = StoredTensor(_text(entry["dtype"]), shape, (piece,))
    return tensors


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
