"""Compile for TPUs that are not there: libtpu's compiler against a topology description.

Nothing runs; what comes back is whether a program is legal, and the compiler's count of its memory. libtpu reads its
environment when it loads, so `prepare` must have been called before anything asks jax for a TPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from tpurec.topology.chips import Chip, chip

# What libtpu asks of its surroundings; on a machine without a TPU it would wait for a metadata server.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud metadata server who we are
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: several processes may compile at once
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
_SLICE = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "7x": "2x2x1"}


def prepare() -> None:
    """Set what libtpu asks of its environment, where nothing is set, and keep jax's own arrays on the CPU."""
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


@dataclass(frozen=True)
class Memory:
    """What a compiled program needs on its device, in bytes (`memory_analysis()`).

    Args:
        argument_bytes: of all arguments.
        output_bytes: of all results.
        alias_bytes: of results that take over the memory of an argument.
        temp_bytes: temporaries in HBM.
        code_bytes: the program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that alias none of them, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class Target:
    """One device of a generation, to compile for.

    Args:
        name: `v5e`, `v5p`, `v6e` or `7x`.
    """

    def __init__(self, name: str) -> None:
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        prepare()
        self.chip: Chip = chip(name)
        topology = topologies.get_topology_desc(topology_name=f"{self.chip.libtpu_name}:{_SLICE[name]}", platform="tpu")
        self.mesh = Mesh(np.array(topology.devices[:1]), ("device",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec())

    def array(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        """An argument that lives on this device.

        Args:
            shape: its shape.
            dtype: its dtype.

        Returns:
            The abstract array.
        """
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.sharding)

    def compile(self, function: Callable, *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Compiled:
        """Compile `jax.jit(function)` for this device.

        Args:
            function: traced with `arguments`.
            arguments: pytrees of `array(...)`.
            donate: positions of donated arguments.

        Returns:
            The compiled program. It cannot run here.
        """
        return self.lower(function, *arguments, donate=donate).compile()

    def lower(self, function: Callable, *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Lowered:
        """What `compile` gives to the compiler; its text tells one program from another.

        Args:
            function: as of `compile`.
            arguments: as of `compile`.
            donate: as of `compile`.

        Returns:
            The program before it is compiled.
        """
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            traced = jax.jit(function, donate_argnums=tuple(donate)).trace(*arguments)
            return traced.lower(lowering_platforms=("tpu",))

    def memory(self, function: Callable, *arguments: Any, donate: Sequence[int] = ()) -> Memory:
        """Compile, and say what memory the program needs.

        Args:
            function: as of `compile`.
            arguments: as of `compile`.
            donate: as of `compile`.

        Returns:
            The compiler's numbers.
        """
        found = self.compile(function, *arguments, donate=donate).memory_analysis()
        return Memory(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
            found.generated_code_size_in_bytes,
        )


@cache
def target(name: str) -> Target:
    """The target of a generation, made once.

    Args:
        name: `v5e`, `v5p`, `v6e` or `7x`.

    Returns:
        The target.
    """
    return Target(name)
