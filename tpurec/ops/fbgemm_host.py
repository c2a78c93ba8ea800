"""What the host does for FBGEMM's names on `tpu` tensors: single numbers read from the device, counted; and errors."""

from __future__ import annotations

from torch import Tensor

_reads = 0


def scalar_reads() -> int:
    """How many single numbers were read from the device because a size was not given.

    Returns:
        The count since the process began.
    """
    return _reads


def read_scalar(number: Tensor) -> int:
    """Read one number, and count it.

    Args:
        number: a tensor of one element, on any device.

    Returns:
        The number.
    """
    global _reads
    _reads += 1
    return int(number)


def check(condition: bool, message: str) -> None:
    """Raise what FBGEMM raises for arguments that do not fit.

    Args:
        condition: that must hold.
        message: naming the op or the argument, and the value.

    Raises:
        RuntimeError: it does not hold.
    """
    if not condition:
        raise RuntimeError(message)
