"""Vocabularies: the same entries in the same order for the same data, however it is cut; files without pickle."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpurec.errors import ConfigError
from tpurec.features.vocabulary import VocabularyBuilder, read_vocabulary, write_vocabulary


def _expected(values, min_count):
    counts = Counter(values)
    return tuple(sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v)))


@given(st.lists(st.lists(st.text(alphabet="abé", max_size=2), max_size=9), max_size=9), st.integers(1, 3))
def test_entries_are_those_met_often_enough_most_frequent_first(pieces, min_count):
    builder = VocabularyBuilder()
    for piece in pieces:
        builder.add(pa.array(piece, pa.string()))
    assert builder.build(min_count) == _expected([v for piece in pieces for v in piece if v], min_count)


def test_order_and_cut_of_the_data_do_not_matter():
    values = [str(i * i % 97) for i in range(1000)]
    whole = VocabularyBuilder()
    whole.add(pa.array(values))
    random.Random(0).shuffle(values)
    parts = VocabularyBuilder()
    for start in range(0, 1000, 13):
        parts.add(pa.array(values[start : start + 13]).dictionary_encode())
    assert parts.build() == whole.build() and parts.build(max_size=5) == whole.build()[:5]


def test_memory_follows_the_number_of_different_ids():
    builder = VocabularyBuilder("integer")
    for start in range(0, 1_000_000, 25_000):
        builder.add(pa.array(range(start % 50_000, start % 50_000 + 25_000)))
        assert sum(map(len, builder._pieces)) <= 250_000, "counted pieces must be merged on the way"
    assert len(builder.build(min_count=20)) == 50_000 and builder.build(min_count=21) == ()


def test_blanks_are_not_counted_and_lists_are_entered():
    text = VocabularyBuilder()
    text.add(pa.chunked_array([[["a", None, ""], None], [["a", "b"]]]))
    assert text.build() == ("a", "b")
    numbers = VocabularyBuilder("integer")
    numbers.add(pa.array([5, None, -7, 5], pa.int32()))
    assert numbers.build() == (5, -7)
    digits = VocabularyBuilder("hex")
    digits.add(pa.array(["00AB", "ab", "0", "000"]))
    assert digits.build() == ("0", "ab")
    assert VocabularyBuilder().build() == ()


@pytest.mark.parametrize("entries", [("é", "b"), (5, -7)])
@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_files_bring_the_entries_back_and_leave_no_partial(tmp_path, entries, ending):
    write_vocabulary(tmp_path / f"v.{ending}", entries)
    assert read_vocabulary(tmp_path / f"v.{ending}") == entries
    assert [file.name for file in tmp_path.iterdir()] == [f"v.{ending}"]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"\.json or \.parquet"):
        write_vocabulary(tmp_path / "v.pkl", ("a",))
    for name, text, message in (
        ("a.json", "{", "not a vocabulary file"),
        ("b.json", '{"x": 1}', "one list of ids, found dict"),
        ("c.parquet", "x", "not a vocabulary file"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"{name}: .*{message}"):
            read_vocabulary(tmp_path / name)
    with pytest.raises(ConfigError, match="no such vocabulary file"):
        read_vocabulary(tmp_path / "absent.json")
    assert not list(tmp_path.glob(".*partial"))
