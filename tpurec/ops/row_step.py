"""What one optimizer step does to a block of rows on the CPU; the rules are those of `tpurec/kernels/optimizers.py`.

FBGEMM has no Adam on the CPU, and knows no weight decay, clipping or stochastic rounding there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpurec.kernels.rounding import noise, truncated_to_bfloat16

# Accumulators per element or per row, as `tpurec.kernels.optimizers.ACCUMULATORS` has them, which would load JAX.
ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("element",),
    "rowwise_adagrad": ("row",),
    "adam": ("element", "element"),
    "rowwise_adam": ("element", "row"),
}
MOMENT_OPTIMIZERS = ("adam", "rowwise_adam")


@dataclass(frozen=True)
class RowStep:
    """A rule with its constants.

    Args:
        optimizer: a key of `ACCUMULATORS`.
        eps: added to the root of the accumulator.
        weight_decay: coefficient.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        decoupled: weight decay acts on the row, not on the gradient.
        max_norm: longest gradient of a row; 0 for no limit.
        rounding_seed: of stochastic rounding; -1 to round to nearest.
    """

    optimizer: str
    eps: float
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    decoupled: bool = False
    max_norm: float = 0.0
    rounding_seed: int = -1

    def __post_init__(self) -> None:
        if self.optimizer not in ACCUMULATORS:
            raise ValueError(f"optimizer: {self.optimizer!r}; one of {tuple(ACCUMULATORS)} is expected")
        if self.optimizer in MOMENT_OPTIMIZERS and not self.eps > 0:
            raise ValueError(f"eps: {self.eps}; {self.optimizer} needs one above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; a number in [0, 1) is expected")
        if not self.max_norm >= 0:
            raise ValueError(f"max_gradient_norm: {self.max_norm}; 0 or a positive number is expected")
        if not -1 <= self.rounding_seed < 2**31:
            raise ValueError(f"rounding_seed: {self.rounding_seed}; 0 to 2^31 - 1, or -1, is expected")

    @property
    def counts_steps(self) -> bool:
        """Whether the last of its state is the number of updates so far, an int32 scalar."""
        return self.optimizer in MOMENT_OPTIMIZERS or self.rounding_seed >= 0

    @property
    def num_states(self) -> int:
        """Tensors of its state where none is cut into parts, such as on the CPU."""
        return len(ACCUMULATORS[self.optimizer]) + self.counts_steps

    def takes_states(self, count: int, num_parts: int) -> bool:
        """Whether a number of tensors can be its state.

        Args:
            count: tensors.
            num_parts: of the table; accumulators per element have as many each, or more beside a bfloat16 table.

        Returns:
            Whether.
        """
        elements = ACCUMULATORS[self.optimizer].count("element")
        parts = count - (self.num_states - elements)
        return parts == 0 if not elements else parts % elements == 0 and parts >= elements * num_parts

    def check_state(self, state: list[Tensor], num_rows: int, dim: int) -> None:
        """Refuse state that is not laid out for the CPU.

        Args:
            state: accumulators, and the step count if there is one.
            num_rows: rows of the stack.
            dim: its columns.

        Raises:
            ValueError: a number of tensors, shape or dtype that does not fit.
        """
        shapes = [(num_rows, dim) if kind == "element" else (num_rows,) for kind in ACCUMULATORS[self.optimizer]]
        good = len(state) == self.num_states and all(
            tuple(tensor.shape) == shape and tensor.dtype in (torch.float32, torch.float64)
            for tensor, shape in zip(state, shapes, strict=False)
        )
        if good and self.counts_steps:
            good = state[-1].dim() == 0 and state[-1].dtype == torch.int32
        if not good:
            found = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in state) or "none"
            expected = " and ".join(f"float32 {list(shape)}" for shape in shapes)
            count = " and the step count, int32 []" if self.counts_steps else ""
            raise ValueError(f"state: {found}; on the CPU {expected or 'none'}{count} is expected for {self.optimizer}")

    def apply(
        self,
        table: Tensor,
        state: list[Tensor],
        rows: Tensor,
        grad_rows: Tensor,
        lr: Tensor,
        mean_squares: Tensor | None = None,
    ) -> None:
        """One step on some rows, in place.

        Args:
            table: `[num_rows, dim]`.
            state: as of `check_state`, its step count already that of this update.
            rows: int64 `[block]`, unique.
            grad_rows: `[block, dim]` float32 or float64, duplicates combined; may be overwritten.
            lr: learning rate, scalar.
            mean_squares: `[block]`, for accumulators per row: of the gradients after clipping and weight decay; by
                default those of `grad_rows`, which may be some columns of longer rows.
        """
        values = table.index_select(0, rows).to(grad_rows.dtype)
        if self.max_norm:
            norms = torch.linalg.vector_norm(grad_rows, dim=1, keepdim=True)
            grad_rows.mul_(self.max_norm / norms.clamp_(min=self.max_norm))
        if self.weight_decay and not self.decoupled:
            grad_rows.add_(values, alpha=self.weight_decay)
        elif self.weight_decay:
            values.sub_(values * (lr.to(values.dtype) * self.weight_decay))
        if self.optimizer == "sgd":
            values.sub_(grad_rows.mul_(lr))
        elif self.optimizer in MOMENT_OPTIMIZERS:
            self._moments(state, rows, values, grad_rows, lr, mean_squares)
        else:
            sums = state[0].index_select(0, rows)
            if self.optimizer == "rowwise_adagrad":
                sums.add_(_mean_squares(grad_rows) if mean_squares is None else mean_squares)
                values.addcmul_(grad_rows, (-lr / (sums.sqrt() + self.eps))[:, None].to(values.dtype))
            else:
                sums.addcmul_(grad_rows, grad_rows)
                values.sub_(grad_rows.mul_(lr).div_(sums.sqrt().add_(self.eps)))
            state[0].index_copy_(0, rows, sums)
        table.index_copy_(0, rows, self._rounded(values, rows, state, table.dtype))

    def _moments(
        self,
        state: list[Tensor],
        rows: Tensor,
        values: Tensor,
        grad_rows: Tensor,
        lr: Tensor,
        mean_squares: Tensor | None,
    ) -> None:
        step = int(state[-1])
        first = state[0].index_select(0, rows).mul_(self.beta1).add_(grad_rows, alpha=1 - self.beta1)
        second = state[1].index_select(0, rows).mul_(self.beta2)
        if self.optimizer == "rowwise_adam":
            second.add_(_mean_squares(grad_rows) if mean_squares is None else mean_squares, alpha=1 - self.beta2)
        else:
            second.addcmul_(grad_rows, grad_rows, value=1 - self.beta2)
        state[0].index_copy_(0, rows, first)
        state[1].index_copy_(0, rows, second)
        # The corrections are float64 on the host, so that 1 - 0.999 ** 1 keeps its digits.
        root = (second / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        scale = lr.to(values.dtype) / (1 - self.beta1**step)
        values.sub_(first.mul_(scale).div_(root if root.dim() == 2 else root[:, None]))

    def _rounded(self, values: Tensor, rows: Tensor, state: list[Tensor], dtype: torch.dtype) -> Tensor:
        nearest = values.to(dtype)
        if self.rounding_seed < 0 or dtype != torch.bfloat16:
            return nearest
        one = [np.array([number], np.uint32) for number in (self.rounding_seed, int(state[-1]))]
        random = noise(*one, rows.numpy().astype(np.uint32), np.arange(values.shape[1], dtype=np.uint32))
        bits = truncated_to_bfloat16(values.float().numpy().view(np.uint32), random)
        chosen = torch.from_numpy(bits.view(np.float32)).to(dtype)  # exact
        return torch.where(values.isfinite(), chosen, nearest)


def _mean_squares(grad_rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad_rows, dim=1).square_().div_(grad_rows.shape[1])
