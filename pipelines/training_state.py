"""What a checkpoint of a run holds: model, optimizer states and random state as named tensors, the position as JSON.

Names: `model.` + the state_dict's name; `optimizer.` + parameter or table + state name; `rng.torch`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipelines.train_loop import Position
from tpurec.embeddings import fused_optimizer_state_dict, named_dense_parameters
from tpurec.sharding.checkpoint import Checkpointer, load_checkpoint

MODEL = "model."


class TrainingState:
    """The tensors of one run, by name.

    Args:
        model: with fused tables.
        dense_optimizer: of its other parameters.
    """

    def __init__(self, model: nn.Module, dense_optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.dense_optimizer = dense_optimizer

    def save(
        self, checkpointer: Checkpointer, position: Position, score: float | None, fingerprints: dict[str, Any]
    ) -> Path:
        """Write a checkpoint.

        Args:
            checkpointer: where to.
            position: where the run stands.
            score: of the validation, if there was one.
            fingerprints: what the run is made of, to be found in the checkpoint by whoever meets it alone.

        Returns:
            The checkpoint's folder.
        """
        state = {"position": dataclasses.asdict(position), "fingerprints": fingerprints}
        return checkpointer.save(position.step, self._tensors(), state, score)

    def load(self, folder: Path) -> Position:
        """Load a checkpoint, all of it.

        Args:
            folder: the checkpoint.

        Returns:
            Where the run stood.

        Raises:
            CheckpointError: it does not fit, or is damaged.
        """
        initialise_optimizer_state(self.dense_optimizer)
        tensors = self._tensors()
        manifest = load_checkpoint(folder, tensors)
        torch.set_rng_state(tensors["rng.torch"])
        return Position(**manifest.state["position"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {MODEL + name: tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(self.model).items()}
        for name, parameter in named_dense_parameters(self.model):
            for key, value in self.dense_optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        tensors["rng.torch"] = torch.get_rng_state()
        return tensors


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the model's weights alone, for scoring.

    Args:
        model: built with the recipe and schema of the checkpoint's run.
        folder: the checkpoint.

    Raises:
        CheckpointError: it does not fit, or is damaged.
    """
    load_checkpoint(folder, {MODEL + name: tensor for name, tensor in model.state_dict().items()}, only=MODEL)


def initialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a torch optimizer allocate the state that it otherwise makes in its first step, so that it can be loaded.

    A step with zero gradients and learning rate 0 changes no parameter.

    Args:
        optimizer: one that has done no step; its values afterwards mean nothing.
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
