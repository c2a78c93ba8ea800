"""The SparseCore lookup: interpreted with race detection, compiled for the chips that have one, its bundles counted."""

import functools
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import shared_memory

from tests.kernels.tools import bundles
from tests.kernels.tools.cases import IDS, LENGTHS, all_pairs, brute_force, make_bags, make_table
from tests.kernels.tools.programs import lookup
from tests.kernels.tools.sparsecore_interpreter import interpreter
from tpurec.kernels import embedding_bag_sparsecore as kernel
from tpurec.kernels import sparsecore_stream
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.embedding_bag import embedding_bag
from tpurec.kernels.embedding_bag_sparsecore import Config
from tpurec.kernels.storage import Storage, pack

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [(lengths, ids) for lengths in LENGTHS for ids in IDS]
SPARSE_CHIPS = ("v5p", "v6e", "7x")
PROGRAMS = all_pairs(
    {
        "generation": ["v6e", "7x"],  # 8 lanes, 16 lanes
        "dim": [8, 24, 32],
        "dtype": ["float32", "bfloat16"],
        "pooling": ["sum", "mean"],
        "weighted": [False, True],
        "num_parts": [1, 3],
        "config": [Config(16, 2, 16, 8), Config(32, 3, 16, 8), Config(16, 4, 16, 16)],
    }
)


class Case:
    """One compiled program under the interpreter, run on batches of the same sizes."""

    def __init__(self, machine, *, dim, dtype, pooling, weighted, config, num_parts=1, num_bags=21, capacity=61):
        rows = 100 if num_parts == 1 else 128 * (num_parts - 1) + 10
        self.storage = Storage(rows, dim, dtype, max_part_bytes=max(128 * 4 * dim, 128 * 32))
        if num_parts == 1:
            self.storage = Storage(rows, dim, dtype)
        self.table = make_table(rows, dim, DTYPES[dtype], seed=dim)
        self.machine, self.pooling, self.weighted = machine, pooling, weighted
        self.num_bags, self.capacity = num_bags, capacity
        self.program = jax.jit(
            functools.partial(
                embedding_bag,
                storage=self.storage,
                pooling=pooling,
                chip=machine.chip,
                implementation="sparsecore",
                config=config,
                interpret=machine.parameters,
            )
        )

    def wrong(self, lengths, ids, seed=0) -> str:
        """What is wrong with the result: empty if nothing."""
        bags = make_bags(
            lengths, ids, num_bags=self.num_bags, capacity=self.capacity, num_rows=self.storage.num_rows, seed=seed
        )
        want, bound = brute_force(self.table, bags, weighted=self.weighted, pooling=self.pooling)
        parts = pack(jnp.asarray(self.table), self.storage)
        weights = bags.weights if self.weighted else None
        found = np.asarray(self.program(parts, bags.ids, bags.offsets, weights), np.float64)
        if self.machine.races_found():
            return "race"
        return "" if np.all(np.abs(found - want) <= bound) else "values"


@pytest.mark.interpret
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_equals_the_specification_without_races(number):
    """All pairs of lanes, dims, dtypes, pooling, weights, parts and configs; kinds of ids are dealt out over them."""
    program = dict(PROGRAMS[number])
    with interpreter(program.pop("generation")) as machine:
        case = Case(machine, **program)
        for k in range(number, len(KINDS), len(PROGRAMS)):
            assert not case.wrong(*KINDS[k], seed=k), KINDS[k]


@pytest.mark.interpret
@pytest.mark.parametrize(("generation", "dim"), [("v6e", 288), ("7x", 264)])
def test_rows_of_more_columns_than_registers_hold(generation, dim):
    """Column groups in a loop and a rest; 264 words are not whole vectors of 16 lanes."""
    with interpreter(generation) as machine:
        case = Case(
            machine,
            dim=dim,
            dtype="float32",
            pooling="sum",
            weighted=True,
            config=Config(16, 2, 16, 8),
            num_bags=9,
            capacity=20,
        )
        assert not case.wrong("a few", "many skipped")


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v6e", "7x"])
@pytest.mark.parametrize("dim", [8, 16, 64, 128, 256, 1024, 1280])
def test_every_dim_and_kind_with_the_default_config(generation, dim):
    with interpreter(generation) as machine:
        case = Case(
            machine, dim=dim, dtype="float32", pooling="mean", weighted=True, config=None, num_bags=37, capacity=301
        )
        for k, kind in enumerate(KINDS):
            assert not case.wrong(*kind, seed=k), kind


def _one_bag_too_far(original):
    def find_bags(self, offsets, base, low, steps, start, end, last):
        return original(self, offsets, base, low, steps, start, end + 1, last)

    return find_bags


# Fault -> (class, method, what replaces it); docs/kernels.md has the list, which test_planted_faults.py compares.
FAULTS = {
    "rows are not waited for": (sparsecore_stream.OpenStream, "wait_rows", lambda original: lambda self, c: None),
    "ring too short": (sparsecore_stream.OpenStream, "slot", lambda original: lambda self, c: jnp.int32(0)),
    "mask one position too far": (kernel._Bags, "_find_bags", _one_bag_too_far),
    "skipped ids are not cleared": (
        sparsecore_stream.OpenStream,
        "_clear_missing",
        lambda original: lambda self, c: None,
    ),
    "weights ignored": (
        sparsecore_stream.OpenStream,
        "weights",
        lambda original: lambda self, slot, at: jnp.ones((self.shapes.core.num_lanes,)),
    ),
    "accumulators are not zeroed": (kernel._Bags, "_zero", lambda original: lambda self, slot: None),
}


@pytest.mark.interpret
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    owner, name, replace = FAULTS[fault]
    monkeypatch.setattr(owner, name, replace(getattr(owner, name)))
    with interpreter("v6e") as machine:
        case = Case(machine, dim=8, dtype="float32", pooling="sum", weighted=True, config=Config(16, 2, 16, 8))
        assert case.wrong("a few", "many skipped")


@pytest.mark.interpret
def test_counted_bytes_are_those_of_the_dmas(monkeypatch):
    """`kernel_hbm_bytes` against every HBM access that the interpreter sees."""
    moved, whole, lock = [0], set(), threading.Lock()

    def counting(original, value_of):
        def access(self, key, *arguments, **named):
            result = original(self, key, *arguments, **named)
            value = value_of(result, arguments)
            # Whole arrays are the interpreter's own: it hands the results over when the kernel has ended.
            if key[0] in ("any", "hbm") and value.shape not in whole:
                with lock:
                    moved[0] += value.nbytes
            return result

        return access

    for name, value_of in {
        "get_buffer_content": lambda result, arguments: result[0],
        "store_buffer_content": lambda result, arguments: np.asarray(arguments[1]),
    }.items():
        original = getattr(shared_memory.SharedMemory, name)
        monkeypatch.setattr(shared_memory.SharedMemory, name, counting(original, value_of))
    config = Config(16, 2, 16, 8)
    with interpreter("v6e") as machine:
        case = Case(machine, dim=24, dtype="float32", pooling="sum", weighted=True, config=config)
        whole.update({case.storage.part_shape, (21, 24)})
        assert not case.wrong("a few", "uniform")
    bags = make_bags("a few", "uniform", num_bags=21, capacity=61, num_rows=100)
    used = int(bags.counts().sum())
    most = kernel.kernel_hbm_bytes(Shape(case.storage, 21, 61, weighted=True), machine.chip, config, used)
    workers = 3  # blocks of 8 bags
    assert most - 2 * workers * config.chunk_rows * 8 <= moved[0] <= most


SHAPES = {
    "1M x 128": {"num_rows": 1 << 20, "dim": 128},
    "4M x 64": {"num_rows": 4 << 20, "dim": 64},
    "40M x 16": {"num_rows": 40_000_000, "dim": 16},
    "20 GiB": {"num_rows": 40 << 20, "dim": 128},
    "1M x 24 bfloat16": {"num_rows": 1 << 20, "dim": 24, "dtype": "bfloat16"},
    "100k x 288 mean": {"num_rows": 100_000, "dim": 288, "pooling": "mean", "weighted": True},
    "100k x 1280": {"num_rows": 100_000, "dim": 1280},
}


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", SPARSE_CHIPS)
def test_compiles_without_table_sized_memory(chip, shape):
    """Temporaries: at most 4 MB, 2 x the ids' bytes (ids and weights padded to whole chunks), and the result once more.

    The result counts where dim is not 128: the kernel writes it linear, and XLA tiles it for whoever reads it.
    """
    device = target(chip)
    arguments = {"num_bags": 4096, "ids_per_bag": 20} | SHAPES[shape]
    function, inputs, donate = lookup(device, **arguments)
    memory = device.memory(function, *inputs, donate=donate)
    ids_bytes = 4096 * 20 * 4
    retiled = 0 if arguments["dim"] == 128 else 2 * memory.output_bytes
    assert memory.temp_bytes <= 4e6 + 2 * ids_bytes * (1 + arguments.get("weighted", False)) + retiled
    assert memory.peak_bytes < device.chip.usable_hbm_bytes


@pytest.mark.compile
@pytest.mark.parametrize("chip", SPARSE_CHIPS)
def test_temporaries_do_not_grow_with_the_table(chip):
    sizes = set()
    for num_rows in (1_000_000, 10_000_000):
        function, inputs, donate = lookup(target(chip), num_rows=num_rows, dim=64, num_bags=1000, ids_per_bag=7)
        sizes.add(target(chip).memory(function, *inputs, donate=donate).temp_bytes)
    assert len(sizes) == 1


@pytest.mark.compile
@pytest.mark.parametrize(("chip", "most"), [("7x", 9.0), ("v6e", 16.8), ("v5p", 16.8)])
def test_bundles_per_row(chip, most):
    """The walk over the rows, dim 128 float32: 8 (7x) and 16 loads are the floor; the rest is the loop around 16 rows.

    It must also be the only walk: a second innermost loop that loads rows would mean short bags take another path.
    """
    shape = {"num_rows": 1 << 20, "dim": 128, "num_bags": 4096, "ids_per_bag": 20}
    (loops,) = bundles.count("tests.kernels.tools.programs:lookup", chip, **shape).values()
    loads = {loop.operations["load"]: loop.bundles for loop in loops if loop.innermost}
    rows, vectors = Config().step_rows, 128 // target(chip).chip.sparse_core.num_lanes
    assert max(loads) >= rows * vectors
    assert loads[max(loads)] / rows <= most
    assert sum(count >= vectors for count in loads) == 1
