"""libtpu compiles the programs for distinct ids and for rows of several matrices, and their temporaries are bounded.

At DLRM-v2's sizes: 26 features, batch 4,096, 214 ids an example, vectors of 128. The least: every argument once, every
result once. Three sorts of 876,544 ids take the compiler minutes.
"""

import time

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.tools.jagged_programs import DLRM_V2
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.jagged_unique import unique_ids
from tpurec.kernels.row_blocks import select_rows, select_rows_gradient

MOST_TEMPORARIES = 2.5  # as of the other jagged programs
CHIPS = ("v5e", "v5p", "v6e", "7x")
BAGS, FEATURES = DLRM_V2.num_bags, DLRM_V2.num_features
# A row of its own for every example, of every feature, side by side.
BLOCKS = *((size,) * FEATURES for size in (DLRM_V2.batch_size, DLRM_V2.batch_size, DLRM_V2.dim)), True
PROGRAMS = {
    "unique_ids": (
        unique_ids,
        [((FEATURES + 1,), jnp.int32)] * 2 + [((BAGS + 1,), jnp.int32), ((DLRM_V2.num_ids,), jnp.int64)],
    ),
    "select_rows": (
        lambda *arrays: select_rows(*arrays, *BLOCKS),
        [((BAGS * DLRM_V2.dim,), jnp.float32), ((BAGS,), jnp.int32)],
    ),
    "select_rows_gradient": (
        lambda *arrays: select_rows_gradient(*arrays, *BLOCKS),
        [((BAGS * DLRM_V2.dim,), jnp.float32), ((BAGS,), jnp.int32)],
    ),
}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_temporaries_are_bounded(name, chip):
    function, shapes = PROGRAMS[name]
    compile_for = target(chip)
    with jax.enable_x64(True):
        arguments = [compile_for.array(*shape) for shape in shapes]
        results = jax.tree.leaves(jax.eval_shape(function, *arguments))
        least = sum(array.size * jnp.dtype(array.dtype).itemsize for array in [*arguments, *results])
        started = time.process_time()
        memory = compile_for.compile(function, *arguments).memory_analysis()
    ratio, seconds = memory.temp_size_in_bytes / least, time.process_time() - started
    print(f"{name}, {chip}: temporaries {ratio:.2f} x the least bytes; compiled in {seconds:.0f} s of CPU time")
    assert ratio <= MOST_TEMPORARIES
