"""Compile kernels for a TPU in a process of its own, so that libtpu loads there and nowhere else.

libtpu takes its settings when it loads, prints where it likes, and ends the process where it finds something odd; a
process that has loaded it cannot use another. The child reads one JSON request a line and answers with one.

    python -m tpurec.kernels.compile_process CHIP
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from tpurec.errors import TpurecError
from tpurec.extras import require
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage

_BUSY = re.compile(r"lockfile|already in use|in use by process", re.IGNORECASE)
_NOISE = re.compile(r"^(-{3,}|For simplicity|Traceback|\s|The stack trace)")
_LIMIT = re.compile(r"(Ran out of memory|RESOURCE_EXHAUSTED|E\d{4}:|[A-Za-z.]*(?:Error|Limit)\b).*")


@dataclass(frozen=True)
class KernelProgram:
    """One program to compile.

    Args:
        storage: the tables.
        num_bags: bags.
        num_ids: capacity of the ids.
        weighted: with a weight per id.
        optimizer: of the update; None for the lookup.
        columns: an update of columns whose rows are spread over ranks (`column_step`): without bags and weights.
    """

    storage: Storage
    num_bags: int
    num_ids: int
    weighted: bool = False
    optimizer: RowOptimizer | None = None
    columns: bool = False

    @property
    def op(self) -> str:
        """`embedding_bag`, `embedding_update` or `column_step`."""
        if self.columns:
            return "column_step"
        return "embedding_update" if self.optimizer else "embedding_bag"


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of a program.

    Args:
        implementation: chosen by the tuning table.
        reason: why.
        argument_bytes: of all arguments.
        output_bytes: of all results.
        alias_bytes: of results that take over the memory of an argument.
        temp_bytes: temporaries in HBM.
        code_bytes: the program itself.
        error: why it is not legal, the compiler's words; empty if it is. Then the bytes are 0.
    """

    implementation: str
    reason: str
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    error: str = ""


class CompileProcess:
    """A process that compiles for one device of a generation; a context manager.

    Args:
        chip: `v5e`, `v5p`, `v6e` or `7x`.

    Raises:
        MissingExtra: libtpu is not installed.
    """

    def __init__(self, chip: str) -> None:
        require("libtpu", "compiling for a TPU")
        self._chip = chip
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def __enter__(self) -> Self:
        from tpurec.kernels.ahead_of_time import LIBTPU_ENVIRONMENT

        # Settings of a real TPU's host would describe another slice.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
        environment |= LIBTPU_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._chip],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends this one
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing of it is to be kept
            process.wait()
            for stream in (process.stdin, process.stdout, self._errors):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # of a request that it never read
                        stream.close()

    def compile(self, program: KernelProgram) -> Compiled:
        """Compile one program.

        Args:
            program: what to compile.

        Returns:
            What the compiler said; a program that is not legal is an answer, too.

        Raises:
            TpurecError: libtpu could not be started, or ended the process.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise TpurecError("the compiling process is not running.", "Use it in a with statement.")
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(program)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            process.wait()
            raise _ended(process.returncode, self._stderr())
        found = json.loads(answer)
        if "failed" in found:
            raise _ended(1, found["failed"])
        return Compiled(**found)

    def _stderr(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()


def _ended(code: int, text: str) -> TpurecError:
    """The error for a child that could not go on, from what it wrote."""
    if _BUSY.search(text):
        return TpurecError(
            "libtpu is in use by another process and could not be loaded.", "Stop that process, or wait until it ends."
        )
    last = first_reason(text)
    return TpurecError(f"libtpu could not compile: its process ended with code {code}: {last}", "")


def first_reason(text: str) -> str:
    """The line of an error text that says what is wrong.

    Args:
        text: an exception's text, or what a process wrote on stderr.

    Returns:
        One line: the last that names an error or a limit, else the last that is not noise.

    >>> first_reason("Traceback (most recent call last):\\n  File ...\\nValueError: dim 12")
    'ValueError: dim 12'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    told = [line for line in lines if _LIMIT.search(line)]
    return (told or lines or ["no message"])[-1][:400]


def _answer(target: Any, request: dict[str, Any]) -> Compiled:
    """In the child: choose and compile one program."""
    from tpurec.kernels import dispatch, programs

    rule = request["optimizer"]
    program = KernelProgram(
        Storage(**request["storage"]),
        request["num_bags"],
        request["num_ids"],
        request["weighted"],
        RowOptimizer(**rule) if rule else None,
        request["columns"],
    )
    optimizer = program.optimizer
    shape = dispatch.Shape(
        program.storage,
        program.num_bags,
        program.num_ids,
        program.weighted,
        "sum",
        optimizer.name if optimizer else "",
        (optimizer.beyond_kernels or "") if optimizer else "",
    )
    sizes = (program.num_bags, program.num_ids)
    if program.columns:
        choice = dispatch.Choice(program.op, "plain", None, "steps of spread rows have no Pallas kernel")
        built = programs.column_step(target, program.storage, optimizer, program.num_ids)
        return _compiled(target, choice, built)
    choice = dispatch.choose(program.op, shape, target.chip)
    if optimizer:
        built = programs.update(target, program.storage, optimizer, *sizes, weighted=program.weighted)
    else:
        built = programs.lookup(target, program.storage, *sizes, weighted=program.weighted)
    return _compiled(target, choice, built)


def _compiled(target: Any, choice: Any, built: Any) -> Compiled:
    function, arguments, donate = built
    try:
        memory = target.memory(function, *arguments, donate=donate)
    except Exception as error:  # the lowering and the compiler raise many kinds; each means that it is not legal
        return Compiled(choice.implementation, choice.reason, error=f"{first_reason(str(error) or repr(error))}")
    return Compiled(choice.implementation, choice.reason, **dataclasses.asdict(memory))


def _serve(chip: str) -> None:
    """In the child: answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")  # libtpu may print on stdout: that goes to stderr
    os.dup2(2, 1)
    from tpurec.kernels.ahead_of_time import target

    for line in sys.stdin:
        try:
            device = target(chip)
        except Exception as error:  # libtpu could not be loaded, for whatever reason it gives
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
            return
        print(json.dumps(dataclasses.asdict(_answer(device, json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
