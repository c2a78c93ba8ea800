"""Compile for TPUs that are not there: libtpu's compiler against a topology description.

The environment below must stand before libtpu loads, so import this module before anything asks jax for a TPU. The
compiler's dumps are chosen when libtpu loads, too, so `tests.kernels.tools.bundles` compiles in a process of its own.
"""

from __future__ import annotations

import os

_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud metadata server who we are
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: several test processes may compile at once
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
for _name, _value in _LIBTPU_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import cache  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

from tpurec.topology.chips import Chip, chip  # noqa: E402

jax.config.update("jax_platforms", "cpu")
_SLICE = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "7x": "2x2x1"}


@dataclass(frozen=True)
class Memory:
    """What a compiled program needs on its device, in bytes (`memory_analysis()`)."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

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
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            traced = jax.jit(function, donate_argnums=tuple(donate)).trace(*arguments)
            return traced.lower(lowering_platforms=("tpu",)).compile()

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
