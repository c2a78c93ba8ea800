"""The hash `mix64`: from an id to a table row, the same in training, offline scoring and serving.

1. The id becomes a 64-bit code: `hex`, the number its digits write (case and leading zeros do not matter);
   `integer`, its two's complement; `text`, the first 8 bytes, little-endian, of BLAKE2b (digest_size=8) of its UTF-8
   bytes (RFC 7693).
2. `z = mix(code ^ mix(salt))`, where mix is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable
   Pseudorandom Number Generators, OOPSLA 2014; constants of Stafford's variant 13):
   `z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31`, modulo 2**64.
3. `row = (z * num_embeddings) >> 64`, in 128-bit arithmetic (Lemire: Fast Random Integer Generation in an Interval,
   ACM TOMACS 2019): even to num_embeddings / 2**64.

Test vectors are in docs/features.md.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_HEX_DIGITS = 16
# Working arrays of this many ids stay in a core's cache.
_CHUNK = 8192
_U = np.uint64


def hash_rows(codes: np.ndarray, num_embeddings: int, salt: int = 0) -> np.ndarray:
    """Steps 2 and 3: from codes to rows.

    Args:
        codes: uint64 [n], see `hex_codes`, `integer_codes`, `text_codes`.
        num_embeddings: rows to choose from, 1 to 2**31 - 1.
        salt: 0 <= salt < 2**64.

    Returns:
        int32 [n], 0 <= row < num_embeddings.

    >>> hash_rows(np.array([0x68FD1E64], dtype=np.uint64), 100_000)
    array([...], dtype=int32)
    """
    rows = np.empty(len(codes), dtype=np.int32)
    salt_mixed = _U(mix64(salt))
    high, scratch = np.empty(_CHUNK, dtype=_U), np.empty(_CHUNK, dtype=_U)
    size = _U(num_embeddings)
    for start in range(0, len(codes), _CHUNK):
        piece = codes[start : start + _CHUNK]
        z, t = high[: len(piece)], scratch[: len(piece)]
        np.bitwise_xor(piece, salt_mixed, out=z)
        _mix_in_place(z, t)
        # The upper 64 bits of z * size, from 32-bit halves; size < 2**31, so nothing overflows.
        np.bitwise_and(z, _U(0xFFFFFFFF), out=t)
        t *= size
        t >>= _U(32)
        z >>= _U(32)
        z *= size
        z += t
        z >>= _U(32)
        rows[start : start + len(piece)] = z
    return rows


def mix64(value: int) -> int:
    """The finalizer of SplitMix64 on one number; the scalar specification of step 2.

    Args:
        value: 0 <= value < 2**64.

    Returns:
        A number in the same range.

    >>> hex(mix64(1))
    '0x5692161d100b05e5'
    """
    mask = 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _mix_in_place(z: np.ndarray, t: np.ndarray) -> None:
    np.right_shift(z, _U(30), out=t)
    z ^= t
    z *= _U(0xBF58476D1CE4E5B9)
    np.right_shift(z, _U(27), out=t)
    z ^= t
    z *= _U(0x94D049BB133111EB)
    np.right_shift(z, _U(31), out=t)
    z ^= t


def integer_codes(values: np.ndarray) -> np.ndarray:
    """Step 1 for integers.

    Args:
        values: any integer dtype [n].

    Returns:
        uint64 [n], two's complement.
    """
    return values.astype(np.int64, copy=False).view(_U)


def text_codes(texts: pa.Array) -> np.ndarray:
    """Step 1 for text; each different text is digested once.

    Args:
        texts: Arrow string or large_string [n]; nulls give 0.

    Returns:
        uint64 [n].
    """
    encoded = texts.dictionary_encode() if not isinstance(texts, pa.DictionaryArray) else texts
    digests = b"".join(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for text in encoded.dictionary.to_pylist()
    )
    codes = np.frombuffer(digests, dtype="<u8")
    if len(codes) == 0:
        return np.zeros(len(texts), dtype=_U)
    indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.where(encoded.indices.is_valid().to_numpy(zero_copy_only=False), codes[indices], _U(0))


def hex_codes(texts: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Step 1 for hex digits.

    Args:
        texts: Arrow string or large_string [n] without nulls and empty strings.

    Returns:
        uint64 [n], and bool [n] true where the text is not 1 to 16 hex digits (its code is then meaningless), or None
        if that is so nowhere.
    """
    if len(texts) == 0:
        return np.empty(0, dtype=_U), None
    offsets, data = _string_buffers(texts)
    lengths = np.diff(offsets)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest == longest == 8:
        return _parse_words(data[offsets[0] : offsets[-1]].view(_U))
    too_long = None
    if longest > MAX_HEX_DIGITS:
        too_long = lengths > MAX_HEX_DIGITS
        texts = pc.if_else(pa.array(too_long), pa.scalar("0", texts.type), texts)
    # Arrow pads in C++; the padded bytes are then parsed as two 8-digit words each.
    offsets, data = _string_buffers(pc.ascii_lpad(texts, MAX_HEX_DIGITS, padding="0"))
    words, malformed = _parse_words(data[offsets[0] : offsets[-1]].view(_U))
    codes = (words[0::2] << _U(32)) | words[1::2]
    if malformed is not None:
        malformed = malformed[0::2] | malformed[1::2]
    if too_long is not None:
        malformed = too_long if malformed is None else malformed | too_long
    return codes, malformed


def _string_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [n + 1] of this (perhaps sliced) array, and all bytes of its data buffer."""
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offsets, data = texts.buffers()
    offsets = np.frombuffer(offsets, dtype=width, count=len(texts) + 1, offset=texts.offset * np.dtype(width).itemsize)
    return offsets, np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, dtype=np.uint8)


def _parse_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Parse 8 hex digits a 64-bit word, all 8 bytes at once; the first digit is the word's lowest byte in memory.

    Per byte: the digit's value is (byte & 15) + 9 * letter, letter being bit 6. It is right exactly if it is below 16
    and writing it in lower case gives the byte (with bit 5 set for letters) again.
    """
    codes = np.empty(len(words), dtype=_U)
    malformed: np.ndarray | None = None
    ones, low = _U(0x0101010101010101), _U(0x0F0F0F0F0F0F0F0F)
    buffers = [np.empty(_CHUNK, dtype=_U) for _ in range(4)]
    for start in range(0, len(words), _CHUNK):
        # Big-endian order puts the first digit highest; on a little-endian machine that is a byte swap.
        piece = words[start : start + _CHUNK]
        x, letter, value, t = (buffer[: len(piece)] for buffer in buffers)
        x[:] = piece.view(">u8")
        np.right_shift(x, _U(6), out=letter)
        letter &= ones
        np.bitwise_and(x, low, out=value)
        np.multiply(letter, _U(9), out=t)
        value += t
        letter <<= _U(5)
        x |= letter
        np.add(value, ones * _U(6), out=t)
        t >>= _U(4)
        t &= ones
        t *= _U(0x27)
        t += value
        t += ones * _U(0x30)
        x ^= t
        np.bitwise_and(value, ~low, out=t)
        x |= t
        if np.bitwise_or.reduce(x) != 0:
            malformed = np.zeros(len(words), dtype=np.bool_) if malformed is None else malformed
            malformed[start : start + len(piece)] = x != 0
        for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
            np.right_shift(value, _U(shift), out=t)
            value |= t
            value &= _U(mask)
        codes[start : start + len(piece)] = value
    return codes, malformed
