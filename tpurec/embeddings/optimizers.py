"""Optimizers that run inside the backward pass, on the rows that a batch touched.

Each follows the definitions in `tpurec/kernels/embedding_update.py`: the gradients of all occurrences of a row are
added first, weight decay (L2) adds `weight_decay * row`, and then the row takes exactly one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tpurec.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent: `row -= lr * g`.

    Args:
        lr: learning rate, > 0 or 0 to freeze; `set_learning_rate` changes it later without a recompilation.
        weight_decay: L2 coefficient, added to the gradient of touched rows only.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    lr: float
    weight_decay: float = 0.0

    kind: ClassVar[str] = "sgd"
    state_name: ClassVar[str | None] = None
    eps: ClassVar[float] = 0.0
    initial_accumulator: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        _check(self, ("lr", "weight_decay"))


@dataclass(frozen=True)
class Adagrad:
    """Adagrad: `sum += g * g; row -= lr * g / (sqrt(sum) + eps)`, with one accumulator per element.

    Args:
        lr: learning rate, >= 0.
        eps: added to the root; keeps the first step finite where the accumulator is 0. > 0.
        weight_decay: L2 coefficient, added to the gradient of touched rows only.
        initial_accumulator: value that every accumulator starts from, >= 0.

    Raises:
        ConfigError: a value is negative or not finite, or `eps` is 0.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    kind: ClassVar[str] = "adagrad"
    state_name: ClassVar[str | None] = "sum"

    def __post_init__(self) -> None:
        _check(self, ("lr", "eps", "weight_decay", "initial_accumulator"))


@dataclass(frozen=True)
class RowWiseAdagrad:
    """Row-wise Adagrad: `sum += mean(g * g); row -= lr * g / (sqrt(sum) + eps)`, with one accumulator per row.

    Args:
        lr: learning rate, >= 0.
        eps: added to the root, > 0.
        weight_decay: L2 coefficient, added to the gradient of touched rows only.
        initial_accumulator: value that every accumulator starts from, >= 0.

    Raises:
        ConfigError: a value is negative or not finite, or `eps` is 0.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    kind: ClassVar[str] = "rowwise_adagrad"
    state_name: ClassVar[str | None] = "sum"

    def __post_init__(self) -> None:
        _check(self, ("lr", "eps", "weight_decay", "initial_accumulator"))


EmbeddingOptimizer = SGD | Adagrad | RowWiseAdagrad


def _check(optimizer: EmbeddingOptimizer, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(optimizer, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"{type(optimizer).__name__}: {name} = {value!r} must be a finite number >= 0.")
    if "eps" in names and optimizer.eps == 0:
        raise ConfigError(
            f"{type(optimizer).__name__}: eps = 0 divides by zero where an accumulator is 0.", "Use eps = 1e-8."
        )


def from_torchrec(optimizer_type: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any]) -> Any:
    """Read TorchRec's form of a fused optimizer.

    Args:
        optimizer_type: `torch.optim.SGD`, `torch.optim.Adagrad` or `torchrec.optim.RowWiseAdagrad`.
        optimizer_kwargs: its keywords: `lr` (or `learning_rate`; FBGEMM's default 0.01), `eps` (FBGEMM's default 1e-8),
            `weight_decay`, and `initial_accumulator_value`.

    Returns:
        The optimizer specification.

    Raises:
        ConfigError: another optimizer, or a keyword that it does not have.
    """
    import torch
    from torchrec.optim import RowWiseAdagrad as TorchRecRowWiseAdagrad

    classes = {torch.optim.SGD: SGD, torch.optim.Adagrad: Adagrad, TorchRecRowWiseAdagrad: RowWiseAdagrad}
    if optimizer_type not in classes:
        known = ", ".join(cls.__name__ for cls in classes)
        raise ConfigError(f"Optimizer {optimizer_type!r} cannot run inside the backward pass.", f"Use one of: {known}.")
    cls = classes[optimizer_type]
    renamed = {"learning_rate": "lr", "initial_accumulator_value": "initial_accumulator"}
    values = {renamed.get(key, key): value for key, value in optimizer_kwargs.items()}
    allowed = [name for name in cls.__dataclass_fields__]
    unknown = [key for key in optimizer_kwargs if renamed.get(key, key) not in allowed]
    if unknown:
        raise ConfigError(
            f"{cls.__name__}: keyword {unknown[0]!r} = {optimizer_kwargs[unknown[0]]!r} has no meaning in the fused "
            "optimizer.",
            f"Known keywords: {', '.join(allowed)}.",
        )
    return cls(**{"lr": 0.01, **values})
