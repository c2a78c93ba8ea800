"""Packed storage: nothing is lost, nothing is padded without need, and limits are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpurec.errors import ConfigError
from tpurec.kernels.storage import LANES, Storage, gather_rows, pack, stack, unpack

DIMS = [8, 16, 24, 32, 64, 128, 256, 288, 1024, 1280]


def _table(rows, dim, dtype):
    return jnp.asarray(np.random.default_rng(dim).standard_normal((rows, dim), dtype=np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", DIMS)
def test_pack_unpack_and_gather_return_the_rows(dim, dtype):
    table = _table(600, dim, dtype)
    storage = Storage(600, dim, dtype, max_part_bytes=256 * Storage(600, dim, dtype).row_bytes)
    assert storage.num_parts == 3
    rows = np.asarray([0, 599, 7, 7, 151, storage.rows_per_part, storage.rows_per_part - 1], np.int32)

    @jax.jit
    def round_trip(table, rows):
        parts = pack(table, storage)
        return parts, unpack(parts, storage), gather_rows(parts, rows, storage)

    parts, unpacked, gathered = round_trip(table, rows)
    assert len(parts) == storage.num_parts
    assert {part.shape for part in parts} == {storage.part_shape}
    np.testing.assert_array_equal(unpacked, table)
    np.testing.assert_array_equal(gathered, np.asarray(table, np.float32)[rows])


@pytest.mark.parametrize(
    ("dim", "dtype", "cost"), [(24, "float32", 1), (288, "float32", 1), (8, "bfloat16", 2), (24, "bfloat16", 4 / 3)]
)
def test_padding_costs_what_the_documentation_says(dim, dtype, cost):
    storage = Storage(1_000_000, dim, dtype)
    plain = 1_000_000 * dim * jnp.dtype(dtype).itemsize
    assert storage.num_bytes == pytest.approx(cost * plain, rel=1e-3)


def test_a_part_is_whole_tiles_and_no_larger_than_16_gib():
    for dim in DIMS:
        storage = Storage(2**31 - 1, dim) if dim <= 128 else Storage(50_000_000, dim)
        assert storage.part_shape[0] % 8 == 0
        assert storage.part_shape[0] * LANES * 4 <= 16 << 30
        assert storage.num_parts * storage.rows_per_part >= storage.num_rows


def test_bfloat16_words_are_the_bytes_of_the_row_major_table():
    table = _table(16, 32, "bfloat16")
    (part,) = pack(table, Storage(16, 32, "bfloat16"))
    assert np.asarray(part).tobytes()[: table.nbytes] == np.asarray(table).tobytes()


def test_row_addresses_do_not_overflow_int32():
    """A 16 GiB part has more words than int32 can count."""
    from tpurec.kernels.storage import line_window

    storage = Storage(33_000_000, 128)
    lines, start = line_window(jnp.asarray([32_999_999], jnp.int32), storage)
    assert (int(lines[0, 0]), int(start[0])) == (32_999_999, 0)
    storage = Storage(170_000_000, 24)
    lines, start = line_window(jnp.asarray([169_999_999], jnp.int32), storage)
    assert (int(lines[0, 0]), int(start[0])) == divmod(169_999_999 * 24, 128)


def test_stack_puts_tables_below_one_another():
    storage, offsets = stack([10, 5, 7], dim=16)
    assert (storage.num_rows, offsets) == (22, (0, 10, 15))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 10, "dim": 12}, "embedding_dim 12: kernels take multiples of 8"),
        ({"num_rows": 10, "dim": 1288}, "from 8 to 1280"),
        ({"num_rows": 2**31, "dim": 8}, "rows are int32"),
        ({"num_rows": 0, "dim": 8}, "num_rows 0"),
        ({"num_rows": 10, "dim": 8, "dtype": "float16"}, "dtype 'float16'"),
    ],
)
def test_limits_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Storage(**arguments)
