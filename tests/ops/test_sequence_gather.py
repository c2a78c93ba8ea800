"""The unpooled lookup: CPU op and JAX against the specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpurec.errors import ConfigError
from tpurec.kernels.sequence_gather import least_and_unique_bytes, reference
from tpurec.kernels.sequence_gather import sequence_gather as gather
from tpurec.kernels.storage import Storage, pack
from tpurec.ops import embedding_bag, sequence_gather

NUM_ROWS = 150
IDS = {
    "mixed": [3, 149, 3, -1, 150, 0, 2**31 - 1, -(2**31), 77],
    "none": [],
    "one": [5],
    "all_skipped": [-1, -1, 150],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", IDS)
def test_equals_the_reference(kind, dtype):
    """To the bit, on the CPU and in plain JAX, whose storage here has several parts."""
    ids = np.array(IDS[kind], np.int32)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_ROWS, 24)), dtype)
    want = np.asarray(reference(table, jnp.asarray(ids)))
    on_cpu = torch.from_numpy(np.array(table, np.float32)).to(getattr(torch, dtype))
    for width in (torch.int32, torch.int64):
        assert np.array_equal(sequence_gather([on_cpu], torch.tensor(ids, dtype=width), NUM_ROWS, 24).numpy(), want)
    storage = Storage(NUM_ROWS, 24, dtype, max_part_bytes=1 << 14 if dtype == "float32" else 1 << 13)
    assert storage.num_parts > 1
    found = jax.jit(lambda parts, ids: gather(parts, ids, storage=storage))(pack(table, storage), ids)
    assert np.array_equal(np.asarray(found), want)


def test_is_a_bag_per_id():
    ids = torch.tensor(IDS["mixed"], dtype=torch.int32)
    table = torch.randn(NUM_ROWS, 8)
    bags = embedding_bag([table], ids, torch.arange(len(ids) + 1), None, "sum", 1, NUM_ROWS, 8)
    assert torch.equal(sequence_gather([table], ids, NUM_ROWS, 8), bags)


def test_opcheck_and_arguments_that_do_not_fit():
    torch.library.opcheck(sequence_gather, ([torch.randn(9, 8)], torch.tensor([1, -1, 8]), 9, 8))
    with pytest.raises(ValueError, match="int32 or int64"):
        sequence_gather([torch.randn(9, 8)], torch.tensor([1.0]), 9, 8)
    with pytest.raises(ValueError):
        sequence_gather([torch.randn(8, 8)], torch.tensor([1]), 9, 8)
    with pytest.raises(ConfigError, match="int32 or int64"):
        gather(pack(jnp.ones((9, 8)), Storage(9, 8)), jnp.ones((1, 1), jnp.int32), storage=Storage(9, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
def test_making_ids_unique_first_never_moves_fewer_bytes(share, dtype):
    """4,096 examples of 200 ids, of 1,000,000 rows: why the lookup does not do it."""
    num_ids = 4096 * 200
    for dim in (16, 64, 128, 512):
        direct, unique = least_and_unique_bytes(Storage(1_000_000, dim, dtype), num_ids, int(share * num_ids))
        assert direct < unique
