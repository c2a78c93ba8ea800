"""`--engine ray` of scoring: parts go to actors of Ray Data that hold the bundle; scored pieces come back in order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from pipelines.ray_session import ray_session
from pipelines.score_inputs import Inputs
from pipelines.scoring import BadRowRule, ScoredPiece, score_part
from tpurec.errors import DataError, TpurecError
from tpurec.extras import require
from tpurec.features import Counts

# A block is one scored piece; what is not a row of the output travels in the block's first row. (Ray Data does not keep
# the metadata of Arrow schemas, and an exception in a task would reach the driver as its text only.)
_NOTE = "tpurec.note"


class _Scorer:
    """What an actor runs.

    Args:
        bundle: path of the bundle.
        inputs: what the parts are parts of.
        rule: as in `score_part`.
        threads: torch threads.
    """

    def __init__(self, bundle: str, inputs: Inputs, rule: BadRowRule, threads: int) -> None:
        import torch

        from tpurec.bundle import Bundle

        torch.set_num_threads(threads)
        self._bundle = Bundle.load(bundle)
        self._inputs = inputs
        self._rule = rule

    def __call__(self, block: dict[str, Any]) -> Iterator[pa.Table]:
        for number in block["part"]:
            try:
                for piece in score_part(self._bundle, self._inputs, self._inputs.parts[number], self._rule):
                    yield _to_block(piece)
            except TpurecError as error:
                yield pa.table({_NOTE: [json.dumps({"error": [error.problem, error.remedy]})]})


def score_ray(bundle: str, inputs: Inputs, rule: BadRowRule) -> Iterator[ScoredPiece]:
    """Score parts in actors of Ray Data, one a core.

    Args:
        bundle: path of the bundle; like the inputs, on a file system that the actors see under the same path.
        inputs: what to score.
        rule: as in `score_part`.

    Yields:
        The scored pieces, in order.

    Raises:
        MissingExtra: Ray is not installed.
        DataError: as `score_part` says.
    """
    require("ray.data", "--engine ray")
    num_parts = len(inputs.parts)
    if not num_parts:
        return
    import ray.data

    with ray_session() as num_cpus, _in_order():
        items = ray.data.from_items([{"part": number} for number in range(num_parts)], override_num_blocks=num_parts)
        scored = items.map_batches(
            _Scorer,
            fn_constructor_args=(bundle, inputs, rule, 1),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=max(1, min(num_cpus, num_parts))),
            num_cpus=1,
        )
        for block in scored.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from _from_block(block)


@contextmanager
def _in_order() -> Iterator[None]:
    """Have Ray Data keep the order of its blocks, and draw no bars of its own."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before


def _to_block(piece: ScoredPiece) -> pa.Table:
    note = {"rows": len(piece.table), "bad_rows": piece.bad_rows, "first_bad": piece.first_bad}
    note["counts"] = dataclasses.asdict(piece.counts)
    if not len(piece.table):
        return pa.table({_NOTE: pa.array([], pa.string())})
    notes = pa.array([json.dumps(note)], pa.string())
    empty = pa.nulls(len(piece.table) - 1, pa.string())
    return piece.table.append_column(_NOTE, pa.chunked_array([notes, empty]))


def _from_block(block: pa.Table) -> Iterator[ScoredPiece]:
    start = 0
    while start < len(block):  # Ray may have put several pieces into one block
        note = json.loads(block.column(_NOTE)[start].as_py())
        if "error" in note:
            raise DataError(*note["error"])
        table = block.slice(start, note["rows"]).drop_columns([_NOTE])
        yield ScoredPiece(table, Counts(**note["counts"]), note["bad_rows"], note["first_bad"])
        start += note["rows"]
