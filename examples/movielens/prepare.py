"""MovieLens-100k's three files to one table of ratings, split at random into training and test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from tpurec.errors import DataError

TEST_SHARE = 0.1
ZIP_PREFIX_CHARACTERS = 2


def prepare(folder: Path, out: Path, seed: int) -> dict[str, int]:
    """Join ratings, users and movies, and write `train.csv` and `test.csv` with a header line.

    Args:
        folder: holds `ml-100k.inter`, `ml-100k.user` and `ml-100k.item` (tab-separated, headers `name:type`).
        out: folder for the two files; made if absent.
        seed: of the random split.

    Returns:
        Rows of each file, by name.

    Raises:
        DataError: a file or column is missing, or a rating names a user or movie that its file lacks.
    """
    ratings, users, movies = read_ratings(folder), read_users(folder), read_items(folder)
    rows = look_up(look_up(ratings.drop_columns("timestamp"), users, "user"), movies, "item")

    order = np.random.default_rng(seed).permutation(rows.num_rows)
    num_test = round(TEST_SHARE * rows.num_rows)
    out.mkdir(parents=True, exist_ok=True)
    parts = {"test": order[:num_test], "train": order[num_test:]}
    for name, indices in parts.items():
        pa_csv.write_csv(rows.take(pa.array(indices)), out / f"{name}.csv")
    return {name: len(indices) for name, indices in parts.items()}


def read_ratings(folder: Path) -> pa.Table:
    """Read `ml-100k.inter`.

    Args:
        folder: holds the file.

    Returns:
        Columns `user`, `item`, `rating` and `timestamp` as text, in the file's order.

    Raises:
        DataError: the file or a column is missing.
    """
    names = {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "timestamp"}
    return _read(folder / "ml-100k.inter", names)


def read_users(folder: Path) -> pa.Table:
    """Read `ml-100k.user`.

    Args:
        folder: holds the file.

    Returns:
        Columns `user`, `age`, `gender`, `occupation` and `zip_prefix` (two characters) as text.

    Raises:
        DataError: the file or a column is missing.
    """
    users = _read(
        folder / "ml-100k.user",
        {"user_id": "user", "age": "age", "gender": "gender", "occupation": "occupation", "zip_code": "zip_code"},
    )
    prefix = pc.utf8_slice_codeunits(users["zip_code"], 0, ZIP_PREFIX_CHARACTERS)
    return users.drop_columns("zip_code").append_column("zip_prefix", prefix)


def read_items(folder: Path) -> pa.Table:
    """Read `ml-100k.item`.

    Args:
        folder: holds the file.

    Returns:
        Columns `item`, `year` (blank where it is not known) and `genres` as text.

    Raises:
        DataError: the file or a column is missing.
    """
    movies = _read(folder / "ml-100k.item", {"item_id": "item", "release_year": "year", "class": "genres"})
    # One movie has "unkonwn" and another "V" where the year belongs: no year is known.
    is_year = pc.match_substring_regex(movies["year"], "^[0-9]{4}$")
    return movies.set_column(1, "year", pc.if_else(is_year, movies["year"], ""))


def _read(path: Path, columns: dict[str, str]) -> pa.Table:
    """Read columns as text, under the names that the dictionary gives them."""
    try:
        table = pa_csv.read_csv(
            path,
            parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pa_csv.ConvertOptions(auto_dict_encode=False, strings_can_be_null=False),
        )
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file.", "Give the folder that holds ml-100k.inter, .user and .item."
        ) from None
    found = {name.partition(":")[0]: name for name in table.column_names}
    for column in columns:
        if column not in found:
            raise DataError(f"{path}: no column {column!r}; there are: {', '.join(found)}.")
    return pa.table({new: table[found[old]].cast(pa.string()) for old, new in columns.items()})


def look_up(rows: pa.Table, facts: pa.Table, key: str) -> pa.Table:
    """Add to each row the facts of its key; the order of rows stays.

    Args:
        rows: with a column of that name.
        facts: one row a key.
        key: `user` or `item`.

    Returns:
        The rows with the columns of both.

    Raises:
        DataError: a row names a key that `facts` lacks.
    """
    found = facts.drop_columns(key).take(pa.array(positions(rows, facts, key)))
    for name in found.column_names:
        rows = rows.append_column(name, found[name])
    return rows


def positions(rows: pa.Table, facts: pa.Table, key: str) -> np.ndarray:
    """Where the key of each row stands among the facts.

    Args:
        rows: with a column of that name.
        facts: one row a key.
        key: `user` or `item`.

    Returns:
        int64 `[rows]`.

    Raises:
        DataError: a row names a key that `facts` lacks.
    """
    found = pc.index_in(rows[key], value_set=facts[key].combine_chunks())
    if found.null_count:
        missing = rows[key].filter(found.is_null())[0]
        raise DataError(f"a rating names {key} {missing.as_py()!r}, which the file of {key}s lacks.")
    return found.to_numpy().astype(np.int64)
