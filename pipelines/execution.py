"""How a run's steps and evaluations are executed: on the CPU as they are called, or on a TPU in one of its modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from pipelines.compilations import Compilation, Compilations
from pipelines.compiler import Compiler
from pipelines.device import DeviceConfig
from pipelines.feed import DeviceFeed, Feed
from pipelines.shapes import StaticFeed
from pipelines.step import DenseOptimizer, EagerStep, ReduceGradients, TrainStep, torch_optimizer
from pipelines.tensor_step import TensorStep
from pipelines.tpu import start_tpu
from tpurec.embeddings import TorchBatch

Forward = Callable[[TorchBatch], Tensor]


class DenseConfig(Protocol):
    """What an execution has to know of the recipe's section [train]."""

    optimizer: DenseOptimizer
    learning_rate: float
    weight_decay: float


class Execution:
    """On the CPU, operation by operation; and what an execution elsewhere has to offer, too.

    Attributes:
        device: where models and batches have to be.
        compilations: what was compiled; nothing on the CPU.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compilations = Compilations(lambda: 0, False, "warn", lambda found: None)

    def building(self) -> AbstractContextManager[None]:
        """Where a model is to be built.

        Returns:
            A context.
        """
        return nullcontext()

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device.

        Args:
            model: built on the CPU, so that the same seed gives the same model everywhere.

        Returns:
            The model.
        """
        return model

    def feed(self) -> Feed:
        """Make what moves batches to the device; training and evaluation have one each.

        Returns:
            The feed.
        """
        return DeviceFeed(self.device)

    def evaluation_feed(self) -> Feed:
        """Make what moves batches of evaluations to the device.

        Returns:
            The feed; for any number of evaluations, one after the other.
        """
        return self.feed()

    def evaluating(self) -> AbstractContextManager[None]:
        """Where an evaluation is to be done.

        Returns:
            A context.
        """
        return nullcontext()

    def statistics(self) -> dict[str, Any]:
        """Sum up for the result what was done besides training.

        Returns:
            `programs`: how many were compiled.
        """
        return {"programs": self.compilations.programs}

    def train_step(
        self, model: nn.Module, config: DenseConfig, reduce_gradients: ReduceGradients | None = None
    ) -> TrainStep:
        """Make the optimizer step.

        Args:
            model: as `place` gave it.
            config: optimizer, learning rate and weight decay of the dense part.
            reduce_gradients: as of `EagerStep`.

        Returns:
            The step.
        """
        optimizer = torch_optimizer(model, config.optimizer, config.learning_rate, config.weight_decay)
        return EagerStep(model, optimizer, reduce_gradients)

    def forward(self, model: nn.Module) -> Forward:
        """Make what scores batches.

        Args:
            model: as `place` gave it; in evaluation mode whenever it scores.

        Returns:
            A function from a batch of the feed to its logits, float32 [B]; called in torch's inference mode.
        """
        return lambda batch: model(batch.dense, batch.features)


class TpuExecution(Execution):
    """On a TPU.

    Args:
        config: with `kind = "tpu"`.
        report: takes each compilation.

    Raises:
        ConfigError: there is no TPU.
        MissingExtra: its software is not installed.
    """

    def __init__(self, config: DeviceConfig, report: Callable[[Compilation], None]) -> None:
        self.device = start_tpu(config)
        self._compiler = Compiler("tpu") if config.execution == "compile" else None
        count = torch.tpu._get_cache_misses if self._compiler is None else lambda: self._compiler.programs
        self.compilations = Compilations(count, self._compiler is not None, config.on_recompile, report)

    def place(self, model: nn.Module) -> nn.Module:
        """As `Execution.place`."""
        return model.to(self.device)

    def feed(self) -> Feed:
        """As `Execution.feed`; batches keep their unused capacity."""
        return StaticFeed(self.device)

    def train_step(
        self, model: nn.Module, config: DenseConfig, reduce_gradients: ReduceGradients | None = None
    ) -> TrainStep:
        """As `Execution.train_step`."""
        return TensorStep(
            model, config.optimizer, config.weight_decay, self._compiler, self.compilations, reduce_gradients
        )

    def forward(self, model: nn.Module) -> Forward:
        """As `Execution.forward`."""

        def score(dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
            return model(dense, features)

        function = score if self._compiler is None else self._compiler(score)

        def call(batch: TorchBatch) -> Tensor:
            logits, _ = self.compilations.watch(
                "evaluation", batch, lambda: function(batch.dense, batch.features), Tensor.cpu
            )
            return logits

        return call


def start(config: DeviceConfig, report: Callable[[Compilation], None]) -> Execution:
    """Start the device of a recipe.

    Args:
        config: the recipe's section [device].
        report: takes each compilation.

    Returns:
        How to execute on it.

    Raises:
        ConfigError: there is no such device here.
        MissingExtra: its software is not installed.
    """
    return Execution() if config.kind == "cpu" else TpuExecution(config, report)
