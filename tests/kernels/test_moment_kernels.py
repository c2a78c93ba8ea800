"""Adam and row-wise Adam in the Pallas kernels: as in plain JAX, without races, compiled in place for every chip."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.tools.cases import make_bags, make_table
from tests.kernels.tools.programs import update as update_program
from tests.kernels.tools.sparsecore_interpreter import interpreter
from tests.kernels.tools.update_cases import positive, run_update
from tpurec.kernels import embedding_update_sparsecore, embedding_update_tensorcore
from tpurec.kernels.ahead_of_time import target
from tpurec.kernels.moments import MOMENT_NAMES
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.topology.chips import CHIPS

LR = 0.25
RULES = {
    "adam": RowOptimizer("adam", 1e-6, 0.3),
    "adam, decoupled decay": RowOptimizer("adam", 1e-6, 0.3, 0.8, 0.95, decoupled=True),
    "rowwise_adam": RowOptimizer("rowwise_adam", 1e-6, 0.3, 0.8, 0.95, decoupled=True),
    "adagrad, decoupled decay": RowOptimizer("adagrad", 1e-3, 0.3, decoupled=True),
}


def wrong(rule, storage, dtype, how, kinds, steps=1) -> str:
    """What differs from plain JAX after some steps: empty if nothing. Moments are not zero, steps not the first."""
    generator = np.random.default_rng(storage.dim)
    table = jnp.asarray(make_table(storage.num_rows, storage.dim, dtype, seed=storage.dim))
    shapes = rule.state_shapes(storage.num_rows, storage.dim)
    state = tuple(
        jnp.asarray(generator.random(shape, dtype=np.float32) + np.float32(0.1)) if shape else jnp.int32(7)
        for shape in shapes
    )
    state = state[0] if len(state) == 1 else state
    grads = generator.standard_normal((9, storage.dim), dtype=np.float32)

    def program(**options):
        return jax.jit(lambda *data: run_update(*data, rule, "sum", storage, lr=LR, **options))

    ours, plain = program(**how), program()
    found = expected = (table, state)
    touched = np.zeros(storage.num_rows, bool)
    for seed, (lengths, ids) in enumerate([kinds] * steps):
        bags = positive(make_bags(lengths, ids, num_bags=9, capacity=47, num_rows=storage.num_rows, seed=seed))
        data = (grads, bags.ids, bags.offsets, bags.weights)
        found, expected = jax.block_until_ready(ours(*found, *data)), plain(*expected, *data)
        touched[bags.ids[bags.counts()]] = True
    for one, other, before in zip(*map(jax.tree.leaves, (found, expected, (table, state))), strict=True):
        one, other, before = (np.asarray(array) for array in (one, other, before))
        error = 2.0**-7 if one.dtype == ml_dtypes.bfloat16 else 2e-5
        if not np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=error, atol=error / 10):
            return f"values, {one.shape}"
        if one.ndim and one[~touched].tobytes() != before[~touched].tobytes():
            return f"rows that no batch touched, {one.shape}"
    return "" if touched.any() and not touched.all() else "no case"


# Lanes, rule, dim, dtype, parts, bags.
SPARSE_CASES = [
    ("v6e", "adam", 32, np.float32, 3, ("a few", "uniform")),
    ("7x", "adam, decoupled decay", 24, ml_dtypes.bfloat16, 1, ("a few", "uniform")),
    ("v6e", "rowwise_adam", 8, ml_dtypes.bfloat16, 1, ("one id each", "three equal")),
    ("7x", "rowwise_adam", 24, np.float32, 3, ("a few", "uniform")),
    ("7x", "adagrad, decoupled decay", 24, np.float32, 1, ("a few", "uniform")),
]


def sparse_storage(dim, dtype, num_parts):
    rows = 60 if num_parts == 1 else 128 * (num_parts - 1) + 10
    name = "float32" if dtype == np.float32 else "bfloat16"
    return Storage(rows, dim, name) if num_parts == 1 else Storage(rows, dim, name, max_part_bytes=128 * 4 * dim)


@pytest.mark.interpret
@pytest.mark.parametrize(("generation", "rule", "dim", "dtype", "num_parts", "kinds"), SPARSE_CASES)
def test_sparsecore_steps_equal_plain_jax_without_races(generation, rule, dim, dtype, num_parts, kinds):
    with interpreter(generation, num_cores=1) as machine:
        how = {"chip": machine.chip, "implementation": "sparsecore", "interpret": machine.parameters}
        how["config"] = embedding_update_sparsecore.Config(16, 8, "shared")
        assert not wrong(RULES[rule], sparse_storage(dim, dtype, num_parts), dtype, how, kinds)
        assert not machine.races_found()


@pytest.mark.interpret
@pytest.mark.parametrize("fault", ["first moment not written", "correction left out"])
def test_planted_faults_are_caught(fault, monkeypatch):
    if fault == "first moment not written":
        monkeypatch.setattr(embedding_update_sparsecore.RowMath, "_store", lambda self, rows, *place: None)
    else:
        monkeypatch.setattr(
            embedding_update_sparsecore, "step_scalars", lambda rule, lr, count: (lr, lr, jnp.float32(1))
        )
    with interpreter("7x", num_cores=1) as machine:
        how = {"chip": machine.chip, "implementation": "sparsecore", "interpret": machine.parameters}
        how["config"] = embedding_update_sparsecore.Config(16, 8, "shared")
        storage = Storage(60, 24)
        found = wrong(RULES["adam"], storage, np.float32, how, ("a few", "uniform"))
        assert found or machine.races_found()


@pytest.mark.interpret
@pytest.mark.parametrize("rule", ["adam", "rowwise_adam", "adagrad, decoupled decay"])
@pytest.mark.parametrize("dim", [24, 128])
def test_tensorcore_steps_equal_plain_jax_without_races(rule, dim):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    how = {"chip": CHIPS["v5e"], "implementation": "tensorcore", "interpret": pltpu.InterpretParams(detect_races=True)}
    how["config"] = embedding_update_tensorcore.Config(128)
    assert not wrong(RULES[rule], Storage(60, dim), np.float32, how, ("a few", "uniform"), steps=2)
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


@pytest.mark.compile
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
@pytest.mark.parametrize("name", MOMENT_NAMES)
def test_compiles_in_place(name, chip):
    """Table and moments are aliased; temporaries are those of the ids, at most 4 MB and 12 x their bytes."""
    device, storage = target(chip), Storage(1 << 20, 128)
    function, inputs, donate = update_program(
        device, num_rows=1 << 20, dim=128, num_bags=4096, ids_per_bag=1, optimizer=name
    )
    memory = device.memory(function, *inputs, donate=donate)
    assert memory.alias_bytes >= storage.num_bytes + RowOptimizer(name).state_bytes(storage)
    assert memory.temp_bytes <= 4e6 + 12 * 4096 * 4
