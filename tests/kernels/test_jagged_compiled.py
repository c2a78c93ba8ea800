"""libtpu compiles every jagged program for every generation; temporaries stay below what arguments and results have.

The bound is a multiple of the least bytes: every argument once, every result once.
"""

import pytest

from tests.kernels.tools.jagged_programs import PROGRAMS, compiled
from tpurec.kernels.ahead_of_time import target

CHIPS = ("v5e", "v5p", "v6e", "7x")
# The compiler takes half a minute and more to sort, or to scatter unsorted, a million words.
LONG = {"permute_jagged_gradient", "invert_permute", "block_bucketize", "select_bags", "segment_sum, numbers"}
CASES = [
    pytest.param(name, sizes, id=f"{name}-{sizes}", marks=[pytest.mark.slow] if name in LONG else [])
    for name, program in PROGRAMS.items()
    for sizes in program.sizes
]
MOST_TEMPORARIES = 2.5


@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_temporaries_are_bounded(name, sizes, chip):
    program, least = compiled(target(chip), name, sizes)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= MOST_TEMPORARIES * least + (1 << 20), memory.temp_size_in_bytes / least
