"""What rows and tensors the kernels take: the only place that says so, and one that loads no JAX.

The planner asks before it places a table, the layout of the tables before it allocates one.
"""

from __future__ import annotations

import math

from tpurec.errors import ConfigError

MAX_TENSOR_BYTES = 16 << 30  # one operand of a SparseCore kernel; a storage may have several
MAX_DIM = 1280
# A row is read as 32-byte granules, and its table lies in memory without gaps between rows.
DIM_MULTIPLE = {"float32": 8, "bfloat16": 16}
TILE_WORDS = 8 * 128  # 32-bit words of the smallest piece that a tensor consists of


def problem_of_rows(dim: int, dtype: str) -> tuple[str, str] | None:
    """Why the kernels cannot take rows of some kind.

    Args:
        dim: columns of a row, as it is stored.
        dtype: of its elements, such as `float32`.

    Returns:
        What is wrong, and the remedy, a sentence each; None if they take them.

    >>> problem_of_rows(12, "float32")
    ('embedding_dim 12: kernels take multiples of 8 from 8 to 1280 for float32.', 'Use 8 or 16.')
    """
    if dtype not in DIM_MULTIPLE:
        kinds = " or ".join(DIM_MULTIPLE)
        remedy = "Use bfloat16, which takes as much memory." if dtype == "float16" else f"Use {kinds}."
        return f"dtype {dtype!r}: tables are {kinds} on a TPU.", remedy
    multiple = DIM_MULTIPLE[dtype]
    if dim % multiple == 0 and multiple <= dim <= MAX_DIM:
        return None
    problem = f"embedding_dim {dim}: kernels take multiples of {multiple} from {multiple} to {MAX_DIM} for {dtype}."
    if dim > MAX_DIM:
        return problem, f"Use {MAX_DIM}, or cut the columns over more ranks (column_wise)."
    near = [size for size in (dim // multiple * multiple, (dim // multiple + 1) * multiple) if size]
    return problem, f"Use {' or '.join(map(str, near))}."


def rows_per_tensor(num_rows: int, row_bytes: int, max_tensor_bytes: int) -> int:
    """Into how many rows at a time a storage is cut, so that each tensor is small enough and all have one shape.

    Args:
        num_rows: rows of the storage.
        row_bytes: from one row to the next, a multiple of 32.
        max_tensor_bytes: a tensor is at most this large.

    Returns:
        Rows of each tensor, whole tiles; the last one's surplus rows are never addressed.

    Raises:
        ConfigError: there is no room for the rows of whole tiles.

    >>> rows_per_tensor(40_000_000, 512, MAX_TENSOR_BYTES)
    20000000
    """
    align = TILE_WORDS // math.gcd(row_bytes // 4, TILE_WORDS)
    most = max_tensor_bytes // (align * row_bytes) * align
    if not most:
        raise ConfigError(
            f"max_tensor_bytes {max_tensor_bytes}: less than {align} rows of {row_bytes} bytes, whole tiles.",
            f"Use {align * row_bytes} or more; a TPU takes {MAX_TENSOR_BYTES}.",
        )
    return math.ceil(math.ceil(num_rows / math.ceil(num_rows / most)) / align) * align


def num_tensors(num_rows: int, row_bytes: int, max_tensor_bytes: int) -> int:
    """How many tensors `rows_per_tensor` makes.

    Args:
        num_rows: rows of the storage.
        row_bytes: as there.
        max_tensor_bytes: as there.

    Returns:
        1 or more.
    """
    return math.ceil(num_rows / rows_per_tensor(num_rows, row_bytes, max_tensor_bytes))
