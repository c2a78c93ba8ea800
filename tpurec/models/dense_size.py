"""How many parameters the dense part of a recipe's model has, without building it: the planner counts its memory."""

from __future__ import annotations

from itertools import pairwise

from tpurec.models.config import ModelConfig


def dense_parameters(model: ModelConfig, num_dense: int, num_sparse: int, embedding_dim: int) -> int | None:
    """Count the parameters outside the embedding tables.

    Args:
        model: the recipe's section.
        num_dense: dense features.
        num_sparse: sparse features.
        embedding_dim: columns of the tables.

    Returns:
        The number of scalars; None for `module:factory`, which only building it tells.

    >>> dense_parameters(ModelConfig(dense_hidden_sizes=[8], over_hidden_sizes=[8]), 13, 26, 16)
    3209
    """
    if ":" in model.name:
        return None
    if model.name == "deepfm":
        # torchrec.models.deepfm.SimpleDeepFMNN: two-layer dense arch, one layer as the deep part, one output layer.
        dense = _mlp([num_dense, model.hidden_layer_size, embedding_dim])
        deep = _mlp([(num_sparse + 1) * embedding_dim, model.deep_fm_dimension])
        return dense + deep + _mlp([embedding_dim + model.deep_fm_dimension + 1, 1])
    dense = _mlp([num_dense, *model.dense_hidden_sizes, embedding_dim])
    if model.name == "dlrm":
        # torchrec.models.dlrm.OverArch: dense features beside one dot product per pair of features.
        over_in = embedding_dim + num_sparse * (num_sparse + 1) // 2
        return dense + _mlp([over_in, *model.over_hidden_sizes, 1])
    over_in = (num_sparse + 1) * embedding_dim
    # torchrec.modules.crossnet.LowRankCrossNet: V [r, in], W [in, r] and a bias [in] a layer.
    cross = model.dcn_num_layers * (2 * model.dcn_low_rank_dim * over_in + over_in)
    return dense + cross + _mlp([over_in, *model.over_hidden_sizes, 1])


def _mlp(sizes: list[int]) -> int:
    return sum(inputs * outputs + outputs for inputs, outputs in pairwise(sizes))
