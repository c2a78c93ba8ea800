"""Two towers: a vector for the user, one for the movie, and their dot product as the logit.

Named in the recipe as `examples.two_tower.model:two_tower`; `tpurec train` fuses its tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tpurec.errors import ConfigError
from tpurec.features import Schema


class TwoTower(nn.Module):
    """Both towers are the sum of an id's row and a linear map of the other features' rows.

    Args:
        tables: all of one embedding_dim.
        user_features: of the user's tower, its id first.
        item_features: of the movie's tower, its id first.
    """

    def __init__(self, tables: list[EmbeddingBagConfig], user_features: list[str], item_features: list[str]) -> None:
        super().__init__()
        dim = tables[0].embedding_dim
        self.collection = EmbeddingBagCollection(tables)
        self.user_features, self.item_features = user_features, item_features
        self.user_tower = nn.Linear((len(user_features) - 1) * dim, dim)
        self.item_tower = nn.Linear((len(item_features) - 1) * dim, dim)
        self.popularity = nn.Linear(dim, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """The logit that a user likes a movie.

        Args:
            dense: `[B, 0]`.
            features: the batch.

        Returns:
            float `[B]`.
        """
        users, items = self.vectors(features)
        return (users * items).sum(1)

    def vectors(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The towers.

        Args:
            features: the batch.

        Returns:
            User and movie vectors, float `[B, embedding_dim + 1]`, whose dot product is the logit.
        """
        rows = self.collection(features).to_dict()
        user = self._tower(rows, self.user_features, self.user_tower)
        item = self._tower(rows, self.item_features, self.item_tower)
        # How well a movie is liked by all goes with a 1 of every user: so retrieval stays one dot product.
        return torch.cat([user, torch.ones_like(user[:, :1])], 1), torch.cat([item, self.popularity(item)], 1)

    @staticmethod
    def _tower(rows: dict[str, Tensor], names: list[str], layer: nn.Linear) -> Tensor:
        return rows[names[0]] + layer(torch.cat([rows[name] for name in names[1:]], 1))


def two_tower(
    tables: list[EmbeddingBagConfig], schema: Schema, *, user_features: list[str], item_features: list[str]
) -> TwoTower:
    """What the recipe names.

    Args:
        tables: of the recipe.
        schema: of the data.
        user_features: of the user's tower, its id first, then one or more others.
        item_features: of the movie's tower, its id first, then one or more others.

    Returns:
        The model.

    Raises:
        ConfigError: a feature that the schema does not have, or a tower with less than two.
    """
    known = {feature.name for feature in schema.sparse}
    for key, names in (("user_features", user_features), ("item_features", item_features)):
        unknown = [name for name in names if name not in known]
        if unknown or len(names) < 2:
            raise ConfigError(
                f"model.options.{key} = {names}: two or more sparse features of the schema are needed.",
                f"It has: {', '.join(sorted(known))}.",
            )
    return TwoTower(tables, user_features, item_features)
