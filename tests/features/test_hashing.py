"""The hash: its published test vectors, and the vectorised code against the one-number specification."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tpurec.features.hashing import hash_rows, hex_codes, integer_codes, mix64, text_codes

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "features.md"
_VECTOR = re.compile(r"^\| (hex|integer|text) \| `(.+)` \| `0x([0-9a-f]{16})` \| (\d+) \| (\d+) \| (\d+) \|$", re.M)


def _code(kind: str, value: str) -> np.ndarray:
    if kind == "hex":
        return hex_codes(pa.array([value]))[0]
    return integer_codes(np.array([int(value)])) if kind == "integer" else text_codes(pa.array([value]))


def _row(code: int, num_embeddings: int, salt: int) -> int:
    """Steps 2 and 3 of the specification in plain numbers of any size."""
    return (mix64(code ^ mix64(salt)) * num_embeddings) >> 64


def test_the_vectors_in_the_documentation_hold():
    vectors = _VECTOR.findall(_DOCS.read_text(encoding="utf-8"))
    assert len(vectors) >= 10
    for kind, value, code, row, salted, large in vectors:
        codes = _code(kind, value)
        assert codes[0] == int(code, 16), (kind, value)
        assert hash_rows(codes, 1000)[0] == int(row)
        assert hash_rows(codes, 1000, salt=7)[0] == int(salted)
        assert hash_rows(codes, 2**31 - 1)[0] == int(large)


def test_mix64_is_splitmix64():
    """SplitMix64 seeded with 0 first gives mix(0x9e3779b97f4a7c15) = 0xe220a8397b1dcdaf (Steele, Lea, Flood)."""
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**64 - 1),
)
def test_rows_equal_the_specification(codes, num_embeddings, salt):
    rows = hash_rows(np.array(codes, dtype=np.uint64), num_embeddings, salt)
    assert rows.dtype == np.int32
    assert rows.tolist() == [_row(code, num_embeddings, salt) for code in codes]


def test_rows_across_chunk_borders_equal_those_of_single_ids():
    codes = np.arange(8191, 8191 + 3 * 8192 + 5, dtype=np.uint64)
    assert hash_rows(codes, 99_991, 3).tolist() == [_row(int(code), 99_991, 3) for code in codes]


_HEXISH = st.text(alphabet="0123456789abcdefABCDEFgGxX :`@/\x00\x10é", min_size=1, max_size=18)


@given(st.lists(_HEXISH, min_size=1, max_size=40))
def test_hex_is_parsed_or_called_malformed_exactly(texts):
    """Case 30: what is not 1 to 16 hex digits is never read as some other id."""
    codes, malformed = hex_codes(pa.array(texts))
    good = [re.fullmatch(r"[0-9a-fA-F]{1,16}", text) is not None for text in texts]
    assert (malformed is None) == all(good)
    if malformed is not None:
        assert malformed.tolist() == [not g for g in good]
    assert [int(c) for c, g in zip(codes, good, strict=True) if g] == [
        int(text, 16) for text, g in zip(texts, good, strict=True) if g
    ]


def test_every_byte_in_an_eight_digit_id_is_judged_right():
    for byte in range(256):
        text = "0123456" + chr(byte) if byte < 128 else "012345" + chr(byte)
        codes, malformed = hex_codes(pa.array([text, "89abcdef"]))
        if re.fullmatch("[0-9a-fA-F]{8}", text):
            assert malformed is None and codes[0] == int(text, 16), text
        else:
            assert malformed.tolist() == [True, False], text
        assert codes[1] == 0x89ABCDEF


def test_case_and_leading_zeros_do_not_matter_and_slices_are_read_in_place():
    texts = pa.array(["zz", "00AB12cd", "ab12CD", "0000000000ab12cd", "zz"])
    codes, malformed = hex_codes(texts.slice(1, 3))
    assert malformed is None and set(codes.tolist()) == {0xAB12CD}
    eight = pa.array(["zzzzzzzz", "00AB12cd", "00ab12CD"]).slice(1)
    assert hex_codes(eight)[0].tolist() == [0xAB12CD, 0xAB12CD]
    assert hex_codes(eight.cast(pa.large_string()))[0].tolist() == [0xAB12CD, 0xAB12CD]


@given(st.lists(st.text(max_size=8), max_size=30))
def test_text_codes_are_blake2b(texts):
    expected = [int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts]
    assert text_codes(pa.array(texts, pa.string())).tolist() == expected


def test_integers_are_twos_complement():
    values = np.array([-1, 0, 2**31, 2**33, -(2**63)], dtype=np.int64)
    assert integer_codes(values).tolist() == [2**64 - 1, 0, 2**31, 2**33, 2**63]
    assert integer_codes(np.array([-1], dtype=np.int32)).tolist() == [2**64 - 1]


def test_sequential_ids_spread_evenly():
    counts = np.bincount(hash_rows(np.arange(200_000, dtype=np.uint64), 1000), minlength=1000)
    chi_squared = ((counts - 200.0) ** 2 / 200.0).sum()
    assert 999 - 6 * np.sqrt(2 * 999) < chi_squared < 999 + 6 * np.sqrt(2 * 999)
