"""Checkpoints of a training run: safetensors files and a JSON manifest, written by all ranks; no pickle.

A checkpoint is a folder `step-00001234` with one safetensors file a rank and `manifest.json` (`checkpoint_manifest`).
It is written beside its place, synced, and renamed, so a folder of that name is always complete. `docs/checkpoints.md`
has the format; `checkpoint_load.load_checkpoint` loads it on any number of ranks.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpurec.atomic import write_text
from tpurec.sharding.checkpoint_folder import (
    best_checkpoint,
    checkpoint_folder,
    give_up,
    list_checkpoints,
    prune,
    put_in_place,
    remove_leftovers,
    unfinished_folder,
)
from tpurec.sharding.checkpoint_load import load_checkpoint, verify_checkpoint
from tpurec.sharding.checkpoint_manifest import (
    FORMAT_VERSION,
    MANIFEST,
    CheckpointError,
    CheckpointManifest,
    manifest_text,
    read_manifest,
)
from tpurec.sharding.checkpoint_part import RankPart, merge, stored_tensors
from tpurec.sharding.checkpoint_ranks import Ranks
from tpurec.sharding.pieces import TensorPiece

if TYPE_CHECKING:
    import torch.distributed as dist

SECONDS_BETWEEN_LINES = 30.0  # of progress


@dataclass(frozen=True)
class CheckpointConfig:
    """The recipe's section [checkpoint]. Validation always writes one too, so that the best can be kept.

    Args:
        every_steps: steps between checkpoints; a killed run loses at most so many.
        keep_last: newest checkpoints to keep; the best one is kept besides.
        asynchronous: copy what a rank writes into host memory (as much again as it writes) and train on while a
            thread writes it.
    """

    every_steps: int = 1000
    keep_last: int = 2
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_last < 1:
            raise ValueError("every_steps and keep_last must be 1 or more")


class Checkpointer:
    """Saves checkpoints into one folder and keeps the last few and the best.

    Only one run may own the folder; what a killed owner left half-written is removed. Use it in a `with`, or call
    `wait` at the end, if it is asynchronous.

    Args:
        folder: holds the checkpoints; made if needed. All ranks see the same one.
        keep_last: newest checkpoints to keep; the best one is kept besides.
        process_group: the ranks that save together; each of them makes a Checkpointer and calls `save` for the same
            steps. None for this process alone.
        asynchronous: let a thread write, at most one checkpoint at a time; `save` returns after a copy into host memory
            of what this rank writes.
        log: takes a line of progress now and then while a checkpoint takes long; rank 0's is called.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        asynchronous: bool = False,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._log = log
        self._ranks = Ranks(process_group)
        self._asynchronous = asynchronous
        # Whether the thread has ended. Not its `join`: interrupted in there, Python believes that it has (gh-90882).
        self._ended: threading.Event | None = None
        self._failure: BaseException | None = None
        self._cancelled = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        if self._ranks.rank == 0:
            remove_leftovers(folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        score: float | None = None,
        *,
        pieces: Iterable[TensorPiece] = (),
    ) -> Path:
        """Write one checkpoint, then remove those that need not be kept.

        Args:
            step: optimizer steps done; names the checkpoint. One of the same step is replaced.
            tensors: name to whole tensor, alike on every rank: rank 0's are written. Read before this returns.
            state: everything else; plain JSON values, no NaN. Rank 0's is written.
            score: how good it is, higher is better; None if it was not evaluated.
            pieces: what this rank holds of tensors that are spread over ranks. Read before this returns.

        Returns:
            The checkpoint's folder; if asynchronous, it appears later.

        Raises:
            CheckpointError: it cannot be written, such as on a full disk, or another rank could not write its part;
                nothing is left of it then. If asynchronous, the one before could not.
        """
        self.wait()
        text = json.dumps(dict(state), allow_nan=False)
        final = checkpoint_folder(self.folder, step)
        part: RankPart | None = None
        problem: BaseException | None = None
        try:
            part = RankPart(self._ranks.rank, tensors, pieces)
            if self._asynchronous:
                part.snapshot()
        except BaseException as error:
            problem = error  # raised once the other ranks know of it, which would else wait for this one

        def describe() -> dict[str, Any]:
            if part is None or problem is not None:
                raise problem or AssertionError
            return {"step": step, **part.describe()}

        def write() -> None:
            self._write(final, part, describe, lambda *stored: manifest_text(step, score, text, *stored))

        if self._asynchronous:
            self._start(write)
            if problem is not None and not isinstance(problem, Exception):  # an interrupt
                raise problem
        else:
            write()
        return final

    def wait(self) -> None:
        """Wait until the checkpoint in flight is complete; nothing to do if there is none.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._ended is not None:
            self._ended.wait()
            self._ended = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint in flight; after an error or an interrupt, give it up."""
        if kind is None:
            self.wait()
            return
        self._cancelled.set()
        if self._ended is not None:
            self._ended.wait()
            self._ended = self._failure = None
        self._cancelled.clear()

    def _start(self, write: Callable[[], None]) -> None:
        ended = self._ended = threading.Event()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._failure = error  # raised by the next `save` or `wait`
            finally:
                ended.set()

        # Not a daemon: a process that ends without `wait` still completes what it has begun.
        thread = threading.Thread(target=run, name="checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._ended = None
            raise

    def _write(
        self,
        final: Path,
        part: RankPart | None,
        describe: Callable[[], dict[str, Any]],
        manifest: Callable[..., str],
    ) -> None:
        """Write one checkpoint, all ranks together; rank 0 begins and finishes it."""
        what = f"{final}: cannot be written"
        unfinished = unfinished_folder(final)
        merged = {}

        def begin(descriptions: list[dict[str, Any]]) -> None:
            steps = {description["step"] for description in descriptions}
            if len(steps) > 1:
                raise CheckpointError(f"the ranks are at different steps, {sorted(steps)}")
            merged.update(merge(descriptions))
            _check_space(self.folder, sum(description["bytes"] for description in descriptions))
            unfinished.mkdir()

        def finish(written: list[dict[str, Any] | None]) -> None:
            tensors, files = stored_tensors(merged, written)
            write_text(unfinished / MANIFEST, manifest(self._ranks.size, tensors, files))
            put_in_place(unfinished)
            prune(self.folder, self.keep_last)

        try:
            self._ranks.together(what, describe, begin)
            assert part is not None, "describe would have raised"
            self._ranks.together(what, lambda: part.write(unfinished, self._progress(final, part.num_bytes)), finish)
        except BaseException:
            if self._ranks.rank == 0:
                give_up(final)
            raise

    def _progress(self, final: Path, total: int) -> Callable[[int], None]:
        started = said = time.monotonic()
        done = 0

        def progress(num_bytes: int) -> None:
            nonlocal done, said
            if self._cancelled.is_set():
                raise CheckpointError("given up, because the run ended")
            done += num_bytes
            now = time.monotonic()
            if self._ranks.rank == 0 and now - said >= SECONDS_BETWEEN_LINES:
                said = now
                of = f" by rank 0 of {self._ranks.size}" if self._ranks.size > 1 else ""
                rate = done / (now - started) / 1e6
                self._log(f"{final.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB written{of}, {rate:,.0f} MB/s")

        return progress


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"it needs {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free",
            "Free some space, lower checkpoint.keep_last, or give another folder.",
        )


__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManifest",
    "Checkpointer",
    "best_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "verify_checkpoint",
]
