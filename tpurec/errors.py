"""Errors that people read: what is wrong, and what to do about it."""

from __future__ import annotations


class TpurecError(Exception):
    """A failure with a known cause; the command line prints it and exits with 1.

    Args:
        problem: one line that names the file, column, table or id, the value, and the limit.
        remedy: one line that says what to do; empty if `problem` already says it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem
        self.remedy = remedy


# torch says it by an exception of no class of its own.
_TORCH_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def machine_problem(error: BaseException) -> TpurecError | None:
    """Say what is the machine's state, and no defect of ours: memory that ran out, a full disk, a read-only folder.

    Args:
        error: any failure.

    Returns:
        What to tell people; None if it is something else.
    """
    reason = " ".join(str(error).split())[:300].rstrip(".")
    if isinstance(error, MemoryError) or any(word in reason for word in _TORCH_OUT_OF_MEMORY):
        return TpurecError(
            f"out of memory{f': {reason}' if reason else ''}.",
            "Use smaller tables, a smaller batch or fewer workers, or a machine with more memory.",
        )
    if isinstance(error, OSError):
        where = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        reason = error.strerror or reason or type(error).__name__
        return TpurecError(f"{where}: {reason}." if where else f"{reason}.", "Check path, permissions and free space.")
    return None


class ConfigError(TpurecError):
    """A recipe, schema or table list that cannot be used as it is."""


class Interrupted(TpurecError):
    """Ctrl-C, or a polite kill, in a command that can be gone on with; the command line exits with 130."""


class DataError(TpurecError):
    """Input data that breaks the schema or the recipe's policy."""


class MissingExtra(TpurecError):
    """A command needs an optional part of the distribution that is not installed."""
