"""MovieLens-100k as sequences: what does a user rate next, after all that he has rated?

Every rating but a user's first gives a row: the movies before it, newest first, the movie itself, and random movies
that the user has not rated up to then. The last movie of each user is held out, as is usual for this task (Kang and
McAuley 2018); all earlier rows are for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from examples.movielens.prepare import positions, read_items, read_ratings, read_users
from tpurec import atomic
from tpurec.errors import DataError

HISTORY_LENGTH = 30
NUM_OTHERS = 32


@dataclass(frozen=True)
class Sequences:
    """What each user rated, oldest first, by position in the list of movies.

    Args:
        users: user ids as text.
        items: movie ids as text.
        rated: for each user the movies; the last one is held out if there are two or more.
    """

    users: list[str]
    items: list[str]
    rated: list[list[int]]

    @property
    def seen(self) -> list[list[int]]:
        """For each user all but the held-out movie."""
        return [items[:-1] if len(items) > 1 else items for items in self.rated]

    @property
    def held_out(self) -> list[list[int]]:
        """For each user the held-out movie."""
        return [items[-1:] if len(items) > 1 else [] for items in self.rated]


def prepare(folder: Path, out: Path, seed: int) -> Sequences:
    """Write `train.csv` and `test.csv`, one row for each held-out movie.

    Args:
        folder: holds `ml-100k.inter`, `ml-100k.user` and `ml-100k.item`.
        out: folder for the files; made if absent.
        seed: of the random movies.

    Returns:
        The sequences.

    Raises:
        DataError: a file or column is missing, or a rating names a user or movie that its file lacks.
    """
    ratings, users, movies = read_ratings(folder), read_users(folder), read_items(folder)
    user_of, item_of = positions(ratings, users, "user"), positions(ratings, movies, "item")
    try:
        times = ratings["timestamp"].cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DataError(f"{folder / 'ml-100k.inter'}: timestamp: {error}.") from None
    # Many ratings of a user bear the same second: the movie's number decides, so that the order is always the same.
    order = np.lexsort((item_of, times, user_of))
    rated: list[list[int]] = [[] for _ in range(users.num_rows)]
    for user, item in zip(user_of[order].tolist(), item_of[order].tolist(), strict=True):
        rated[user].append(item)
    found = Sequences(users["user"].to_pylist(), movies["item"].to_pylist(), rated)
    generator = np.random.default_rng(seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, ends in (("train", lambda items: range(1, len(items) - 1)), ("test", _last)):
        with atomic.new_file(out / f"{name}.csv") as unfinished:
            pa_csv.write_csv(pa.Table.from_pylist(list(_rows(found, ends, generator)), _COLUMNS), unfinished)
    return found


_COLUMNS = pa.schema([(name, pa.string()) for name in ("user", "history", "item", "others", "label")])


def _last(items: list[int]) -> range:
    return range(max(1, len(items) - 1), len(items))


def _rows(found: Sequences, ends, generator: np.random.Generator) -> Iterator[dict[str, str]]:
    num_items = len(found.items)
    for user, items in zip(found.users, found.rated, strict=True):
        for end in ends(items):
            others = _others(set(items[: end + 1]), num_items, generator)
            history = items[max(0, end - HISTORY_LENGTH) : end][::-1]
            yield {
                "user": user,
                "history": " ".join(found.items[item] for item in history),
                "item": found.items[items[end]],
                "others": " ".join(found.items[item] for item in others),
                "label": "1",
            }


def _others(rated: set[int], num_items: int, generator: np.random.Generator) -> list[int]:
    """Uniform movies that are not among those rated; a movie may come twice."""
    if len(rated) == num_items:
        raise DataError("a user has rated every movie: there is nothing to tell the next one from.")
    found: list[int] = []
    while len(found) < NUM_OTHERS:
        drawn = generator.integers(0, num_items, NUM_OTHERS)
        found += [int(item) for item in drawn if int(item) not in rated]
    return found[:NUM_OTHERS]
