"""What a binding reads from an op's schema; no device is needed. The bound ops run in the tier `emulated`."""

import inspect

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from torch import Tensor

from tpurec.ops import _tpu_binding
from tpurec.topology.chips import CHIPS


@torch.library.custom_op("tpurec_test::scale_", mutates_args=("parts",), device_types="cpu")
def scale_(parts: list[Tensor], ids: Tensor, weights: Tensor | None, sizes: list[int], factor: float = 2.0) -> None:
    for part in parts:
        part.mul_(factor)


@torch.library.custom_op("tpurec_test::both_", mutates_args=("table",), device_types="cpu")
def both_(table: Tensor) -> Tensor:
    return table.add_(1).clone()


@torch.library.custom_op("tpurec_test::placed", mutates_args=(), device_types="cpu")
def placed(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device, copy=True)


def pure(op, function, mutated):
    return _tpu_binding._pure(function, op._opoverload._schema, mutated)


def test_the_signature_is_the_ops_and_new_values_come_back_flat():
    seen = {}

    def function(parts, ids, weights, sizes, factor, *, chip, implementation):
        seen.update(chip=chip, implementation=implementation, sizes=sizes)
        return ([part * factor for part in parts],)

    bound = pure(scale_, function, [0])
    parameters = inspect.signature(bound).parameters
    annotations = [parameter.annotation for parameter in parameters.values()]
    assert list(parameters) == ["parts", "ids", "weights", "sizes", "factor", "chip", "implementation"]
    assert annotations == [list[jax.Array], jax.Array, jax.Array | None, list[int], float, str, str]
    assert inspect.signature(bound).return_annotation == list[jax.Array]
    one, two = bound([jnp.ones(2), jnp.ones(3)], jnp.zeros(1), None, (1, 2), 3.0, "v6e", "")
    assert (one.shape, two.shape, float(two[0])) == ((2,), (3,), 3.0)
    assert seen == {"chip": CHIPS["v6e"], "implementation": None, "sizes": (1, 2)}


def test_what_cannot_be_bound_is_refused():
    with pytest.raises(TypeError, match="tpurec_test::both_: an op has to either change arguments in place or return"):
        pure(both_, lambda table: table, [0])
    with pytest.raises(TypeError, match="tpurec_test::placed: an argument or result of type"):
        pure(placed, lambda table, device: table, [])


@pytest.mark.parametrize("name", CHIPS)
def test_pallas_lowers_for_the_chip_that_is_named(name):
    """Without it JAX has a CPU here, and no idea of a TPU."""
    with _tpu_binding.compiling_for(name):
        info = pltpu.get_tpu_info()
    sparse_core, facts = info.sparse_core, CHIPS[name].sparse_core
    assert (sparse_core is None) == (facts is None)
    if facts is not None:
        assert (sparse_core.num_lanes, sparse_core.num_subcores) == (facts.num_lanes, facts.num_subcores)
    with _tpu_binding.compiling_for(""), pytest.raises(ValueError, match="Unsupported TPU device kind"):
        pltpu.get_tpu_info()
