"""A small sequence recommender: attention of the last movie over those before it, times the next one.

Named in the recipe as `examples.sequence.model:next_item`; `tpurec train` fuses its tables. A row of data has a
history, newest first, the movie that came next, and random movies that did not. The output is

    logit = s(next) - log(sum of exp(s(other)) over the others)

so that the train loop's log loss with a label of 1, -log(sigmoid(logit)), is the cross entropy of a softmax over the
next movie and the others: sampled softmax (Jean et al. 2015), in a recipe like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from tpurec.errors import ConfigError
from tpurec.features import Schema

HISTORY, NEXT, OTHERS = "history", "item", "others"


class NextItem(nn.Module):
    """Self-attention whose only query is the newest movie (one layer and one head of SASRec, Kang and McAuley 2018).

    Args:
        tables: one, which `history`, `item` and `others` share.
        history_length: movies that the attention sees.
        num_others: movies that the next one is compared with.
        dropout: of the history's vectors and of the user's vector, in training.
    """

    def __init__(self, tables: list[EmbeddingConfig], history_length: int, num_others: int, dropout: float) -> None:
        super().__init__()
        dim = tables[0].embedding_dim
        self.items = EmbeddingCollection(tables)
        self.history_length, self.num_others = history_length, num_others
        self.positions = nn.Parameter(torch.randn(history_length, dim) * 0.02)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """The logit that the next movie is told from the others.

        Args:
            dense: `[B, 0]`.
            features: the batch.

        Returns:
            float `[B]`.
        """
        found = self.items(features)
        user = self.user_vectors(found[HISTORY])
        following = found[NEXT].to_padded_dense(1).squeeze(1)
        others = found[OTHERS].to_padded_dense(self.num_others)
        against = torch.einsum("bd,bnd->bn", user, others)
        return (user * following).sum(1) - against.logsumexp(1)

    def user_vectors(self, history: JaggedTensor) -> Tensor:
        """What a user will want next; its dot product with a movie's row is the movie's score.

        Args:
            history: rows of the movies, newest first; those beyond `history_length` are not looked at.

        Returns:
            float `[B, embedding_dim]`; of users without a history the same vector.
        """
        rows = history.to_padded_dense(self.history_length)
        places = torch.arange(self.history_length, device=rows.device)
        is_there = places < history.lengths()[:, None]
        seen = self.dropout(rows + self.positions)
        attention = torch.einsum("bd,bld->bl", self.query(seen[:, 0]), self.key(seen)) * seen.shape[2] ** -0.5
        attention = attention.masked_fill(~is_there, -1e9).softmax(1)
        context = torch.einsum("bl,bld->bd", attention, self.value(seen))
        newest = seen[:, 0] * is_there[:, :1]
        return newest + context + self.output(self.dropout(torch.cat([newest, context], 1)))


def next_item(
    tables: list[EmbeddingBagConfig],
    schema: Schema,
    *,
    history_length: int,
    num_others: int,
    dropout: float = 0.0,
) -> NextItem:
    """What the recipe names.

    Args:
        tables: of the recipe.
        schema: of the data.
        history_length: movies that the attention sees, 1 or more.
        num_others: movies that the next one is compared with, as many as a row of the data has.
        dropout: 0 up to, but not, 1.

    Returns:
        The model.

    Raises:
        ConfigError: features that do not share one table, or a value out of range.
    """
    names = {feature.name for feature in schema.sparse}
    if len(tables) != 1 or names != {HISTORY, NEXT, OTHERS}:
        raise ConfigError(
            f"the schema {schema.name!r} has features {', '.join(sorted(names))} in {len(tables)} tables.",
            f"This model needs {HISTORY}, {NEXT} and {OTHERS} in one.",
        )
    if history_length < 1 or num_others < 1 or not 0 <= dropout < 1:
        raise ConfigError(
            f"model.options: history_length = {history_length}, num_others = {num_others}, dropout = {dropout}.",
            "Lengths must be 1 or more, dropout from 0 up to below 1.",
        )
    table = tables[0]
    unpooled = EmbeddingConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        data_type=table.data_type,
    )
    return NextItem([unpooled], history_length, num_others, dropout)
