"""The dense part is data parallel: its gradients are added up over ranks in one all-reduce, with those of small tables.

Every rank's loss is the sum over its own labelled examples divided by the number of all ranks' labelled examples
(`RoutedBatch.num_labelled_global`). The sum of the gradients is then that of the mean over the global batch, whatever
the number of ranks and however unevenly the labels are spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpurec.embeddings import dense_parameters
from tpurec.sharding.modules import exchange_of


class DenseGradientReducer:
    """Adds up the gradients of a model's dense part and of its data-parallel tables, which then take their step.

    Args:
        model: of `shard`.
        parameters: the dense parameters; by default all of the model that require gradients.

    Example:
        >>> reducer = dense_gradient_reducer(model)
        >>> loss = losses.sum() / routed.num_labelled_global
        >>> loss.backward()  # sharded tables have taken their step
        >>> reducer.reduce()  # so have data-parallel tables, and `.grad` of the dense part is that of all ranks
        >>> optimizer.step()
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        chosen = dense_parameters(model) if parameters is None else parameters
        self._parameters = [parameter for parameter in chosen if parameter.requires_grad]
        self._exchange = exchange_of(model)

    def reduce(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Do it; every rank must, once after every backward pass.

        Args:
            tensors: what to add up, in place, besides the gradients of data-parallel tables: as many of the same shapes
                on every rank, such as dense gradients and the loss; by default `.grad` of the parameters.
        """
        exchange = self._exchange
        if exchange is None:
            return
        if tensors is None:
            for parameter in self._parameters:
                if parameter.grad is None:  # nothing on this rank depended on it; elsewhere something may
                    parameter.grad = torch.zeros_like(parameter)
            tensors = [parameter.grad for parameter in self._parameters]
        arrays = [*tensors, *exchange.replicated_gradients()]
        if arrays:
            dtype = torch.float32
            for array in arrays:
                dtype = torch.promote_types(dtype, array.dtype)
            flat = torch.cat([array.reshape(-1).to(dtype) for array in arrays])
            exchange.wire.all_reduce("dense_gradients", flat)
            pieces = flat.split_with_sizes([array.numel() for array in arrays])
            for array, piece in zip(arrays, pieces, strict=True):
                array.copy_(piece.view_as(array))
        exchange.step_replicated()


def dense_gradient_reducer(model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> DenseGradientReducer:
    """Make the reducer of a model.

    Args:
        model: of `shard`.
        parameters: the dense parameters; by default all of the model that require gradients.

    Returns:
        The reducer; at world size 1 its `reduce` does nothing.
    """
    return DenseGradientReducer(model, parameters)


def broadcast_dense(model: nn.Module) -> None:
    """Give every rank the dense parameters and buffers of rank 0.

    Args:
        model: of `shard`.
    """
    exchange = exchange_of(model)
    if exchange is None:
        return
    source = dist.get_global_rank(exchange.wire.group, 0) if exchange.wire.group is not None else 0
    tensors: list[Tensor] = [*(p.data for p in dense_parameters(model)), *model.buffers()]
    for tensor in tensors:
        dist.broadcast(tensor, source, group=exchange.wire.group)
