"""v5e's update by manual DMA: interpreted with race detection, and compiled in place within v5e's memory."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.tools.cases import IDS, LENGTHS, all_pairs, make_bags, make_table
from tests.kernels.tools.programs import update as update_program
from tests.kernels.tools.update_cases import check_update, make_state, positive, run_update
from tpurec.kernels import embedding_update_tensorcore as kernel
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.embedding_update_tensorcore import Config
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import chip

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [(lengths, ids) for lengths in LENGTHS for ids in IDS]
PROGRAMS = [
    program
    for program in all_pairs(
        {
            "dim": [8, 24, 128, 288],  # many rows a line, rows across lines, one line, several
            "dtype": ["float32", "bfloat16"],
            "optimizer": [RowOptimizer("sgd"), RowOptimizer("adagrad"), RowOptimizer("rowwise_adagrad", 1e-3, 0.3)],
            "pooling": ["sum", "mean"],
            "weighted": [False, True],
        }
    )
    if (program["dtype"], program["optimizer"].name) != ("bfloat16", "adagrad")  # refused: limit()
]


def _wrong(kinds, *, dim, dtype, optimizer, pooling, weighted, num_bags=9, capacity=150) -> str:
    """What is wrong with the results of one program: empty if nothing. Runs may cross the two chunks of 128 ids."""
    rows = 60
    storage, table = Storage(rows, dim, dtype), make_table(rows, dim, DTYPES[dtype], seed=dim)
    state = make_state(optimizer, rows, dim)
    grads = np.random.default_rng(dim).standard_normal((num_bags, dim), dtype=np.float32)

    @jax.jit
    def program(table, state, grads, ids, offsets, weights):
        return run_update(
            table, state, grads, ids, offsets, weights, optimizer, pooling, storage, chip=chip("v5e"),
            implementation="tensorcore", config=Config(128), interpret=pltpu.InterpretParams(detect_races=True),
        )  # fmt: skip

    ipc.reset_tpu_interpret_mode_state()
    try:
        for seed, kind in kinds:
            bags = positive(make_bags(*kind, num_bags=num_bags, capacity=capacity, num_rows=rows, seed=seed))
            weights = bags.weights if weighted else None
            found = jax.block_until_ready(program(jnp.asarray(table), state, grads, bags.ids, bags.offsets, weights))
            if ipc.races.races_found:
                return "race"
            try:
                check_update(found, table, state, grads, bags, optimizer, pooling, weighted)
            except AssertionError:
                return "values"
        return ""
    finally:
        ipc.reset_tpu_interpret_mode_state()


@pytest.mark.interpret
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_equals_the_specification_without_races(number):
    kinds = list(enumerate(KINDS))[number :: len(PROGRAMS)]
    assert not _wrong(kinds, **PROGRAMS[number])


# docs/kernels.md has the list, which test_planted_faults.py compares.
FAULTS = {
    "optimizer applied per occurrence": (
        kernel,
        "_run_ends",
        lambda original: lambda rows_N: jnp.ones(rows_N.shape, bool),
    ),
    "weights ignored": (
        kernel,
        "sorted_occurrences",
        lambda original: lambda *arguments: original(*arguments)._replace(factors_N=None),
    ),
    "groups not waited for": (kernel._Window, "wait", lambda original: lambda self, count: None),
    "mask covers the whole line": (kernel, "_mine", lambda original: lambda line, first, groups, lane: lane >= 0),
    "gradient placed one row too far": (
        kernel,
        "_place",
        lambda original: lambda total, half, first, groups, lane: original(total, half, first + 8, groups, lane),
    ),
}


@pytest.mark.interpret
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_caught(fault, monkeypatch):
    """The same case without a fault is right, so that it is the fault that is seen."""
    if fault is not None:
        owner, name, replace = FAULTS[fault]
        monkeypatch.setattr(owner, name, replace(getattr(owner, name)))
    rule = RowOptimizer("rowwise_adagrad", 1e-3, 0.3)
    kinds = [(0, ("a few", "three equal"))]
    wrong = _wrong(kinds, dim=24, dtype="float32", optimizer=rule, pooling="sum", weighted=True)
    assert bool(wrong) == bool(fault)


# 4,096 bags. Libtpu takes 7 s of CPU to compile a sort of 81,920 ids, so that only one shape has that many.
SHAPES = {
    "1M x 128": {"num_rows": 1 << 20, "dim": 128, "ids_per_bag": 20},
    "4M x 64": {"num_rows": 4 << 20, "dim": 64, "optimizer": "adagrad", "weighted": True},
    "40M x 16": {"num_rows": 40_000_000, "dim": 16},
    "14 GiB": {"num_rows": 28 << 20, "dim": 128},
    "1M x 24 bfloat16": {"num_rows": 1 << 20, "dim": 24, "dtype": "bfloat16", "pooling": "mean"},
    "100k x 288": {"num_rows": 100_000, "dim": 288, "weight_decay": 0.1},
}


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_in_place_within_v5e(shape):
    """Alias bytes are table and state; temporaries: 4 MB, 12 x the ids' bytes, and the gradients in whole lines."""
    device = target("v5e")
    arguments = {"num_bags": 4096, "ids_per_bag": 1} | SHAPES[shape]
    function, inputs, donate = update_program(device, **arguments)
    memory = device.memory(function, *inputs, donate=donate)
    storage = Storage(arguments["num_rows"], arguments["dim"], arguments.get("dtype", "float32"))
    rule = RowOptimizer(arguments.get("optimizer", "rowwise_adagrad"))
    assert memory.alias_bytes == storage.num_bytes + rule.state_bytes(storage)
    assert (
        memory.temp_bytes <= 4e6 + 12 * 4096 * arguments["ids_per_bag"] * 4 + 4096 * kernel._gradient_words(storage) * 4
    )
    assert memory.peak_bytes < device.chip.usable_hbm_bytes


def test_adagrad_on_a_bfloat16_table_is_refused_in_words():
    from tpurec.kernels.dispatch import Shape, choose

    shape = Shape(Storage(64, 16, "bfloat16"), 4, 8, optimizer="adagrad")
    assert "bfloat16" in kernel.limit(shape, chip("v5e"), Config())
    choice = choose("embedding_update", shape, chip("v5e"))
    assert choice.implementation == "plain" and "bfloat16" in choice.reason
