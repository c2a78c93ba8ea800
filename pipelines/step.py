"""One optimizer step: forward, loss, backward (in which the tables are updated), the dense optimizer. Plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpurec.embeddings import TorchBatch, dense_parameters, named_dense_parameters, set_learning_rate

DenseOptimizer = Literal["adam", "adagrad", "sgd"]
ReduceGradients = Callable[[list[Tensor]], None]


class TrainStep(ABC):
    """Model, dense optimizer and learning rates; called once a batch.

    Attributes:
        model: `forward(dense, kjt) -> logits [B]`; its tables are fused collections.
        device: where batches have to be, and where losses are.
        compiled: whether the last call compiled a program, and waited for it.

    Example:
        >>> step = EagerStep(model, torch_optimizer(model, "adam", 1e-3, 0.0))
        >>> step.set_learning_rates(dense=1e-3, tables=0.05)
        >>> loss = step(to_torch(packed), int(packed.valid.sum()))
    """

    model: nn.Module
    device: torch.device
    compiled: bool = False

    @abstractmethod
    def set_learning_rates(self, dense: float, tables: float) -> None:
        """Set the learning rates of the following steps.

        Args:
            dense: of the dense parameters, >= 0.
            tables: of the tables, >= 0.
        """

    @abstractmethod
    def __call__(self, batch: TorchBatch, loss_scale_rows: int) -> Tensor:
        """Do one step.

        Args:
            batch: this worker's rows, on `device`.
            loss_scale_rows: labelled rows of the batch, over all workers: what the sum of the rows' losses is divided
                by. 0 counts as 1.

        Returns:
            float32 scalar on `device`, detached: the mean log loss over the labelled rows (over those of all workers,
            if gradients are reduced); 0 if there are none. Reading it waits for the step.
        """

    @abstractmethod
    def optimizer_state(self) -> Mapping[str, Tensor]:
        """The state of the dense optimizer, for checkpoints; loading is writing into these tensors.

        Returns:
            `PARAMETER.STATE` to tensor, such as `over_arch.model.0.weight.exp_avg`.
        """


class EagerStep(TrainStep):
    """Operations run as they are called, on the CPU.

    Args:
        model: as of `TrainStep`.
        dense_optimizer: of all parameters but the tables, as `torch_optimizer` makes it.
        reduce_gradients: called between the backward pass and the dense optimizer's step with the gradients of the
            dense parameters, in the order of `named_dense_parameters`, and the loss at the end; it sums each of them
            over the workers, in place. None for one worker.
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        reduce_gradients: ReduceGradients | None = None,
    ) -> None:
        self.model = model
        self.dense_optimizer = dense_optimizer
        self.device = torch.device("cpu")
        self._reduce_gradients = reduce_gradients
        _make_state(dense_optimizer)

    def set_learning_rates(self, dense: float, tables: float) -> None:
        """As `TrainStep.set_learning_rates`."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        set_learning_rate(self.model, tables)

    def __call__(self, batch: TorchBatch, loss_scale_rows: int) -> Tensor:
        """As `TrainStep.__call__`."""
        logits = self.model(batch.dense, batch.features)
        loss = masked_log_loss(logits, batch.labels, batch.valid, torch.tensor(float(max(loss_scale_rows, 1))))
        self.dense_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        loss = loss.detach()
        if self._reduce_gradients is not None:
            gradients = [parameter.grad for parameter in dense_parameters(self.model) if parameter.grad is not None]
            self._reduce_gradients([*gradients, loss])
        self.dense_optimizer.step()
        return loss

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """As `TrainStep.optimizer_state`."""
        return {
            f"{name}.{key}": value
            for name, parameter in named_dense_parameters(self.model)
            for key, value in self.dense_optimizer.state.get(parameter, {}).items()
        }


def masked_log_loss(logits: Tensor, labels: Tensor, valid: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of the valid rows' binary cross entropies, divided by a number of rows.

    Args:
        logits: float32 [B].
        labels: float32 [B], in [0, 1].
        valid: bool [B]; other rows get no gradient.
        rows: float32 scalar, 1 or more; on the device of the logits.

    Returns:
        A scalar.
    """
    weight = valid.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, weight=weight, reduction="sum") / rows


def torch_optimizer(
    model: nn.Module, kind: DenseOptimizer, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Make the optimizer of everything but the tables.

    Args:
        model: with fused tables.
        kind: `adam`, `adagrad` or `sgd`, with torch's defaults.
        learning_rate: > 0.
        weight_decay: L2, >= 0.

    Returns:
        `torch.optim.Adam`, `Adagrad` or `SGD`.
    """
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    parameters = [parameter for parameter in dense_parameters(model) if parameter.requires_grad]
    # torch refuses an empty list; a model may be nothing but tables.
    parameters = parameters or [torch.empty(0, requires_grad=True)]
    return kinds[kind](parameters, lr=learning_rate, weight_decay=weight_decay)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a torch optimizer allocate the state that it otherwise makes in a parameter's first step, as it makes it.

    So a checkpoint of any step can be loaded into it, and names the same tensors whatever has been stepped. A step with
    zero gradients and learning rate 0 changes no parameter; Adam, Adagrad and SGD all start from zeros.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters:
        for value in optimizer.state[parameter].values():
            if value is not None:
                value.zero_()
