"""Evaluation: every row of the batches scored exactly once. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from pipelines.feed import DeviceFeed, Feed
from pipelines.metrics import PredictionLog
from pipelines.reading import SourceBatch
from pipelines.world import SINGLE, World
from tpurec.embeddings import TorchBatch
from tpurec.errors import TpurecError


def evaluate(
    model: nn.Module,
    batches: Iterable[SourceBatch],
    each: Callable[[np.ndarray], None] | None = None,
    *,
    feed: Feed | None = None,
    forward: Callable[[TorchBatch], torch.Tensor] | None = None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Score batches and compute metrics over all their rows.

    Args:
        model: `forward(dense, kjt) -> logits [B]`; left in evaluation mode.
        batches: padded rows are left out, rows without a label are scored but are in no metric.
        each: called for every batch with its logits, float32 [num_rows], in the order of the rows.
        feed: puts batches on the model's device; None for the CPU.
        forward: computes the logits of a batch with this model; None to call the model.
        world: the ranks, of which each has its share of every batch; all call this together.

    Returns:
        The metrics of `PredictionLog.metrics`, over the rows of all ranks.

    Raises:
        TpurecError: a score is not a finite number.
    """
    model.eval()
    log = PredictionLog()
    with torch.inference_mode():
        for ready in (feed or DeviceFeed())(batches):
            packed, batch = ready.item.packed, ready.batch()
            logits = model(batch.dense, batch.features) if forward is None else forward(batch)
            logits = logits.cpu().numpy()[: packed.num_rows]
            if not np.isfinite(logits).all():
                raise TpurecError(
                    f"{(~np.isfinite(logits)).sum()} of {len(logits)} scores of a batch are not finite numbers.",
                    "The training diverged: lower train.learning_rate and tables.learning_rate.",
                )
            valid = packed.valid[: packed.num_rows]
            log.add(logits[valid], packed.labels[: packed.num_rows][valid], packed.num_rows)
            if each is not None:
                each(logits)
    whole = log.gathered(world)
    return world.first_value(None if whole is None else whole.metrics())
