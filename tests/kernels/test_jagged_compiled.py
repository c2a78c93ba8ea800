"""libtpu compiles every jagged program for every generation; temporaries stay below what arguments and results have.

The bound is a multiple of the least bytes: every argument once, every result once.
"""

import pytest

from tests.kernels.tools.jagged_programs import PROGRAMS, compiled
from tpurec.kernels.ahead_of_time import target

CHIPS = ("v5e", "v5p", "v6e", "7x")
# Sorts of a million words, and positions of a hundred thousand short runs, take the compiler 5 to 20 s of CPU time.
LONG = {"block_bucketize", "invert_permute", "select_bags"}
CHIP_OF_LONG = "v6e"  # at one shape; the others in the slow tier
CASES = [
    pytest.param(
        name, sizes, chip, id=f"{name}-{sizes}-{chip}",
        marks=[pytest.mark.slow] if name in LONG and (chip, sizes) != (CHIP_OF_LONG, program.sizes[-1]) else [],
    )
    for name, program in PROGRAMS.items()
    for sizes in program.sizes
    for chip in CHIPS
]  # fmt: skip
MOST_TEMPORARIES = 2.5
# Runs of a hundred words are copied in pieces of two lines each, of which v5p's and 7x's VMEM does not hold all.
MOST_OF_SHORT_RUNS = {"dense_to_jagged, ids": 6, "select_bags": 6}


@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "sizes", "chip"), CASES)
def test_temporaries_are_bounded(name, sizes, chip):
    program, least = compiled(target(chip), name, sizes)
    memory = program.memory_analysis()
    most = MOST_OF_SHORT_RUNS.get(name, MOST_TEMPORARIES)
    assert memory.temp_size_in_bytes <= most * least + (1 << 20), memory.temp_size_in_bytes / least
