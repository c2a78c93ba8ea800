"""SGD, Adam and Adagrad as tensor arithmetic, for steps that are compiled whole: `torch.optim` would break the graph.

Formulas, defaults and names of the state are those of torch.optim 2.13 (`torch/optim/{sgd,adam,adagrad}.py`), so that a
checkpoint moves between the two. Learning rate and step counts are tensors: another value needs no other program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipelines.step import DenseOptimizer

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
ADAGRAD_EPS = 1e-10

_STATE = {"sgd": (), "adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


class TensorOptimizer:
    """The optimizer of the dense parameters, without Python numbers that change between steps.

    Args:
        parameters: name to parameter; those with `requires_grad`. The state is made beside each.
        kind: `adam`, `adagrad` or `sgd`.
        weight_decay: L2, >= 0.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], kind: DenseOptimizer, weight_decay: float) -> None:
        self.kind = kind
        self.weight_decay = weight_decay
        self._parameters = dict(parameters)
        self._state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            state = {key: torch.zeros_like(parameter, requires_grad=False) for key in _STATE[kind]}
            if state:
                # As torch has it: one count a parameter, float32, so that a parameter without a gradient stays at 0.
                state["step"] = torch.zeros((), device=parameter.device)
            self._state[name] = state

    def state(self) -> dict[str, Tensor]:
        """The state, for checkpoints; loading is writing into these tensors.

        Returns:
            `PARAMETER.STATE` to tensor.
        """
        return {f"{name}.{key}": value for name, state in self._state.items() for key, value in state.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: Tensor) -> None:
        """Change the parameters and the state in place.

        Args:
            gradients: parameter name to gradient; parameters without one stay as they are.
            rate: learning rate, a scalar.
        """
        for name, gradient in gradients.items():
            parameter, state = self._parameters[name], self._state[name]
            if self.weight_decay:
                gradient = gradient + self.weight_decay * parameter
            if self.kind == "sgd":
                parameter.sub_(rate * gradient)
                continue
            state["step"].add_(1.0)
            if self.kind == "adagrad":
                state["sum"].add_(gradient * gradient)
                parameter.sub_(rate * gradient / (state["sum"].sqrt() + ADAGRAD_EPS))
                continue
            first, second = ADAM_BETAS
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).add_((1 - second) * (gradient * gradient))
            count = state["step"].to(parameter.dtype)
            scale = rate / _one_minus_power(first, count)
            denominator = state["exp_avg_sq"].sqrt() / _one_minus_power(second, count).sqrt() + ADAM_EPS
            parameter.sub_(scale * state["exp_avg"] / denominator)


def _one_minus_power(base: float, exponent: Tensor) -> Tensor:
    # In float32, 1 - 0.999 ** 1 would lose four digits of seven.
    return -torch.expm1(exponent * math.log(base))
