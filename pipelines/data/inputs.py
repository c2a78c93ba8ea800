"""Which files a command reads: files, folders and glob patterns, and what kind of file each is."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpurec.errors import DataError

_TEXT_DELIMITERS = {".tsv": "\t", ".txt": "\t", "": "\t", ".csv": ","}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Args:
        path: where it is.
        format: `parquet` or `text`.
        compression: of a text file: `gzip`, `zstd` or none.
        delimiter: between the fields of a text file, by its name; a schema may say otherwise.
    """

    path: Path
    format: Literal["parquet", "text"]
    compression: Literal["gzip", "zstd"] | None = None
    delimiter: str = "\t"

    def __str__(self) -> str:
        return str(self.path)


def find_inputs(places: Sequence[str | Path], delimiter: str | None = None) -> list[InputFile]:
    """Find the files of some places.

    Args:
        places: files, folders (searched in depth for .parquet, .tsv, .txt and .csv, the text also with .gz or .zst) or
            glob patterns. A file named outright may also have no ending (Criteo's `day_0`), which means TSV.
        delimiter: of text files, from the schema; with it a file named outright may have any ending.

    Returns:
        The files in the order of `places`, sorted within each, each once. Names that start with `.` or `_` are left out
        of folders.

    Raises:
        DataError: a place that does not exist or holds no such file, or a file of unknown kind.
    """
    found: dict[Path, InputFile] = {}
    for place in places:
        path = Path(place)
        if path.is_dir():
            files = [file for file in (_kind(entry) for entry in _in_depth(path)) if file is not None]
            if not files:
                raise DataError(
                    f"{place}: no .parquet, .tsv, .txt or .csv file (text also .gz, .zst) in this folder.",
                    "Check the path.",
                )
        else:
            matches = (
                [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
            )
            files = [_named(match, delimiter) for match in matches if match.is_file()]
            if not files:
                raise DataError(f"{place}: no such file or folder.", "Check the path.")
        for file in files:
            found.setdefault(file.path, file)
    return list(found.values())


def _in_depth(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if not any(part[0] in "._" for part in path.relative_to(folder).parts)]


def _named(path: Path, delimiter: str | None) -> InputFile:
    file = _kind(path, named=True)
    if file is not None:
        return file
    if delimiter is not None:
        return InputFile(path, "text", _COMPRESSIONS.get(path.suffix), delimiter)
    raise DataError(
        f"{path}: not a known kind of file.",
        "Known are .parquet, .tsv, .txt and .csv (text also .gz, .zst); or set input.delimiter in the schema.",
    )


def _kind(path: Path, named: bool = False) -> InputFile | None:
    if path.suffix == ".parquet":
        return InputFile(path, "parquet")
    compression = _COMPRESSIONS.get(path.suffix)
    ending = Path(path.stem).suffix if compression else path.suffix
    if ending not in _TEXT_DELIMITERS or (ending == "" and not (named or compression)):
        return None
    return InputFile(path, "text", compression, _TEXT_DELIMITERS[ending])
