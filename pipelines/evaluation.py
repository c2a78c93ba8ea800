"""Evaluation: every row of the batches scored exactly once. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from pipelines.metrics import PredictionLog
from pipelines.reading import SourceBatch
from tpurec.embeddings import to_torch
from tpurec.errors import TpurecError


def evaluate(
    model: nn.Module, batches: Iterable[SourceBatch], each: Callable[[np.ndarray], None] | None = None
) -> dict[str, Any]:
    """Score batches and compute metrics over all their rows.

    Args:
        model: `forward(dense, kjt) -> logits [B]`; left in evaluation mode.
        batches: padded rows are left out, rows without a label are scored but are in no metric.
        each: called for every batch with its logits, float32 [num_rows], in the order of the rows.

    Returns:
        The metrics of `PredictionLog.metrics`.

    Raises:
        TpurecError: a score is not a finite number.
    """
    model.eval()
    log = PredictionLog()
    with torch.inference_mode():
        for item in batches:
            packed = item.packed
            batch = to_torch(packed)
            logits = model(batch.dense, batch.features).numpy()[: packed.num_rows]
            if not np.isfinite(logits).all():
                raise TpurecError(
                    f"{(~np.isfinite(logits)).sum()} of {len(logits)} scores of a batch are not finite numbers.",
                    "The training diverged: lower train.learning_rate and tables.learning_rate.",
                )
            valid = packed.valid[: packed.num_rows]
            log.add(logits[valid], packed.labels[: packed.num_rows][valid], packed.num_rows)
            if each is not None:
                each(logits)
    return log.metrics()
