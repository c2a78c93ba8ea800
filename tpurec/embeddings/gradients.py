"""The backward pass as a function, for steps that are compiled whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tpurec.embeddings.fuse import named_dense_parameters


def dense_gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Update the tables and return the gradients of the dense parameters.

    It does what `loss.backward()` does, and can be called inside a function that is compiled with `fullgraph=True`
    (set `torch._dynamo.config.trace_autograd_ops = True`). A step whose forward alone is compiled for a TPU would lose
    the updates of its tables; see `tpurec/ops/_tpu_guard.py`.

    Args:
        loss: scalar.
        model: with fused collections, or sharded ones.

    Returns:
        Parameter name to gradient; parameters that the loss does not depend on are left out.

    Example:
        >>> def step(dense, features, labels):
        ...     loss = binary_cross_entropy_with_logits(model(dense, features), labels)
        ...     for name, gradient in dense_gradients(loss, model).items():
        ...         parameters[name].sub_(0.1 * gradient)
        ...     return loss.detach()
        >>> step = torch.compile(step, backend="tpu", fullgraph=True, dynamic=False)
    """
    dense = {name: parameter for name, parameter in named_dense_parameters(model) if parameter.requires_grad}
    # Autograd runs only what leads to the tensors asked for: without these the tables would not be updated.
    triggers = {id(trigger): trigger for trigger in _update_triggers(model)}
    found = torch.autograd.grad(loss, [*dense.values(), *triggers.values()], allow_unused=True)
    pairs = zip(dense, found[: len(dense)], strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


def _update_triggers(model: nn.Module) -> Iterator[Tensor]:
    """Those of fused collections and of sharded ones, which this layer does not know by type."""
    for module in model.modules():
        if hasattr(module, "update_trigger"):
            yield module.update_trigger()
