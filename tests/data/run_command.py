"""Runs a `tpurec` command in this process, as its console script does."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from tpurec.cli import main


def run(*words: Any, code: int = 0) -> dict[str, Any]:
    """The JSON object that a command prints with --json, after checking its exit code."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), pytest.raises(SystemExit) as ended:
        main([*map(str, words), "--json"])
    assert ended.value.code == code, stdout.getvalue()
    return json.loads(stdout.getvalue())
