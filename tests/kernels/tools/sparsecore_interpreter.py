"""Run SparseCore Pallas kernels on the CPU, one thread per vector subcore, with race detection.

jax 0.10.2 cannot interpret them: it gives every subcore the index 0, without an error. Inside `interpreter(...)` its
interpreter is patched; the patch is for this very source, and refuses any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic import core as mosaic_core
from jax._src.pallas.mosaic import sc_core, tpu_info
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc
from jax._src.pallas.mosaic.interpret import thread_map
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.tools.sparsecore_rules import RULES, Machine
from tpurec.topology.chips import Chip, chip

JAX_VERSION = "0.10.2"
# sha256 of the sources that are patched or relied on; a new jax must be looked at before these change.
SOURCES = {
    "_interpret_jaxpr": "f9e6801a301ee21b",
    "interpret_pallas_call": "7a6cef3c7b366368",
    "_local_core_id_or_zero_if_hbm": "c9959d7022947f16",
    "_get_randomized_grid_coordinates": "431d460931ffb400",
}
_HOOK_BEFORE = "      if (impl := _interpret_impls.get(prim, None)):\n"
_HOOK = (
    "      if (_rule := _sparsecore_rules.get(prim)) is not None and (\n"
    "          _ruled := _rule(eqn, deferred_invals, ctx, token, _interpret)) is not None:\n"
    "        token, out = _ruled\n\n"
    "      elif (impl := _interpret_impls.get(prim, None)):\n"
)


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The machine that kernels see inside `interpreter(...)`.

    Args:
        chip: facts of the small machine; give these to the kernel.
        parameters: give these to the kernel as `interpret`.
    """

    chip: Chip
    parameters: pltpu.InterpretParams

    def races_found(self) -> bool:
        """Whether two accesses without an order between them were seen since `interpreter(...)` was entered."""
        return bool(ipc.races is not None and ipc.races.races_found)


def check_sources() -> None:
    """Refuse a jax whose interpreter is not the one that the patch was written for.

    Raises:
        AssertionError: naming the version, or the function that differs.
    """
    assert jax.__version__ == JAX_VERSION, f"made for jax {JAX_VERSION}, not {jax.__version__}"
    for name, expected in SOURCES.items():
        found = hashlib.sha256(inspect.getsource(getattr(ipc, name)).encode()).hexdigest()[:16]
        assert found == expected, f"jax's {name} has changed: its source hashes to {found}, expected {expected}"


class _CompiledOnce:
    """Runs a subcore's program; jax would have every thread compile it again, which is most of the time.

    The programs are large and their arithmetic is small, so they are compiled without optimisation.
    """

    def __init__(self) -> None:
        self.programs: dict[int, tuple] = {}
        self.lock = threading.Lock()

    def __call__(self, jaxpr, consts, *arguments) -> None:
        with self.lock:
            if id(jaxpr) not in self.programs:
                evaluate = jax.jit(lambda consts, *arguments: jax.core.eval_jaxpr(jaxpr, consts, *arguments))
                lowered = evaluate.trace(consts, *arguments).lower()
                compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
                self.programs[id(jaxpr)] = (jaxpr, compiled)  # the jaxpr is kept, so that its id stays its own
        self.programs[id(jaxpr)][1](consts, *arguments)


@contextmanager
def interpreter(
    generation: str, *, num_cores: int = 2, num_subcores: int = 2, detect_races: bool = True
) -> Iterator[Interpreter]:
    """Patch jax's interpreter so that SparseCore kernels run correctly inside the `with`.

    Args:
        generation: `v5p`, `v6e` (8 lanes) or `7x` (16 lanes).
        num_cores: SparseCores of the machine; each subcore is a thread, so keep it small.
        num_subcores: vector subcores per SparseCore.
        detect_races: see accesses that nothing orders; a kernel without its waits can still give right numbers.

    Yields:
        The machine: its chip facts, the value for `interpret=`, and whether races were found.
    """
    originals = {name: getattr(ipc, name) for name in SOURCES}
    check_sources()
    real = chip(generation)
    assert real.sparse_core is not None
    version = tpu_info.chip_version_from_device_kind(real.device_kind)
    small = dataclasses.replace(real.sparse_core, num_cores=num_cores, num_subcores=num_subcores)
    machine = dataclasses.replace(
        real,
        sparse_core=small,
        num_sparse_cores=num_cores * real.num_devices,
    )
    ipc._sparsecore_rules = RULES
    source = textwrap.dedent(inspect.getsource(originals["_interpret_jaxpr"]))
    assert source.count(_HOOK_BEFORE) == 1
    scope: dict = {}
    exec(compile(source.replace(_HOOK_BEFORE, _HOOK), "sparsecore_interpreter", "exec"), ipc.__dict__, scope)
    inside = [False]

    def one_subcore_each(grid, mosaic_params, seed):
        if inside[0]:  # the grid is the mesh: every thread has its own point already
            return (jnp.array((), dtype=jnp.int32),) * len(grid)
        return originals["_get_randomized_grid_coordinates"](grid, mosaic_params, seed)

    def call(*arguments, mesh, compiler_params, interpret_params, **rest):
        if not isinstance(mesh, sc_core.VectorSubcoreMesh):
            return originals["interpret_pallas_call"](
                *arguments, mesh=mesh, compiler_params=compiler_params, interpret_params=interpret_params, **rest
            )
        Machine.num_subcores = mesh.num_subcores
        Machine.barriers.clear()
        inside[0] = True
        try:
            return originals["interpret_pallas_call"](
                *arguments,
                mesh=None,
                compiler_params=(compiler_params or mosaic_core.CompilerParams()).replace(
                    dimension_semantics=("parallel", "parallel")
                ),
                interpret_params=dataclasses.replace(interpret_params, num_cores_or_threads=mesh.size),
                **rest,
            )
        finally:
            inside[0] = False

    def owner(core, space):
        """Whose buffer: HBM is one for all, shared memory belongs to a SparseCore, the rest to the subcore."""
        if space in ("any", "hbm"):
            return 0
        return core // Machine.num_subcores * Machine.num_subcores if space == "vmem_shared" else core

    patches = {
        "_interpret_jaxpr": scope["_interpret_jaxpr"],
        "_get_randomized_grid_coordinates": one_subcore_each,
        "interpret_pallas_call": call,
        "_local_core_id_or_zero_if_hbm": owner,
    }
    run_jaxpr = thread_map._run_jaxpr
    had = tpu_info.registry.get("cpu")
    tpu_info.registry["cpu"] = lambda: tpu_info._get_tpu_info_impl(version, 1)
    tpu_info.get_tpu_info.cache_clear()
    ipc.reset_tpu_interpret_mode_state()
    try:
        for name, function in patches.items():
            setattr(ipc, name, function)
        thread_map._run_jaxpr = _CompiledOnce()
        yield Interpreter(machine, pltpu.InterpretParams(detect_races=detect_races))
    finally:
        for name, function in originals.items():
            setattr(ipc, name, function)
        thread_map._run_jaxpr = run_jaxpr
        del ipc._sparsecore_rules
        if had is None:
            del tpu_info.registry["cpu"]
        else:
            tpu_info.registry["cpu"] = had
        tpu_info.get_tpu_info.cache_clear()
        ipc.reset_tpu_interpret_mode_state()
