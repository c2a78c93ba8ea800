"""The same call of TorchRec on the CPU and on the device: equal results, and exactly the transfers that are stated.

A behaviour gets its inputs on a device and gives back results of any of TorchRec's types, lists and dicts of them, and
plain values. What is moved before and looked at after it does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.emulated.runtime import Kind, record, recorded

SCALAR = 8  # bytes; a constant of an eager operation may be uploaded as one number


@dataclass(frozen=True)
class Behaviour:
    """One thing that TorchRec does.

    Args:
        act: what is done with the inputs; its results are compared.
        inputs: makes them on the CPU, in a list; they are moved.
        reads: bytes of each transfer to the host, in their order: what TorchRec itself reads.
        writes: bytes of each transfer to the device of more than one number: what TorchRec makes of lists.
        backward: also compare the gradients of the floating inputs and of modules' parameters.
    """

    act: Callable[..., Any]
    inputs: Callable[[], list[Any]]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    backward: bool = False


def check(behaviour: Behaviour) -> None:
    """Run a behaviour on both devices and compare.

    Args:
        behaviour: what to run.

    Raises:
        AssertionError: a result, a gradient or a transfer is another one.
    """
    on_cpu = behaviour.inputs()
    on_tpu = [_moved(item) for item in behaviour.inputs()]
    torch.accelerator.synchronize()
    record()
    actual = behaviour.act(*on_tpu)
    torch.accelerator.synchronize()
    to_host = tuple(size for kind, size in recorded() if kind == Kind.TO_HOST)
    to_device = tuple(size for kind, size in recorded() if kind == Kind.TO_DEVICE and size > SCALAR)
    expected = behaviour.act(*on_cpu)
    mine, others = _flat(actual), _flat(expected)
    assert len(mine) == len(others), f"{len(mine)} results on the device, {len(others)} on the CPU"
    for one, other in zip(mine, others, strict=True):
        assert_same(one, other)
    stated = (behaviour.reads, behaviour.writes)
    assert (to_host, to_device) == stated, f"moved {to_host} and {to_device} bytes; {stated} are stated"
    if behaviour.backward:
        _check_gradients((mine, on_tpu), (others, on_cpu))


def assert_same(mine: Any, other: Any) -> None:
    """Compare a result of the device with the CPU's.

    Args:
        mine: tensor or plain value.
        other: the same of the CPU.

    Raises:
        AssertionError: another type, dtype, shape or value.
    """
    if not isinstance(other, torch.Tensor):
        assert mine == other, f"{mine} on the device, {other} on the CPU"
        return
    found = (mine.device.type, mine.dtype)
    assert found == ("tpu", other.dtype), f"{found} on the device, {other.dtype} on the CPU"
    if other.is_floating_point():
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(mine.cpu(), other), f"{mine.cpu()} on the device, {other} on the CPU"


def _check_gradients(mine: tuple[list[Any], list[Any]], other: tuple[list[Any], list[Any]]) -> None:
    results, leaves = [], []
    for outputs, inputs in (mine, other):
        floats = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
        weights = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.device) for one in floats]
        loss = sum((one * weight).sum() for one, weight in zip(floats, weights, strict=True))
        leaves.append([leaf for item in inputs for leaf in _leaves(item)])
        torch.accelerator.synchronize()
        record()
        results.append(torch.autograd.grad(loss, leaves[-1]))
        torch.accelerator.synchronize()
        assert not [size for kind, size in recorded() if kind == Kind.TO_HOST]
    assert leaves[0] and len(leaves[0]) == len(leaves[1])
    for one, two in zip(*results, strict=True):
        assert_same(one, two)


def _leaves(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.nn.Module):
        return list(item.parameters())
    return [one for one in _flat(item) if isinstance(one, torch.Tensor) and one.requires_grad]


def _moved(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().to("tpu").requires_grad_(item.requires_grad)
    if isinstance(item, (list, tuple)):
        return type(item)(_moved(part) for part in item)
    if isinstance(item, dict):
        return {key: _moved(part) for key, part in item.items()}
    if isinstance(item, KeyedTensor):
        return KeyedTensor(item.keys(), item.length_per_key(), _moved(item.values()), item.key_dim())
    return item.to("tpu") if hasattr(item, "to") else item


def _flat(item: Any) -> list[Any]:
    """Tensors and plain values of a result, in a fixed order."""
    if isinstance(item, JaggedTensor):
        return [item.values(), item.lengths(), item.offsets(), item.weights_or_none()]
    if isinstance(item, KeyedJaggedTensor):
        parts = [item.keys(), item.stride_per_key(), item.values(), item.lengths(), item.offsets()]
        return [*parts, item.weights_or_none(), *_flat(item.inverse_indices_or_none() or [])]
    if isinstance(item, KeyedTensor):
        return [item.keys(), item.length_per_key(), item.key_dim(), item.values()]
    if isinstance(item, dict):
        return [list(item), *(one for part in item.values() for one in _flat(part))]
    if isinstance(item, (list, tuple)) and any(not isinstance(part, (int, str)) for part in item):
        return [one for part in item for one in _flat(part)]
    return [item]
