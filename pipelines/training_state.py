"""What a checkpoint of a run holds: model, optimizer states and random state as named tensors, the position as JSON.

Names: `model.` + the state_dict's name; `optimizer.` + parameter or table + state name; `rng.torch`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipelines.position import Position
from pipelines.step import TrainStep
from tpurec.embeddings import fused_optimizer_state_dict
from tpurec.sharding.checkpoint import Checkpointer, load_checkpoint
from tpurec.sharding.modules import checkpoint_pieces
from tpurec.sharding.pieces import whole_tensors

MODEL = "model."


class TrainingState:
    """The tensors of one run, by name; of sharded tables what this rank holds.

    Args:
        step: owns model and optimizers.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step

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
        return checkpointer.save(
            position.step, self._tensors(), state, score, pieces=checkpoint_pieces(self._step.model)
        )

    def load(self, folder: Path) -> Position:
        """Load a checkpoint, all of it.

        Args:
            folder: the checkpoint.

        Returns:
            Where the run stood.

        Raises:
            CheckpointError: it does not fit, or is damaged.
        """
        tensors = self._tensors()
        manifest = load_checkpoint(folder, tensors, pieces=checkpoint_pieces(self._step.model))
        torch.set_rng_state(tensors["rng.torch"])
        return Position(**manifest.state["position"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        model = self._step.model
        tensors = {MODEL + name: tensor for name, tensor in whole_tensors(model).items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in fused_optimizer_state_dict(model).items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self._step.optimizer_state().items()}
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
    tensors = {MODEL + name: tensor for name, tensor in whole_tensors(model).items()}
    pieces = [piece for piece in checkpoint_pieces(model) if piece.name.startswith(MODEL)]
    load_checkpoint(folder, tensors, pieces=pieces, only=MODEL)
