"""The TensorCore lookup of v5e: interpreted with race detection, and compiled within v5e's memory."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.tools.cases import brute_force, make_bags, make_table
from tests.kernels.tools.programs import lookup
from tpurec.kernels import embedding_bag_tensorcore as kernel
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.embedding_bag import embedding_bag
from tpurec.kernels.embedding_bag_tensorcore import Config
from tpurec.kernels.storage import Storage, pack
from tpurec.topology.chips import chip

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def _wrong(dim, dtype, pooling, weighted, num_parts, kinds) -> str:
    rows = 100 if num_parts == 1 else 266
    storage = Storage(rows, dim, dtype)
    if num_parts > 1:
        storage = Storage(rows, dim, dtype, max_part_bytes=128 * storage.row_bytes)
    assert storage.num_parts == num_parts
    table = make_table(rows, dim, DTYPES[dtype])
    program = jax.jit(
        functools.partial(
            embedding_bag,
            storage=storage,
            pooling=pooling,
            chip=chip("v5e"),
            implementation="tensorcore",
            config=Config(1024, 8),
            interpret=pltpu.InterpretParams(detect_races=True),
        )
    )
    for lengths, ids in kinds:
        bags = make_bags(lengths, ids, num_bags=13, capacity=41, num_rows=rows)
        want, bound = brute_force(table, bags, weighted=weighted, pooling=pooling)
        weights = bags.weights if weighted else None
        found = np.asarray(program(pack(jnp.asarray(table), storage), bags.ids, bags.offsets, weights))
        if ipc.races.races_found:
            return "race"
        if not np.all(np.abs(found - want) <= bound):
            return "values"
    return ""


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    ipc.reset_tpu_interpret_mode_state()
    yield
    ipc.reset_tpu_interpret_mode_state()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dim", "dtype", "pooling", "weighted", "num_parts"),
    [
        (24, "float32", "mean", True, 1),  # rows that start in the middle of a line and cross into the next
        (288, "float32", "sum", False, 1),
        (128, "bfloat16", "sum", True, 1),
        (8, "float32", "mean", False, 3),
    ],
)
def test_equals_the_specification_without_races(dim, dtype, pooling, weighted, num_parts):
    kinds = [("a few", "many skipped"), ("one long", "one hot row")]
    assert not _wrong(dim, dtype, pooling, weighted, num_parts, kinds)


# Fault -> (name, what replaces it); docs/kernels.md has the list, which test_planted_faults.py compares.
FAULTS = {"lines are not waited for": ("_wait", lambda copy: None)}


@pytest.mark.interpret
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    monkeypatch.setattr(kernel, *FAULTS[fault])
    assert _wrong(8, "float32", "sum", False, 1, [("a few", "uniform")])


SHAPES = {
    "1M x 128": {"num_rows": 1 << 20, "dim": 128},
    "4M x 64": {"num_rows": 4 << 20, "dim": 64},
    "40M x 16": {"num_rows": 40_000_000, "dim": 16},
    "14 GiB": {"num_rows": 28 << 20, "dim": 128},
    "1M x 24 bfloat16": {"num_rows": 1 << 20, "dim": 24, "dtype": "bfloat16"},
    "100k x 288 mean": {"num_rows": 100_000, "dim": 288, "pooling": "mean", "weighted": True},
}


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_within_the_memory_of_v5e(shape):
    """Temporaries: at most 4 MB and 8 x the ids' bytes (three lists made from the ids), and the result once more."""
    device = target("v5e")
    function, inputs, donate = lookup(device, **({"num_bags": 4096, "ids_per_bag": 20} | SHAPES[shape]))
    memory = device.memory(function, *inputs, donate=donate)
    assert memory.temp_bytes <= 4e6 + 8 * 4096 * 20 * 4 + 2 * memory.output_bytes
    assert memory.peak_bytes < device.chip.usable_hbm_bytes
