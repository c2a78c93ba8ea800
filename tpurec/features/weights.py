"""Weights of ids: one finite number per id, matched before any id is left out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tpurec.features.arrow_columns import Bags, numbers
from tpurec.features.feature_specs import SparseFeature
from tpurec.features.problems import Problem


def match_weights(ids: Bags, weights: Bags, feature: SparseFeature, problems: list[Problem]) -> tuple[Bags, np.ndarray]:
    """Bring ids and weights together; rows where their numbers differ are reported and emptied.

    Args:
        ids: bags of ids [num_values], blanks still in them.
        weights: bags of weights, of as many examples.
        feature: the weighted feature.
        problems: where to report.

    Returns:
        The ids of rows where the numbers agree, and their weights, float32 [num_values], NaN where blank.
    """
    values = weights.values
    if ids.lengths is None or np.array_equal(ids.lengths, weights.lengths):
        return ids, _float32(values)
    good = ids.lengths == weights.lengths
    bad = np.flatnonzero(~good)
    num_ids, num_weights = ids.lengths[bad], weights.lengths[bad]
    problems.append(
        Problem(
            feature.weights,
            "weights_mismatch",
            bad,
            lambda k: f"{num_weights[k]} weights for {num_ids[k]} ids of sparse feature {feature.name!r}",
            "Give one weight per id.",
        )
    )
    kept_ids = ids.values.filter(pa.array(np.repeat(good, ids.lengths)))
    kept_weights = values.filter(pa.array(np.repeat(good, weights.lengths)))
    return Bags(kept_ids, np.where(good, ids.lengths, 0)), _float32(kept_weights)


def refuse_bad_weights(
    ids: Bags, has_id: np.ndarray, weights: np.ndarray, feature: SparseFeature, problems: list[Problem]
) -> None:
    """Report weights that are blank or not finite although there is an id.

    Args:
        ids: as `match_weights` returns them.
        has_id: bool [num_values], false where the id is a blank (its weight does not matter).
        weights: as `match_weights` returns them.
        feature: the weighted feature.
        problems: where to report.
    """
    bad = np.flatnonzero(has_id & ~np.isfinite(weights))
    if len(bad):
        problems.append(
            Problem(
                feature.weights,
                "bad_weight",
                ids.row_of(bad),
                lambda k: f"weight of an id of sparse feature {feature.name!r} is blank or not finite",
                "Give one finite weight per id.",
            )
        )


def _float32(values: pa.Array) -> np.ndarray:
    return numbers(values).astype(np.float32)
