"""Binds a torch custom op to a JAX function on the `tpu` device. All but the function is read from the op's schema.

A JAX function is pure, so an op that changes arguments in place gets their new values back. The old ones are donated,
which lets the compiler write into the same memory. `copy_` between tensors of a TPU with the same shape moves no bytes:
the old tensor, and every view of it, then names the new array. Seen with torch_tpu 0.2.0, and read from the programs
compiled for v5e, v5p, v6e and 7x (tests/emulated/device/check_transfers.py, check_compiled_for_chips.py).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
from torch import Tensor
from torch.library import CustomOpDef

from tpurec.topology.chips import CHIPS

# torch's names of a schema's types, and how torch_tpu wants them spelt in the signature of a JAX function.
_ANNOTATIONS = {
    "Tensor": jax.Array,
    "Optional[Tensor]": jax.Array | None,
    "List[Tensor]": list[jax.Array],
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "List[int]": list[int],
    "List[float]": list[float],
}


class Choice(Protocol):
    """What programs are compiled for, and with which kernels."""

    chip: str
    implementation: str


def bind_op(op: CustomOpDef, function: Callable[..., Any], choice: Callable[[], Choice], *, wide: bool = False) -> None:
    """Register the implementation of an op for the `tpu` device.

    Args:
        op: made by `torch.library.custom_op`, with its fake implementation and its autograd.
        function: takes the op's arguments in their order, tensors as JAX arrays, lists of numbers as tuples. It returns
            what the op returns; if the op changes arguments in place and returns nothing: a tuple of their new values
            in their order. If it has keywords `chip` (`tpurec.topology.chips.Chip` or None) and `implementation` (str
            or None), it gets them.
        choice: gives, at every call, what `chip` and `implementation` are taken from.
        wide: trace the function in jax's 64-bit mode: int64 and float64 arguments and results are then what they say.

    Raises:
        TypeError: the schema has a type that has no place in a JAX program, or both changes arguments and returns.
    """
    from torch.tpu.pallas import jax_op

    schema = op._opoverload._schema
    mutated = [n for n, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    pure = _pure(function, schema, mutated)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*jax_op is experimental.*")
        call = jax_op(schema.name.replace("::", "_jax::"), pure, donate_argnums=tuple(mutated))

    def on_device(*arguments: Any) -> Any:
        chosen = choice()
        # torch leaves out arguments at the end that have their default value.
        arguments += tuple(argument.default_value for argument in schema.arguments[len(arguments) :])
        with compiling_for(chosen.chip), jax.enable_x64(wide):
            result = call(*arguments, chosen.chip, chosen.implementation)
        if not mutated:
            return result
        for old, new in zip(_tensors([arguments[n] for n in mutated]), result, strict=True):
            old.copy_(new)
        return None

    op.register_kernel("tpu")(on_device)


@contextmanager
def compiling_for(chip: str) -> Iterator[None]:
    """Tell Pallas which chip to lower for. Without it Pallas asks for JAX's own device, and torch_tpu's is not JAX's.

    Args:
        chip: generation; empty to change nothing.
    """
    if not chip:
        yield
        return
    facts = CHIPS[chip]
    device = jax.sharding.AbstractDevice(
        device_kind=facts.device_kind, num_cores=facts.num_tensor_cores // facts.num_devices, platform="tpu"
    )
    auto = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), auto, abstract_device=device)):
        yield


def _pure(function: Callable[..., Any], schema: Any, mutated: list[int]) -> Callable[..., Any]:
    """The function with a signature that torch_tpu can read, and with flat new values for what the op changes."""
    takes_choice = {"chip", "implementation"} <= inspect.signature(function).parameters.keys()

    def pure(*arguments: Any) -> Any:
        *values, chip, implementation = arguments
        chosen = {"chip": CHIPS[chip] if chip else None, "implementation": implementation or None}
        result = function(*values, **(chosen if takes_choice else {}))
        return _tensors(result) if mutated else result

    parameters = [(argument.name, _annotation(schema, argument.type)) for argument in schema.arguments]
    parameters += [("chip", str), ("implementation", str)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    pure.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters],
        return_annotation=_result(schema, mutated),
    )
    pure.__name__ = schema.name.replace("::", "_")  # what profiles and dumps show
    return pure


def _annotation(schema: Any, kind: Any) -> Any:
    if str(kind) not in _ANNOTATIONS:
        raise TypeError(f"{schema.name}: an argument or result of type {kind} cannot be bound to a JAX function")
    return _ANNOTATIONS[str(kind)]


def _result(schema: Any, mutated: list[int]) -> Any:
    kinds = [_annotation(schema, result.type) for result in schema.returns]
    if bool(mutated) == bool(kinds):
        raise TypeError(f"{schema.name}: an op has to either change arguments in place or return something")
    if mutated:
        return list[jax.Array]
    return kinds[0] if len(kinds) == 1 else tuple[tuple(kinds)]


def _tensors(values: Any) -> list[Any]:
    """Lists and tuples of tensors, flat and in their order."""
    flat: list[Any] = []
    for value in values:
        flat += [value] if isinstance(value, (Tensor, jax.Array)) else list(value)
    return flat
