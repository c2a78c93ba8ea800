"""MovieLens-100k as implicit feedback: a movie that a user rates 4 or 5 is liked, and random others are not.

A share of the likes is held out; the towers are trained on the others, each with `NEGATIVES` random movies that the
user has not liked in the training data. Uniform negatives make the logit the log of p(movie | user), up to a constant,
which is what retrieval wants (Mikolov et al. 2013 call it negative sampling).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from examples.movielens.prepare import positions, read_items, read_ratings, read_users
from tpurec import atomic

LIKED = 4.0
HELD_OUT_SHARE = 0.1
NEGATIVES = 8


@dataclass(frozen=True)
class Split:
    """Who likes what, by position in the lists of users and movies.

    Args:
        users: user ids as text.
        items: movie ids as text.
        train: for each user the movies of the training data.
        held_out: for each user those held out.
    """

    users: list[str]
    items: list[str]
    train: list[list[int]]
    held_out: list[list[int]]


def prepare(folder: Path, out: Path, seed: int) -> Split:
    """Write `train.csv`, `test.csv` (held-out likes with negatives of their own) and `pairs.csv`.

    Args:
        folder: holds `ml-100k.inter`, `ml-100k.user` and `ml-100k.item`.
        out: folder for the files; made if absent. `pairs.csv` has every user and every movie at least once, for whoever
            wants the vectors of all.
        seed: of the split and of the negatives.

    Returns:
        The split.

    Raises:
        DataError: a file or column is missing, or a rating names a user or movie that its file lacks.
    """
    ratings, users, movies = read_ratings(folder), read_users(folder), read_items(folder)
    liked = ratings.filter(pc.greater_equal(pc.cast(ratings["rating"], pa.float64()), LIKED))
    user_of, item_of = positions(liked, users, "user"), positions(liked, movies, "item")
    generator = np.random.default_rng(seed)
    is_test = np.zeros(len(user_of), bool)
    is_test[generator.permutation(len(user_of))[: round(HELD_OUT_SHARE * len(user_of))]] = True
    is_liked = np.zeros((users.num_rows, movies.num_rows), bool)
    is_liked[user_of[~is_test], item_of[~is_test]] = True
    out.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~is_test), ("test", is_test)):
        rows = _with_negatives(user_of[chosen], item_of[chosen], is_liked, generator)
        _write(out / f"{name}.csv", users, movies, *rows)
    count = max(users.num_rows, movies.num_rows)
    everyone = np.arange(count)
    _write(
        out / "pairs.csv", users, movies, everyone % users.num_rows, everyone % movies.num_rows, np.zeros(count, int)
    )
    held_out: list[list[int]] = [[] for _ in range(users.num_rows)]
    for user, item in zip(user_of[is_test], item_of[is_test], strict=True):
        held_out[user].append(int(item))
    train = [np.flatnonzero(row).tolist() for row in is_liked]
    return Split(users["user"].to_pylist(), movies["item"].to_pylist(), train, held_out)


def _with_negatives(
    users: np.ndarray, items: np.ndarray, is_liked: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each like, then its negatives; a draw that hits a like of the training data is drawn again."""
    other_users = np.repeat(users, NEGATIVES)
    others = generator.integers(0, is_liked.shape[1], len(other_users))
    while (bad := is_liked[other_users, others]).any():
        others[bad] = generator.integers(0, is_liked.shape[1], bad.sum())
    labels = np.concatenate([np.ones(len(users), int), np.zeros(len(others), int)])
    return np.concatenate([users, other_users]), np.concatenate([items, others]), labels


def _write(
    path: Path, users: pa.Table, movies: pa.Table, user_of: np.ndarray, item_of: np.ndarray, labels: np.ndarray
) -> None:
    of_user, of_item = users.take(pa.array(user_of)), movies.take(pa.array(item_of))
    columns = {name: of_user[name] for name in of_user.column_names}
    columns |= {name: of_item[name] for name in of_item.column_names}
    with atomic.new_file(path) as unfinished:
        pa_csv.write_csv(pa.table({**columns, "liked": pa.array(labels)}), unfinished)
