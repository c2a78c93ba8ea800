"""What the kernels take, as the planner asks it: without JAX, and in agreement with the storages of the kernels."""

import subprocess
import sys

import pytest

from tpurec.errors import ConfigError
from tpurec.kernels.limits import MAX_DIM, MAX_TENSOR_BYTES, num_tensors, problem_of_rows, rows_per_tensor
from tpurec.kernels.storage import Storage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_taken_exactly_where_a_storage_has_no_gaps_between_them(dtype):
    for dim in range(1, 2 * MAX_DIM):
        try:
            storage = Storage(1000, dim, dtype)
            fits = storage.row_bytes == dim * (4 if dtype == "float32" else 2)
        except ConfigError:
            fits = False
        assert (problem_of_rows(dim, dtype) is None) == fits, dim


@pytest.mark.parametrize(
    ("dim", "dtype", "problem", "remedy"),
    [
        (12, "float32", "embedding_dim 12: kernels take multiples of 8 from 8 to 1280", "Use 8 or 16."),
        (4, "float32", "embedding_dim 4", "Use 8."),
        (24, "bfloat16", "multiples of 16", "Use 16 or 32."),
        (2048, "float32", "to 1280", "cut the columns over more ranks"),
        (64, "float16", "float32 or bfloat16", "Use bfloat16"),
    ],
)
def test_what_is_not_taken_comes_with_what_would_be(dim, dtype, problem, remedy):
    found = problem_of_rows(dim, dtype)
    assert problem in found[0] and remedy in found[1]


@pytest.mark.parametrize(("rows", "row_bytes"), [(40_000_000, 512), (1, 32), (2**31 - 1, 32), (123_456_789, 96)])
def test_tensors_are_no_larger_than_the_limit_and_hold_every_row(rows, row_bytes):
    each, count = (rule(rows, row_bytes, MAX_TENSOR_BYTES) for rule in (rows_per_tensor, num_tensors))
    assert each * row_bytes <= MAX_TENSOR_BYTES and (count - 1) * each < rows <= count * each
    # What the ops infer: a limit of the tensor's own size cuts alike.
    assert rows_per_tensor(rows, row_bytes, each * row_bytes) == each


def test_a_limit_without_room_for_whole_tiles_is_refused():
    with pytest.raises(ConfigError, match=r"max_tensor_bytes 100: less than 128 rows of 32 bytes.*Use 4096 or more"):
        rows_per_tensor(1000, 32, 100)


def test_asking_loads_no_jax():
    code = "import sys, tpurec.kernels.limits; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
