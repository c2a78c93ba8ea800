"""The SparseCore update: interpreted with race detection, compiled for the chips that have one, its bytes counted."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import shared_memory

from tests.kernels.tools import bundles
from tests.kernels.tools.cases import IDS, LENGTHS, all_pairs, make_bags, make_table
from tests.kernels.tools.programs import update as update_program
from tests.kernels.tools.sparsecore_interpreter import interpreter
from tests.kernels.tools.update_cases import check_update, make_state, positive, run_update
from tpurec.kernels import dedup
from tpurec.kernels import embedding_update_sparsecore as kernel
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.dispatch import Shape
from tpurec.kernels.embedding_update import least_hbm_bytes
from tpurec.kernels.embedding_update_sparsecore import Config
from tpurec.kernels.optimizers import RowOptimizer, rowwise_entries
from tpurec.kernels.sparsecore_rows import RowMath
from tpurec.kernels.storage import Storage

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [(lengths, ids) for lengths in LENGTHS for ids in IDS]
SPARSE_CHIPS = ("v5p", "v6e", "7x")
PROGRAMS = all_pairs(
    {
        "generation": ["v6e", "7x"],  # 8 lanes, 16 lanes
        "dim": [8, 24, 32],
        "dtype": ["float32", "bfloat16"],
        "optimizer": [RowOptimizer("sgd"), RowOptimizer("adagrad"), RowOptimizer("rowwise_adagrad", 1e-3, 0.3)],
        "pooling": ["sum", "mean"],
        "weighted": [False, True],
        "num_parts": [1, 3],
        "config": [Config(16, 8, "shared"), Config(16, 16, "hbm")],
    }
)


class Case:
    """One compiled program under the interpreter, run on batches of the same sizes."""

    def __init__(
        self,
        machine,
        *,
        dim,
        dtype,
        optimizer,
        pooling,
        weighted,
        config,
        num_parts=1,
        num_bags=9,
        capacity=47,
        num_rows=40,
    ):
        rows = num_rows if num_parts == 1 else 128 * (num_parts - 1) + 10
        self.storage = Storage(rows, dim, dtype)
        if num_parts > 1:  # 128 rows of either dtype and of their accumulators are whole tiles
            self.storage = Storage(rows, dim, dtype, max_part_bytes=128 * 4 * dim)
        self.machine, self.optimizer, self.pooling, self.weighted = machine, optimizer, pooling, weighted
        self.num_bags, self.capacity = num_bags, capacity
        self.table = make_table(rows, dim, DTYPES[dtype], seed=dim)
        self.state = make_state(optimizer, rows, dim)
        self.grads = np.random.default_rng(dim).standard_normal((num_bags, dim), dtype=np.float32)

        @jax.jit
        def program(table, state, grads, ids, offsets, weights):
            return run_update(
                table, state, grads, ids, offsets, weights, optimizer, pooling, self.storage,
                chip=machine.chip, implementation="sparsecore", config=config, interpret=machine.parameters,
            )  # fmt: skip

        self.program = program

    def wrong(self, lengths, ids, seed=0) -> str:
        """What is wrong with the result: empty if nothing."""
        rows = self.storage.num_rows
        bags = positive(
            make_bags(lengths, ids, num_bags=self.num_bags, capacity=self.capacity, num_rows=rows, seed=seed)
        )
        weights = bags.weights if self.weighted else None
        table = jnp.asarray(self.table)
        found = jax.block_until_ready(self.program(table, self.state, self.grads, bags.ids, bags.offsets, weights))
        if self.machine.races_found():
            return "race"
        try:
            check_update(found, self.table, self.state, self.grads, bags, self.optimizer, self.pooling, self.weighted)
        except AssertionError:
            return "values"
        return ""


@pytest.mark.interpret
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_equals_the_specification_without_races(number):
    """All pairs of lanes, dims, dtypes, optimizers, pooling, weights, parts and staging; kinds of ids are dealt out."""
    program = dict(PROGRAMS[number])
    with interpreter(program.pop("generation"), num_cores=1) as machine:
        case = Case(machine, **program)
        for k in range(number, len(KINDS), len(PROGRAMS)):
            assert not case.wrong(*KINDS[k], seed=k), KINDS[k]


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v6e", "7x"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256, 288, 1024, 1280])
def test_every_dim_with_the_default_config(generation, dim):
    """Two SparseCores of two subcores each; every kind of ids."""
    with interpreter(generation) as machine:
        case = Case(
            machine, dim=dim, dtype="float32", optimizer=RowOptimizer("rowwise_adagrad"), pooling="mean",
            weighted=True, config=None, num_bags=37, capacity=201,
        )  # fmt: skip
        for k, kind in enumerate(KINDS):
            assert not case.wrong(*kind, seed=k), kind


def _every_occurrence_a_row(original):
    """Runs of equal ids are not combined."""

    def unique_rows(ids_N, offsets, weights_N, num_rows, pooling):
        found = dedup.sorted_occurrences(ids_N, offsets, weights_N, num_rows, pooling)
        position = jnp.arange(len(ids_N), dtype=jnp.int32)
        rows = jnp.where(position < found.count, found.rows_N, -1)
        starts = jnp.minimum(jnp.arange(len(ids_N) + 1, dtype=jnp.int32), found.count)
        return dedup.UniqueRows(rows, starts, found.bags_N, found.factors_N, found.count)

    return unique_rows


def _without_factors(original):
    def unique_rows(*arguments):
        return original(*arguments)._replace(factors_N=None)

    return unique_rows


# Fault -> (owner, name, what replaces it); docs/kernels.md has the list, which test_planted_faults.py compares.
FAULTS = {
    "optimizer applied per occurrence": (kernel, "unique_rows", _every_occurrence_a_row),
    "weights ignored": (kernel, "unique_rows", _without_factors),
    "fetched rows not waited for": (kernel._Blocks, "wait_fetch", lambda original: lambda self, t: None),
    "written rows not waited for": (kernel._Blocks, "wait_write", lambda original: lambda self, t: None),
    "ring of index lists too short": (kernel, "_INDEX_SLOTS", lambda original: 1),
    "ring of row lists too short": (kernel, "_LIST_SLOTS", lambda original: 1),
    "mask of the last lanes forgotten": (
        RowMath,
        "_valid",
        lambda original: lambda self, q: jnp.full((self.lanes,), True),
    ),
    "sums not zeroed": (kernel._Gradients, "_zero", lambda original: lambda self: None),
    "no barrier after staging": (kernel.plsc, "subcore_barrier", lambda original: lambda: None),
}


@pytest.mark.interpret
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_caught(fault, monkeypatch):
    """The same case without a fault is right, so that it is the fault that is seen."""
    if fault is not None:
        owner, name, replace = FAULTS[fault]
        monkeypatch.setattr(owner, name, replace(getattr(owner, name)))
    with interpreter("7x", num_cores=1) as machine:
        case = Case(
            machine, dim=24, dtype="float32", optimizer=RowOptimizer("rowwise_adagrad", 1e-3, 0.3), pooling="sum",
            weighted=True, config=Config(16, 8, "shared"), num_bags=9, capacity=101, num_rows=150,
        )  # fmt: skip
        assert bool(case.wrong("one id each", "three equal") or case.wrong("a few", "uniform")) == bool(fault)


@pytest.mark.interpret
@pytest.mark.parametrize("gradients", ["shared", "hbm"])
def test_counted_bytes_are_those_of_the_dmas(gradients, monkeypatch):
    """`hbm_bytes` against every HBM access that the interpreter sees, granules of 4 bytes as it has none."""
    moved, whole, lock = [0], set(), threading.Lock()

    def counting(original, value_of):
        def access(self, key, *arguments, **named):
            result = original(self, key, *arguments, **named)
            value = value_of(result, arguments)
            # Whole tables are the interpreter's own: it hands the results over when the kernel has ended.
            if key[0] in ("any", "hbm") and value.shape not in whole:
                with lock:
                    moved[0] += value.nbytes
            return result

        return access

    memory = shared_memory.SharedMemory
    for name, value_of in {
        "get_buffer_content": lambda result, arguments: result[0],
        "store_buffer_content": lambda result, arguments: np.asarray(arguments[1]),
    }.items():
        monkeypatch.setattr(memory, name, counting(getattr(memory, name), value_of))
    config = Config(16, 8, gradients)
    with interpreter("7x", num_cores=2, num_subcores=2) as machine:
        core = dataclasses.replace(machine.chip.sparse_core, dma_granule_bytes=4)
        chip = dataclasses.replace(machine.chip, sparse_core=core)
        case = Case(
            machine, dim=32, dtype="float32", optimizer=RowOptimizer("rowwise_adagrad"), pooling="sum",
            weighted=True, config=config, num_parts=3, num_bags=20, capacity=220,
        )  # fmt: skip
        whole.update({case.storage.part_shape, (rowwise_entries(case.storage.num_rows),)})
        assert not case.wrong("a few", "uniform")
    bags = make_bags("a few", "uniform", num_bags=20, capacity=220, num_rows=case.storage.num_rows)
    used = bags.ids[bags.counts()]
    shape = Shape(case.storage, 20, 220, True, "sum", "rowwise_adagrad")
    most = kernel.hbm_bytes(shape, chip, config, len(used), len(np.unique(used)), weighted=True)
    surplus = core.num_workers * (8 + 7) * (8 if gradients == "shared" else 8 + 32 * 4)
    assert most - surplus <= moved[0] <= most


# 4,096 bags. Libtpu takes 7 s of CPU to compile a sort of 81,920 ids, so that only one shape has that many.
SHAPES = {
    "1M x 128": {"num_rows": 1 << 20, "dim": 128, "ids_per_bag": 20},
    "4M x 64": {"num_rows": 4 << 20, "dim": 64, "optimizer": "adagrad", "weighted": True},
    "40M x 16": {"num_rows": 40_000_000, "dim": 16},
    "20 GiB": {"num_rows": 40 << 20, "dim": 128},
    "1M x 24 bfloat16": {"num_rows": 1 << 20, "dim": 24, "dtype": "bfloat16", "optimizer": "sgd", "pooling": "mean"},
    "100k x 288": {"num_rows": 100_000, "dim": 288, "weight_decay": 0.1, "weighted": True},
    "100k x 1280": {"num_rows": 100_000, "dim": 1280, "optimizer": "adagrad"},
}


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", SPARSE_CHIPS)
def test_compiles_in_place_without_table_sized_memory(chip, shape):
    """Alias bytes are table and state. Temporaries: at most 4 MB, 12 x the ids' bytes, and the gradients laid out anew.

    That is where dim is not 128: the kernel reads them linear, XLA has them tiled in 128 lanes. The linear copy counts,
    and where dim is no multiple of 128 one in whole tiles, through which v5p's goes: 4,096 bags of 288 columns take
    11.6 MB there, 4,096 x (288 + 384) x 4 bytes and 0.6 MB, and 2,048 bags half of that.
    """
    device = target(chip)
    arguments = {"num_bags": 4096, "ids_per_bag": 1} | SHAPES[shape]
    function, inputs, donate = update_program(device, **arguments)
    memory = device.memory(function, *inputs, donate=donate)
    storage = Storage(arguments["num_rows"], arguments["dim"], arguments.get("dtype", "float32"))
    rule = RowOptimizer(arguments.get("optimizer", "rowwise_adagrad"))
    assert memory.alias_bytes == storage.num_bytes + rule.state_bytes(storage)
    dim, tiled = arguments["dim"], -(-arguments["dim"] // 128) * 128
    retiled = 0 if dim == 128 else 4096 * 4 * (dim if dim == tiled else dim + tiled)
    assert memory.temp_bytes <= 4e6 + 12 * 4096 * arguments["ids_per_bag"] * 4 + retiled
    assert memory.peak_bytes < device.chip.usable_hbm_bytes


@pytest.mark.compile
@pytest.mark.parametrize("chip", SPARSE_CHIPS)
def test_temporaries_do_not_grow_with_the_table(chip):
    sizes = set()
    for num_rows in (1_000_000, 10_000_000):
        function, inputs, donate = update_program(target(chip), num_rows=num_rows, dim=64, num_bags=1000, ids_per_bag=1)
        sizes.add(target(chip).memory(function, *inputs, donate=donate).temp_bytes)
    assert len(sizes) == 1


@pytest.mark.compile
@pytest.mark.parametrize(("chip", "weighted"), [("v5p", False), ("v6e", False), ("7x", False), ("v5p", True)])
def test_sort_bytes_are_what_the_compiler_counts(chip, weighted):
    """The sort is a program of XLA's own, so its cost analysis counts (that of SparseCore kernels does not)."""
    device, num_ids, num_bags = target(chip), 4096 * 20, 4096
    arguments = [device.array((num_ids,), jnp.int32), device.array((num_bags + 1,), jnp.int32)]
    if weighted:
        arguments.append(device.array((num_ids,), jnp.float32))
    compiled = device.compile(
        lambda ids, offsets, weights=None: dedup.unique_rows(ids, offsets, weights, 1 << 20, "sum"), *arguments
    )
    counted = compiled.cost_analysis()["bytes accessed"]
    assert 0.5 * dedup.sort_hbm_bytes(num_ids, weighted) <= counted <= dedup.sort_hbm_bytes(num_ids, weighted)


@pytest.mark.parametrize("generation", SPARSE_CHIPS)
def test_lookup_and_update_move_at_most_1_3_times_the_least(generation):
    """1M x 128, 4,096 bags of 20 uniform ids; the lookup reads a row for each id, ids and offsets, and writes bags."""
    from tpurec.topology.chips import chip

    num_bags, num_ids = 4096, 4096 * 20
    ids = np.random.default_rng(0).integers(0, 1 << 20, num_ids)
    shape = Shape(Storage(1 << 20, 128), num_bags, num_ids, False, "sum", "rowwise_adagrad")
    optimizer, unique = RowOptimizer("rowwise_adagrad"), len(np.unique(ids))
    least = least_hbm_bytes(shape.storage, optimizer, num_bags, num_ids, unique, False)
    lookup = num_ids * (512 + 4) + num_bags * 512 + (num_bags + 1) * 4
    ours = kernel.hbm_bytes(shape, chip(generation), Config(), num_ids, unique, False)
    ours += dedup.sort_hbm_bytes(num_ids, False)
    assert kernel.layout(shape, chip(generation), Config()).shared_gradients
    assert lookup + ours <= 1.3 * (least["lookup"] + least["update"])


@pytest.mark.compile
@pytest.mark.parametrize(("chip", "most"), [("7x", 9.8), ("v6e", 17.3), ("v5p", 17.3)])
def test_bundles_per_occurrence(chip, most):
    """The innermost loop that adds up gradients, dim 128 float32, four occurrences a trip; it stores nothing.

    XLA may put gathers of the sort's program on a SparseCore, too, as programs of their own.
    """
    shape = {"num_rows": 1 << 20, "dim": 128, "num_bags": 4096, "ids_per_bag": 1}
    programs = bundles.count("tests.kernels.tools.programs:update", chip, **shape).values()
    vectors = 128 // target(chip).chip.sparse_core.num_lanes
    adding = [loop for loops in programs for loop in loops if loop.innermost and not loop.operations["store"]]
    unrolled = [loop for loop in adding if 4 * vectors <= loop.operations["load"] < 5 * vectors]
    assert unrolled
    assert min(loop.bundles for loop in unrolled) / 4 <= most
