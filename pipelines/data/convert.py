"""Click logs to training Parquet: streaming, parallel, resumable, all or nothing.

OUT is a plain Parquet data set: `*.parquet`, and `_manifest.json` (readers of Parquet folders skip names with `_`). It
is built in `.OUT.partial` beside it and appears when it is complete. The partial folder keeps the units (files, or
ranges of large ones) that are finished, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.data.conversion_pool import run_units
from pipelines.data.conversion_state import (
    finished_units,
    plain_unit,
    remove_progress,
    remove_unfinished,
    take_over,
    write_progress,
)
from pipelines.data.conversion_unit import ConversionUnit, UnitResult, plan_units
from pipelines.data.inputs import InputFile, find_inputs
from pipelines.data.output_folder import OutputFolder, read_manifest
from pipelines.data.parquet_rows import open_parquet
from pipelines.data.readers import check_file
from pipelines.data.row_counts import RowCounts
from pipelines.data.training_parquet import WrittenFile
from tpurec.errors import DataError
from tpurec.features import Schema

KIND = "tpurec.converted"
VERSION = 1
MANIFEST = "_manifest.json"
# Without --max-bad-rows: one row in a thousand may be bad, and ten in any case.
DEFAULT_BAD_SHARE, DEFAULT_BAD_ROWS = 0.001, 10
_SHOWN_REJECTED = 3


@dataclass(frozen=True)
class ConvertResult:
    """What was made.

    Args:
        path: the folder.
        counts: of all rows.
        files: names and sizes of the Parquet files, in the order of the inputs.
        units: pieces of work in all.
        units_done_before: of these, how many an earlier run had done.
    """

    path: str
    counts: RowCounts
    files: tuple[WrittenFile, ...]
    units: int
    units_done_before: int


def convert_files(
    places: Sequence[str | Path],
    out: str | Path,
    schema: Schema,
    *,
    max_bad_rows: int | None = None,
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> ConvertResult:
    """Convert click logs.

    Args:
        places: files, folders or glob patterns; see `find_inputs`.
        out: the folder to make. If it exists and was made by this function with the same schema from some of the same
            inputs, only what is new or changed is converted.
        schema: of the rows.
        max_bad_rows: fail beyond this many rejected rows; None: beyond one in a thousand and ten.
        workers: processes; with 1, this one does the work.
        overwrite: replace an OUT that was made with another schema or from other inputs.
        progress: called with the number of rows just read.

    Returns:
        What was made, with counts.

    Raises:
        DataError: no input, a column absent or of a wrong type (before any work), broken input, too many bad rows, no
            row left, an OUT that may not be replaced, or one of the inputs and OUT lies in the other.
    """
    inputs = find_inputs(places, schema.input.delimiter)
    _refuse_nested(places, inputs, Path(out))
    check_inputs(inputs, schema)
    units = [unit for index, file in enumerate(inputs) for unit in plan_units(index, file)]
    digest = hashlib.sha256(schema.to_text().encode()).hexdigest()
    existing = read_manifest(Path(out) / MANIFEST, KIND)
    if existing is not None and not overwrite:
        _refuse_other(existing, digest, units, Path(out))
    done_before = finished_units(existing, digest, units, Path(out))
    if existing is not None and len(done_before) == len(units) == len(existing["units"]):
        return _result(out, [done_before[unit.stem] for unit in units], len(units))
    with OutputFolder(out, KIND, MANIFEST, overwrite=existing is not None) as folder:
        done = take_over(folder, existing, digest, units)
        taken = len(done)
        try:
            _judge(done.values(), max_bad_rows, final=False)
            waiting = [unit for unit in units if unit.stem not in done]
            results = run_units(waiting, folder.partial, schema, max_bad_rows, workers, progress)
            with contextlib.closing(results):  # whatever happens here, its processes end before the folder is tidied
                for result in results:
                    done[result.unit.stem] = result
                    _judge(done.values(), max_bad_rows, final=False)
                    write_progress(folder.partial, digest, done.values())
            ordered = [done[unit.stem] for unit in units]
            _judge(ordered, max_bad_rows, final=True)
        except UnfitRows:
            raise
        except BaseException:
            # Files that are finished stay for the same command run again, out of sight of readers.
            folder.keep_partial = bool(done)
            remove_unfinished(folder.partial)
            raise
        remove_progress(folder.partial)
        folder.publish(_manifest(schema, digest, ordered))
    return _result(out, ordered, taken)


class UnfitRows(DataError):
    """Too many rows were rejected, or none is left: nothing of this conversion is worth keeping."""


def check_inputs(inputs: Sequence[InputFile], schema: Schema) -> None:
    """Check names and types of the columns of all inputs; no row is read.

    Args:
        inputs: the files.
        schema: what the rows must have.

    Raises:
        DataError: naming file and column.
    """
    labels = schema.label is not None
    key_types: dict[str, tuple[Any, InputFile]] = {}
    for file in inputs:
        check_file(file, schema, labels=labels)
        types = dict.fromkeys(schema.keys, "string")
        if file.format == "parquet":
            with open_parquet(file) as parquet:
                types = {key: str(parquet.schema_arrow.field(key).type) for key in schema.keys}
        for key, type_ in types.items():
            known, first = key_types.setdefault(key, (type_, file))
            if known != type_:
                raise DataError(
                    f"{file}: key column {key!r} is {type_}, in {first} it is {known}.",
                    "Give it one type in all files.",
                )


def _refuse_nested(places: Sequence[str | Path], inputs: Sequence[InputFile], out: Path) -> None:
    """OUT in an input folder would be an input of the next run; an input in OUT would go when OUT is replaced."""
    target = out.resolve()
    for folder in (Path(place) for place in places if Path(place).is_dir()):
        if folder.resolve() == target or folder.resolve() in target.parents:
            raise DataError(f"{out}: lies in the input folder {folder}.", "Choose an OUT beside it.")
    inside = next((file for file in inputs if target in file.path.resolve().parents), None)
    if inside is not None:
        raise DataError(f"{inside}: is an input, and lies in {out}, which is to be written.", "Choose another OUT.")


def _refuse_other(existing: dict[str, Any], digest: str, units: Sequence[ConversionUnit], out: Path) -> None:
    remedy = "Add --overwrite to replace it, or choose another OUT."
    if existing["schema_sha256"] != digest:
        raise DataError(f"{out}: was made with another schema ({existing['schema']!r}).", remedy)
    paths = {unit.identity()["path"] for unit in units}
    for unit in existing["units"]:
        if unit["path"] not in paths:
            raise DataError(f"{out}: holds rows of {unit['path']}, which is not among the inputs.", remedy)


def _manifest(schema: Schema, digest: str, ordered: Sequence[UnitResult]) -> dict[str, Any]:
    counts = _total(ordered)
    return {
        "version": VERSION,
        "schema": schema.name,
        "schema_fingerprint": schema.fingerprint(),
        "schema_sha256": digest,
        "rows": counts.kept,
        "counts": counts.to_plain(),
        "files": [dataclasses.asdict(file) for result in ordered for file in result.files],
        "units": [plain_unit(result) for result in ordered],
    }


def _result(out: str | Path, ordered: Sequence[UnitResult], taken: int) -> ConvertResult:
    files = tuple(file for result in ordered for file in result.files)
    return ConvertResult(str(out), _total(ordered), files, len(ordered), taken)


def _total(results: Any) -> RowCounts:
    counts = RowCounts()
    for result in results:
        counts += result.counts
    return counts


def _judge(results: Any, max_bad_rows: int | None, final: bool) -> None:
    """Raise if there are too many bad rows; at the end also if no row is left."""
    results = list(results)
    counts = _total(results)
    gave_up = any(result.gave_up for result in results)
    limit = max_bad_rows
    if limit is None:
        limit = max(DEFAULT_BAD_ROWS, int(DEFAULT_BAD_SHARE * counts.read))
    over = counts.num_rejected > limit and (final or gave_up or max_bad_rows is not None)
    if over:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.rejected.items()))
        first = "; ".join(map(str, counts.examples[:_SHOWN_REJECTED]))
        raise UnfitRows(
            f"{counts.num_rejected:,} of {counts.read:,} rows read{'' if final else ' so far'} are bad ({reasons}), "
            f"at most {limit:,} may be: {first}.",
            "Correct the files or the schema, or raise --max-bad-rows.",
        )
    if final and counts.kept == 0:
        raise UnfitRows(
            f"no row is left of the {counts.read:,} rows read." if counts.read else "the inputs hold no rows.",
            "Check the inputs.",
        )
