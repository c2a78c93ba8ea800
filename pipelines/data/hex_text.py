"""32-bit ids as text of eight hex digits, for whole columns at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

# Four ASCII digits for each 16-bit number, as the four bytes of one uint32.
_DIGITS = np.frombuffer("".join(f"{number:04x}" for number in range(1 << 16)).encode(), dtype=np.uint32)


def hex_strings(numbers: np.ndarray) -> pa.Array:
    """Write numbers as hex digits.

    Args:
        numbers: uint32 `[M]`.

    Returns:
        Arrow string array `[M]`, eight lower-case digits each.

    >>> hex_strings(np.array([0x68FD1E64, 1], dtype=np.uint32)).to_pylist()
    ['68fd1e64', '00000001']
    """
    digits = np.empty((numbers.size, 2), np.uint32)
    digits[:, 0] = _DIGITS[numbers >> np.uint32(16)]
    digits[:, 1] = _DIGITS[numbers & np.uint32(0xFFFF)]
    offsets = np.arange(0, 8 * numbers.size + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(numbers.size, pa.py_buffer(offsets), pa.py_buffer(digits))
