"""The interpreter itself: every subcore has its own index, indirect DMAs work, and broken synchronisation is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from tests.kernels.tools.sparsecore_interpreter import SOURCES, check_sources, interpreter

pytestmark = pytest.mark.interpret


def _gather(machine, table, ids, wait=True, early_overwrite=False):
    """Each of the four subcores copies eight rows."""
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=2)
    dim = table.shape[1]

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((32, dim), jnp.float32),
        mesh=mesh,
        scratch_types=[pltpu.VMEM((8,), jnp.int32), pltpu.VMEM((8, dim), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=machine.parameters,
    )
    def kernel(table, ids, out, list_vmem, rows_vmem, semaphore):
        start = (lax.axis_index("core") * 2 + lax.axis_index("subcore")) * 8
        pltpu.sync_copy(ids.at[pl.ds(start, 8)], list_vmem)
        copy = pltpu.make_async_copy(table.at[plsc.Indices(list_vmem, ignored_value=-1)], rows_vmem, semaphore)
        copy.start()
        if early_overwrite:
            pltpu.sync_copy(ids.at[pl.ds(0, 8)], list_vmem)
        if wait:
            copy.wait()
        pltpu.sync_copy(rows_vmem, out.at[pl.ds(start, 8)])
        if not wait:
            copy.wait()

    return np.asarray(jax.jit(kernel)(table, ids))


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((40, 16), dtype=np.float32), rng.permutation(40)[:32].astype(np.int32)


@pytest.mark.parametrize("generation", ["v6e", "7x"])
def test_every_subcore_copies_its_own_rows(generation, inputs):
    table, ids = inputs
    with interpreter(generation) as machine:
        found = _gather(machine, table, ids)
        assert not machine.races_found()
    np.testing.assert_array_equal(found, table[ids])


@pytest.mark.parametrize("fault", [{"wait": False}, {"early_overwrite": True}])
def test_a_missing_wait_is_a_race(fault, inputs):
    with interpreter("7x") as machine:
        _gather(machine, *inputs, **fault)
        assert machine.races_found()


def test_an_index_outside_of_the_table_is_an_error(inputs):
    table, ids = inputs
    with interpreter("7x") as machine, pytest.raises(Exception, match=r"index 40 .* outside of \[0, 40\)"):
        _gather(machine, table, np.where(np.arange(32) == 5, 40, ids).astype(np.int32))


def test_nothing_is_patched_outside_of_the_context():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc

    before = {name: getattr(ipc, name) for name in SOURCES}
    with interpreter("7x"):
        assert ipc.interpret_pallas_call is not before["interpret_pallas_call"]
    assert {name: getattr(ipc, name) for name in SOURCES} == before


def test_another_jax_is_refused(monkeypatch):
    monkeypatch.setitem(SOURCES, "_interpret_jaxpr", "0" * 16)
    with pytest.raises(AssertionError, match="_interpret_jaxpr has changed"):
        check_sources()
