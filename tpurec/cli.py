"""The `tpurec` command: finds its commands through entry points and turns errors into exit codes. No logic.

A distribution adds a command by an entry point in the group `tpurec.commands` whose value is a function with typer
annotations or a `typer.Typer`. So this package never imports the applications.
"""

from __future__ import annotations

import sys

try:
    import json
    import os
    import signal
    import traceback
    from importlib.metadata import EntryPoint, entry_points
    from typing import Annotated, Any

    import typer
    from typer.core import TyperCommand, TyperGroup

    import tpurec
    from tpurec.errors import Interrupted, TpurecError, machine_problem
    from tpurec.reporting import Reporter
except KeyboardInterrupt:  # these imports take a quarter of a second, and `main` is not there yet to say it in one line
    print("error: interrupted.", file=sys.stderr)
    if "--json" in sys.argv:
        print('{"error": {"message": "interrupted.", "remedy": ""}}')
    sys.exit(130)

GROUP = "tpurec.commands"
SENTENCE = 400  # characters: the list of commands shows their first sentences whole, wrapped, not cut off at "..."
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Commands(TyperGroup):
    """Loads a command's module only when that command, or the list of all, is asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return sorted(point.name for point in entry_points(group=GROUP))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | TyperGroup | None:
        found = [point for point in entry_points(group=GROUP) if point.name == cmd_name]
        return _load(found[0]) if found else None

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        rows = []
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            try:
                help_line = _load(point).get_short_help_str(limit=SENTENCE)
            except Exception as error:  # one broken command must not hide the others
                help_line = f"(cannot be loaded: {' '.join(str(error).split())})"
            rows.append((point.name, help_line))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _load(point: EntryPoint) -> TyperCommand | TyperGroup:
    target = point.load()
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=point.name)(target)
        target = app
    command = typer.main.get_command(target)
    command.name = point.name
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tpurec {tpurec.__version__}")
        raise typer.Exit


# Group and commands must come from the same library: typer carries a click of its own, whose commands, contexts and
# exceptions have nothing to do with those of the package `click`.
_app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@_app.callback()
def _root(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the Python traceback of a failure (before the command's name).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train and serve recommendation models on TPU slices, or on this CPU.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Every command has --help and --json.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: the words after `tpurec`; by default those of this process.

    Raises:
        SystemExit: always; 0 done, 1 failed with a reason, 2 wrong usage, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _interrupt)  # a polite kill cleans up as Ctrl-C does
    # A shell without job control starts `tpurec ... &` with SIGINT ignored; `kill -INT` is to work there, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Commands that use a TPU import torch_tpu themselves. Left on, `import torch` would load it in every command and
    # every child process: seconds and log lines, and a failure where warnings are errors.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    Reporter.json_printed = False
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        # Without standalone mode an Exit comes back as its code, and every failure as an exception.
        code = typer.main.get_command(_app).main(args=arguments, prog_name="tpurec", standalone_mode=False)
    except typer.TyperException as error:  # usage errors of the parser, and typer.BadParameter from a command
        error.show()
        _print_json_error(arguments, error.format_message(), "See --help.")
        return EXIT_USAGE
    except Interrupted as error:
        _fail(arguments, error.problem, error.remedy)
        return EXIT_INTERRUPTED
    except TpurecError as error:
        return _fail(arguments, error.problem, error.remedy)
    except BrokenPipeError:  # the reader, such as `head`, has gone: not a failure worth a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except typer.Abort as error:  # typer turns an EOFError, such as a cut-off .gz file gives, into this
        if isinstance(error.__cause__, EOFError):
            return _fail(arguments, f"a file ends too early: {error.__cause__}", "Is it complete?")
        return _interrupted(arguments)
    except KeyboardInterrupt:
        return _interrupted(arguments)
    except Exception as error:
        known = machine_problem(error)
        if known is not None:
            return _fail(arguments, known.problem, known.remedy)
        # A defect of ours: say so in one line, keep the traceback for who asks.
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".") + "."
        return _fail(arguments, reason, "This is unexpected; run `tpurec --traceback ...` for where it happened.")
    if code == EXIT_INTERRUPTED:  # typer turns a KeyboardInterrupt in a command into this code
        return _interrupted(arguments)
    return code if isinstance(code, int) else 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _interrupted(arguments: list[str]) -> int:
    _fail(arguments, "interrupted.", "")
    return EXIT_INTERRUPTED


def _fail(arguments: list[str], problem: str, remedy: str) -> int:
    if "--traceback" in arguments:
        traceback.print_exc()
    print(f"error: {problem} {remedy}".rstrip(), file=sys.stderr, flush=True)
    _print_json_error(arguments, problem, remedy)
    return EXIT_FAILED


def _print_json_error(arguments: list[str], problem: str, remedy: str) -> None:
    if "--json" in arguments and not Reporter.json_printed:  # exactly one object, also if a finished command fails late
        print(json.dumps({"error": {"message": problem, "remedy": remedy}}), flush=True)


if __name__ == "__main__":
    main()
