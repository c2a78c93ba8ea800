"""Ids of a step that has not been seen: drawn from each table's statistics, the same for the same examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.host_batch import HostBatch
from tpurec.sharding.skew import draw_rows, exponent_of
from tpurec.sharding.tables import TableSpec


def draw_batch(
    tables: Sequence[TableSpec], assumptions: Assumptions, first: int, num_examples: int, weighted: bool = False
) -> HostBatch:
    """Draw some examples of the global batch.

    Args:
        tables: with their Zipf exponents or unique shares, and ids per example.
        assumptions: the exponent of tables without statistics.
        first: number of the first example; equal numbers give equal ids.
        num_examples: how many.
        weighted: with weights, all 1.

    Returns:
        Their ids, by Zipf's law; a bag has the mean number of ids, or one more where that is no whole number.
    """
    values, lengths, weights = {}, {}, {}
    for number, table in enumerate(tables):
        for place, feature in enumerate(table.features):
            random = np.random.default_rng((number, place, first))
            whole = int(feature.ids_per_example)
            extra = random.random(num_examples) < feature.ids_per_example - whole
            length = (whole + extra).astype(np.int32)
            exponent = exponent_of(table, assumptions.zipf_exponent)
            rows = draw_rows(table.num_embeddings, exponent, int(length.sum()), random)
            values[feature.name] = rows if table.num_embeddings >= 2**31 else rows.astype(np.int32)
            lengths[feature.name] = length
            if weighted:
                weights[feature.name] = np.ones(len(rows), dtype=np.float32)
    return HostBatch(num_examples, values, lengths, weights if weighted else None)
