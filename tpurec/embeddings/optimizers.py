"""Optimizers that run inside the backward pass, on the rows that a batch touched.

Each follows the definitions in `tpurec/kernels/optimizers.py`: the gradients of all occurrences of a row are added
first, clipping and weight decay come next, and then the row takes exactly one step. Rows that a batch does not touch
keep their bits, and so does their state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tpurec.errors import ConfigError

if TYPE_CHECKING:
    import torch

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What every optimizer has.

    Args:
        decoupled_weight_decay: weight decay acts on the row, `row -= lr * weight_decay * row` (AdamW), not on the
            gradient.
        max_gradient_norm: the combined gradient of a row is scaled down to this Euclidean norm, > 0; None for no limit.
        rounding_seed: rows of bfloat16 tables are rounded stochastically from this seed, 0 to 2^31 - 1, so that small
            steps are not lost; other tables are not rounded. None rounds to nearest.
    """

    decoupled_weight_decay: bool = False
    max_gradient_norm: float | None = None
    rounding_seed: int | None = None

    kind: ClassVar[str]
    # Names of the accumulators and what they have one number for: each `element`, or each `row`.
    states: ClassVar[tuple[tuple[str, str], ...]] = ()
    state_name: ClassVar[str | None] = None  # of the only accumulators, if there is one kind

    @property
    def counts_steps(self) -> bool:
        """Whether its state ends with the number of updates so far, named `step`."""
        return len(self.states) > 1 or self.rounding_seed is not None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of all of its state, in the order of the ops."""
        names = tuple(name for name, _ in self.states)
        return (*names, STEP) if self.counts_steps else names

    def arguments(self) -> dict[str, Any]:
        """The keywords of `tpurec.ops.embedding_update_` that say more than `kind`, `eps` and `weight_decay`."""
        betas = getattr(self, "betas", (0.9, 0.999))
        return {
            "beta1": float(betas[0]),
            "beta2": float(betas[1]),
            "decoupled_weight_decay": self.decoupled_weight_decay,
            "max_gradient_norm": self.max_gradient_norm or 0.0,
            "rounding_seed": -1 if self.rounding_seed is None else self.rounding_seed,
        }

    def _check(self, *names: str) -> None:
        name = type(self).__name__
        for key in names:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name}: {key} = {value!r} must be a finite number >= 0.")
        if "eps" in names and self.eps == 0:
            raise ConfigError(f"{name}: eps = 0 divides by zero where an accumulator is 0.", "Use eps = 1e-8.")
        norm, seed = self.max_gradient_norm, self.rounding_seed
        if norm is not None and not 0 < norm < float("inf"):
            raise ConfigError(
                f"{name}: max_gradient_norm = {norm!r} must be a finite number above 0.", "None: no limit."
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31):
            raise ConfigError(f"{name}: rounding_seed = {seed!r} must be a whole number from 0 to 2^31 - 1.")


@dataclass(frozen=True)
class SGD(_Common):
    """Plain gradient descent: `row -= lr * g`.

    Args:
        lr: learning rate, > 0 or 0 to freeze; `set_learning_rate` changes it later without a recompilation.
        weight_decay: coefficient, of touched rows only; L2 unless `decoupled_weight_decay`.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    lr: float
    weight_decay: float = 0.0

    kind: ClassVar[str] = "sgd"
    eps: ClassVar[float] = 0.0
    initial_accumulator: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        self._check("lr", "weight_decay")


@dataclass(frozen=True)
class Adagrad(_Common):
    """Adagrad: `sum += g * g; row -= lr * g / (sqrt(sum) + eps)`, with one accumulator per element.

    Args:
        lr: learning rate, >= 0.
        eps: added to the root; keeps the first step finite where the accumulator is 0. > 0.
        weight_decay: coefficient, of touched rows only; L2 unless `decoupled_weight_decay`.
        initial_accumulator: value that every accumulator starts from, >= 0.

    Raises:
        ConfigError: a value is negative or not finite, or `eps` is 0.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    kind: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[tuple[str, str], ...]] = (("sum", "element"),)
    state_name: ClassVar[str | None] = "sum"

    def __post_init__(self) -> None:
        self._check("lr", "eps", "weight_decay", "initial_accumulator")


@dataclass(frozen=True)
class RowWiseAdagrad(_Common):
    """Row-wise Adagrad: `sum += mean(g * g); row -= lr * g / (sqrt(sum) + eps)`, with one accumulator per row.

    Args:
        lr: learning rate, >= 0.
        eps: added to the root, > 0.
        weight_decay: coefficient, of touched rows only; L2 unless `decoupled_weight_decay`.
        initial_accumulator: value that every accumulator starts from, >= 0.

    Raises:
        ConfigError: a value is negative or not finite, or `eps` is 0.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    kind: ClassVar[str] = "rowwise_adagrad"
    states: ClassVar[tuple[tuple[str, str], ...]] = (("sum", "row"),)
    state_name: ClassVar[str | None] = "sum"

    def __post_init__(self) -> None:
        self._check("lr", "eps", "weight_decay", "initial_accumulator")


@dataclass(frozen=True)
class Adam(_Common):
    """Lazy Adam: `m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g * g`, corrected for the *global* step t, the number of
    updates so far: `row -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.

    The moments of a row that a batch does not touch do not decay (as FBGEMM's `ADAM` and `torch.optim.SparseAdam`). The
    step count is part of the optimizer's state.

    Args:
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root, > 0.
        weight_decay: coefficient, of touched rows only; L2 unless `decoupled_weight_decay`.

    Raises:
        ConfigError: a value is out of range.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    kind: ClassVar[str] = "adam"
    states: ClassVar[tuple[tuple[str, str], ...]] = (("exp_avg", "element"), ("exp_avg_sq", "element"))
    initial_accumulator: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        self._check("lr", "eps", "weight_decay")
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"{type(self).__name__}: betas = {self.betas!r} must be two numbers in [0, 1).")


@dataclass(frozen=True)
class RowWiseAdam(Adam):
    """As `Adam`, with one second moment per row: `v = b2 v + (1 - b2) mean(g * g)` (FBGEMM's `PARTIAL_ROWWISE_ADAM`).

    Args:
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root, > 0.
        weight_decay: coefficient, of touched rows only; L2 unless `decoupled_weight_decay`.
    """

    kind: ClassVar[str] = "rowwise_adam"
    states: ClassVar[tuple[tuple[str, str], ...]] = (("exp_avg", "element"), ("exp_avg_sq", "row"))


def check_learning_rate(lr: float) -> None:
    """Refuse what no step can be multiplied with.

    Args:
        lr: the learning rate of the following steps.

    Raises:
        ConfigError: it is negative or not finite.
    """
    if not 0 <= lr < float("inf"):
        raise ConfigError(f"learning rate {lr!r} must be a finite number >= 0.")


EmbeddingOptimizer = SGD | Adagrad | RowWiseAdagrad | Adam | RowWiseAdam


def from_torchrec(optimizer_type: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any]) -> Any:
    """Read TorchRec's form of a fused optimizer; it means what TorchRec's fused modules (FBGEMM) do with it.

    Args:
        optimizer_type: `torch.optim.SGD`, `torch.optim.Adagrad`, `torch.optim.Adam`, or TorchRec's `SGD`, `Adagrad`,
            `RowWiseAdagrad`, `Adam`, `PartialRowWiseAdam` of `torchrec.optim`.
        optimizer_kwargs: its keywords: `lr` (or `learning_rate`; FBGEMM's default 0.01), `eps` (FBGEMM's default 1e-8),
            `weight_decay`, `initial_accumulator_value`, and for Adam `betas`, or `beta1` and `beta2`. FBGEMM decouples
            the weight decay of both Adams, whatever the class is called; `decoupled_weight_decay=False` makes it L2.

    Returns:
        The optimizer specification.

    Raises:
        ConfigError: another optimizer, or a keyword that it does not have.
    """
    import torch
    import torchrec.optim

    classes = {
        torch.optim.SGD: SGD,
        torchrec.optim.SGD: SGD,
        torch.optim.Adagrad: Adagrad,
        torchrec.optim.Adagrad: Adagrad,
        torchrec.optim.RowWiseAdagrad: RowWiseAdagrad,
        torch.optim.Adam: Adam,
        torchrec.optim.Adam: Adam,
        torchrec.optim.PartialRowWiseAdam: RowWiseAdam,
    }
    if optimizer_type not in classes:
        known = ", ".join(dict.fromkeys(cls.__name__ for cls in classes))
        raise ConfigError(f"Optimizer {optimizer_type!r} cannot run inside the backward pass.", f"Use one of: {known}.")
    cls = classes[optimizer_type]
    given = dict(optimizer_kwargs)
    if issubclass(cls, Adam):
        given.setdefault("decoupled_weight_decay", True)
        if {"beta1", "beta2"} & given.keys():
            given["betas"] = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    renamed = {"learning_rate": "lr", "initial_accumulator_value": "initial_accumulator"}
    values = {renamed.get(key, key): value for key, value in given.items()}
    allowed = [name for name in cls.__dataclass_fields__]
    unknown = [key for key in given if renamed.get(key, key) not in allowed]
    if unknown:
        raise ConfigError(
            f"{cls.__name__}: keyword {unknown[0]!r} = {given[unknown[0]]!r} has no meaning in the fused optimizer.",
            f"Known keywords: {', '.join(allowed)}.",
        )
    return cls(**{"lr": 0.01, **values})
