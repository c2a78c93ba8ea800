"""The `tpurec` command: finds its commands through entry points and turns errors into exit codes. No logic.

A distribution adds a command by an entry point in the group `tpurec.commands` whose value is a function with typer
annotations or a `typer.Typer`. So this package never imports the applications.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points

import click
import typer

import tpurec
from tpurec.errors import TpurecError

GROUP = "tpurec.commands"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Commands(click.Group):
    """Loads a command's module only when that command, or the list of all, is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(point.name for point in entry_points(group=GROUP))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found = [point for point in entry_points(group=GROUP) if point.name == name]
        return _as_click(found[0]) if found else None


def _as_click(point: EntryPoint) -> click.Command:
    target = point.load()
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=point.name)(target)
        command = typer.main.get_command(app)
    command.name = point.name
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tpurec.__version__, prog_name="tpurec")
@click.option("--traceback", "show_traceback", is_flag=True, help="Show the Python traceback of a failure.")
def root(show_traceback: bool) -> None:
    """Train and serve recommendation models on TPU slices, or on this CPU.

    Exit codes: 0 done, 1 failed, 2 wrong usage. Every command has --help and --json.
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
    try:
        code = root.main(arguments, prog_name="tpurec", standalone_mode=False)
    except click.ClickException as error:
        _print_error(arguments, error.format_message(), "See --help.", show=error.show)
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        _print_error(arguments, "interrupted.", "")
        sys.exit(EXIT_INTERRUPTED)
    except TpurecError as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        _print_error(arguments, error.problem, error.remedy)
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:  # the reader, such as `head`, has gone: not a failure worth a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:  # a defect of ours: say so in one line, keep the traceback for who asks
        if "--traceback" in arguments:
            traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _print_error(arguments, reason, "This is unexpected; run `tpurec --traceback ...` for where it happened.")
        sys.exit(EXIT_FAILED)
    sys.exit(code or 0)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _print_error(arguments: list[str], problem: str, remedy: str, show: object = None) -> None:
    if "--json" in arguments:
        print(json.dumps({"error": {"message": problem, "remedy": remedy}}), flush=True)
    if callable(show):
        show()
    else:
        print(f"error: {problem} {remedy}".rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
