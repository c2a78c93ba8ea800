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


class ConfigError(TpurecError):
    """A recipe, schema or table list that cannot be used as it is."""


class Interrupted(TpurecError):
    """Ctrl-C, or a polite kill, in a command that can be gone on with; the command line exits with 130."""


class DataError(TpurecError):
    """Input data that breaks the schema or the recipe's policy."""


class MissingExtra(TpurecError):
    """A command needs an optional part of the distribution that is not installed."""
