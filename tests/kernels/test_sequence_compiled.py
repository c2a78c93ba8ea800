"""libtpu compiles the unpooled lookup and its update at the shape of long sequences, and their temporaries are bounded.

Batch 4,096 with up to 200 ids each, vectors of 64, a table of a million rows: 819,200 ids, each a bag of its own. The
sort of the update takes the compiler 12 s of CPU time, and 30 s for v5e: one chip in CI, the others are marked slow.
"""

import jax.numpy as jnp
import pytest

from tpurec.kernels import programs
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.sequence_gather import sequence_gather
from tpurec.kernels.storage import Storage

NUM_IDS, STORAGE = 4096 * 200, Storage(1 << 20, 64)
CHIPS = ("v5e", "v5p", "v6e", "7x")
VECTORS_BYTES = NUM_IDS * STORAGE.dim * 4
# x the vectors: those of 64 are laid out in tiles of 128 for who reads them, which is twice their bytes.
MOST_OF_LOOKUP = {"v5e": 4.5, "v5p": 3.5, "v6e": 3.5, "7x": 3.5}
# v5e goes to plain JAX: the TensorCore kernel keeps the gradients of all ids in VMEM, and 210 MB do not fit.
MOST_OF_UPDATE = {"v5e": 7.5, "v5p": 3.5, "v6e": 3.5, "7x": 3.5}


@pytest.mark.compile
@pytest.mark.parametrize("chip", CHIPS)
def test_lookup_of_long_sequences(chip):
    """The table itself, 268 MB, is never copied: the bound leaves no room for it with what the result takes."""
    device = target(chip)
    parts = tuple(device.array(STORAGE.part_shape, STORAGE.word_dtype) for _ in range(STORAGE.num_parts))
    memory = device.memory(
        lambda parts, ids: sequence_gather(parts, ids, storage=STORAGE, chip=device.chip),
        parts, device.array((NUM_IDS,), jnp.int32),
    )  # fmt: skip
    assert memory.temp_bytes <= MOST_OF_LOOKUP[chip] * VECTORS_BYTES, memory.temp_bytes / VECTORS_BYTES


@pytest.mark.compile
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=[] if chip == "v6e" else [pytest.mark.slow]) for chip in CHIPS]
)
def test_update_of_long_sequences(chip):
    """Adam: table and both moments are updated in place."""
    device, rule = target(chip), RowOptimizer("adam")
    function, inputs, donate = programs.update(device, STORAGE, rule, NUM_IDS, NUM_IDS)
    memory = device.memory(function, *inputs, donate=donate)
    assert memory.alias_bytes >= STORAGE.num_bytes + rule.state_bytes(STORAGE)
    assert memory.temp_bytes <= MOST_OF_UPDATE[chip] * VECTORS_BYTES, memory.temp_bytes / VECTORS_BYTES
