"""The optimizer step as one function of tensors, which is called as it is or compiled whole: what a TPU runs.

The gradient is taken inside the function: compiled apart from its backward pass, a step would lose the updates of its
tables (`tpurec/ops/_tpu_guard.py`). Numbers that change between steps are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from pipelines.compilations import Compilations
from pipelines.compiler import Compiler
from pipelines.dense_optimizer import TensorOptimizer
from pipelines.step import DenseOptimizer, ReduceGradients, TrainStep, masked_log_loss
from tpurec.embeddings import TorchBatch, dense_gradients, named_dense_parameters, set_learning_rate


class TensorStep(TrainStep):
    """One step on batches of static shape.

    Args:
        model: `forward(dense, kjt) -> logits [B]`, on its device; its tables are fused collections.
        kind: dense optimizer: `adam`, `adagrad` or `sgd`.
        weight_decay: of the dense part.
        compiler: compiles the function; None to call it as it is.
        compilations: where programs are recorded; None to record none.
        reduce_gradients: as of `EagerStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: DenseOptimizer,
        weight_decay: float,
        compiler: Compiler | None = None,
        compilations: Compilations | None = None,
        reduce_gradients: ReduceGradients | None = None,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.compiled = False
        self._compilations = compilations
        parameters = {name: parameter for name, parameter in named_dense_parameters(model) if parameter.requires_grad}
        self._optimizer = TensorOptimizer(parameters, kind, weight_decay)
        self._rates: tuple[float, float] | None = None
        self._loss_scale_rows: int | None = None
        self._rate = torch.zeros((), device=self.device)
        self._rows = torch.zeros((), device=self.device)

        def step(
            dense: Tensor, features: KeyedJaggedTensor, labels: Tensor, valid: Tensor, rows: Tensor, rate: Tensor
        ) -> Tensor:
            loss = masked_log_loss(model(dense, features), labels, valid, rows)
            gradients = dense_gradients(loss, model)
            loss = loss.detach()
            if reduce_gradients is not None:
                reduce_gradients([*gradients.values(), loss])
            self._optimizer.step(gradients, rate)
            return loss

        self._step = step if compiler is None else compiler(step)

    def set_learning_rates(self, dense: float, tables: float) -> None:
        """As `TrainStep.set_learning_rates`; writes to the device only what has changed."""
        if self._rates != (dense, tables):
            self._rate.fill_(dense)
            set_learning_rate(self.model, tables)
            self._rates = (dense, tables)

    def __call__(self, batch: TorchBatch, loss_scale_rows: int) -> Tensor:
        """As `TrainStep.__call__`; returns before the device is done."""
        if self._loss_scale_rows != loss_scale_rows:
            self._rows.fill_(max(loss_scale_rows, 1))
            self._loss_scale_rows = loss_scale_rows

        def call() -> Tensor:
            return self._step(batch.dense, batch.features, batch.labels, batch.valid, self._rows, self._rate)

        if self._compilations is None:
            return call()
        loss, self.compiled = self._compilations.watch("training", batch, call, Tensor.item)
        return loss

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """As `TrainStep.optimizer_state`, under the same names."""
        return self._optimizer.state()
