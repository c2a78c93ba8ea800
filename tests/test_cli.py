"""The command line: exit codes, one JSON object, quick help."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed
from typing import Annotated

import pytest
import typer

from tpurec import cli
from tpurec.errors import DataError
from tpurec.reporting import JsonOption, Reporter

COMMANDS = sorted(point.name for point in installed(group=cli.GROUP))


def _works(count: Annotated[int, typer.Option(min=1, help="How many.")] = 1, as_json: JsonOption = False):
    """Count."""
    Reporter(as_json).result({"count": count})


def _fails(as_json: JsonOption = False):
    raise DataError("rows.parquet: column 'x' is missing.", "Add it.")


def _has_a_defect(as_json: JsonOption = False):
    raise ZeroDivisionError("division by zero")


def _meets_a_full_disk(as_json: JsonOption = False):
    raise OSError(28, "No space left on device", "out/part.parquet")


def _asks_numpy_for_too_much(as_json: JsonOption = False):
    import numpy as np

    np.empty(2**62, dtype=np.uint8)


def _asks_torch_for_too_much(as_json: JsonOption = False):
    import torch

    torch.empty(2**62, dtype=torch.uint8)


def _is_misused(as_json: JsonOption = False):
    raise typer.BadParameter("give --a or --b, not both")


def _is_interrupted(as_json: JsonOption = False):
    raise KeyboardInterrupt


def _reads_a_cut_off_file(as_json: JsonOption = False):
    raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def _fails_after_its_result(as_json: JsonOption = False):
    Reporter(as_json).result({"rows": 3})
    raise DataError("cannot remove the temporary folder.")


_group = typer.Typer(help="A group.")
_group.command("works")(_works)
_group.command("fails")(_fails)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process on commands of this file; returns exit code, stdout, stderr."""
    names = {
        "works": "_works", "fails": "_fails", "defect": "_has_a_defect", "misused": "_is_misused",
        "interrupted": "_is_interrupted", "cut-off": "_reads_a_cut_off_file", "late": "_fails_after_its_result",
        "full": "_meets_a_full_disk", "large": "_asks_numpy_for_too_much", "larger": "_asks_torch_for_too_much",
        "group": "_group",
    }  # fmt: skip
    points = [EntryPoint(name, f"tests.test_cli:{target}", cli.GROUP) for name, target in names.items()]
    points.append(EntryPoint("broken", "tests.no_such_module:command", cli.GROUP))
    monkeypatch.setattr(cli, "entry_points", lambda group: points)
    previous = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    yield call
    signal.signal(signal.SIGTERM, previous)


def test_a_command_that_is_done_exits_with_0_and_prints_one_object(run):
    code, out, err = run("works", "--count", "3", "--json")
    assert (code, json.loads(out), err) == (0, {"count": 3}, "")


def test_a_command_inside_a_group_runs_and_fails_like_any_other(run):
    assert run("group", "works", "--json")[:2] == (0, '{"count": 1}\n')
    assert run("group", "fails")[0] == 1
    assert run("group", "nothing")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("fails",), 1, "column 'x' is missing. Add it."),
        (("defect",), 1, "ZeroDivisionError: division by zero"),
        (("full",), 1, "out/part.parquet: No space left on device. Check path, permissions and free space."),
        (("large",), 1, "out of memory: Unable to allocate 4.00 EiB"),
        (("larger",), 1, "4611686018427387904 bytes. Error code 12 (Cannot allocate memory). Use smaller tables"),
        (("cut-off",), 1, "ended before the end-of-stream"),
        (("broken",), 1, "no_such_module"),
        (("misused",), 2, "give --a or --b, not both"),
        (("works", "--count", "0"), 2, "--count"),
        (("works", "--count", "many"), 2, "--count"),
        (("works", "--no-such-option"), 2, "--no-such-option"),
        (("works", "surplus"), 2, "surplus"),
        (("no-such-command",), 2, "no-such-command"),
        (("interrupted",), 130, "interrupted"),
    ],
)
def test_a_failure_exits_with_its_code_and_one_object(run, arguments, code, says):
    assert run(*arguments)[0] == code
    assert says in run(*arguments)[2]
    seen, out, err = run(*arguments, "--json")
    assert seen == code
    error = json.loads(out)["error"]  # loads: exactly one object
    assert says in f"{error['message']} {error['remedy']}"
    assert says in err


def test_a_command_that_fails_after_its_result_still_prints_one_object(run):
    code, out, err = run("late", "--json")
    assert (code, json.loads(out)) == (1, {"rows": 3})
    assert "cannot remove the temporary folder" in err


def test_the_traceback_is_shown_only_on_request(run):
    assert "Traceback" not in run("defect")[2]
    assert "Traceback" in run("--traceback", "defect")[2]


def test_the_list_of_commands_survives_one_that_cannot_be_loaded(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "Count." in out and "cannot be loaded" in out


def test_the_list_of_commands_says_whole_sentences(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "train " in commands and "..." not in commands


def test_long_work_shows_lines_of_progress_where_there_is_no_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("tpurec.reporting.time.monotonic", lambda: now[0])
    with Reporter().progress("train", 100_000) as advance:
        advance(40_000)  # done before an interruption: not part of the rate
        now[0] = 29.0
        advance(5_800, "log loss 0.4")
        now[0] = 30.0
        advance(200, "log loss 0.3")
        advance(1)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "train: 46,000 of 100,000 rows, 200 rows/s, log loss 0.3\n")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_interruption_while_the_program_is_still_being_loaded_is_one_line(words):
    """A Ctrl-C in the first quarter of a second comes out of an import."""
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "import tpurec.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted.\n")
    assert json.loads(done.stdout)["error"]["message"] == "interrupted." if words else done.stdout == ""


def test_progress_slower_than_one_a_second_claims_no_rate(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("tpurec.reporting.time.monotonic", lambda: now[0])
    with Reporter().progress("plan", 6, unit="slices") as advance:
        advance(0, "building start 1 of 6")
        now[0] = 40.0
        advance(1, "proving a lower bound")
    assert capsys.readouterr().err == "plan: 1 of 6 slices, proving a lower bound\n"


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("tpurec ")


def test_no_words_at_all_is_wrong_usage_with_the_help_text(run):
    code, out, err = run()
    assert code == 2 and "Usage: tpurec" in out + err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_as_ctrl_c_does(number):
    """Also where SIGINT was ignored at the start, as in a background job of a script."""
    script = (
        "import signal, tests.test_cli as t, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from tpurec import cli\n"
        "from importlib.metadata import EntryPoint\n"
        "cli.entry_points = lambda group: [EntryPoint('slow', 'tests.test_cli:_slow', group)]\n"
        "cli.main(['slow', '--json'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr.readline() == "started\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 130
    assert json.loads(out) == {"error": {"message": "interrupted.", "remedy": ""}}
    assert "cleaned up" in err


def _slow(as_json: JsonOption = False):
    try:
        print("started", file=sys.stderr, flush=True)  # inside: the signal may come at once
        time.sleep(60)
    finally:
        print("cleaned up", file=sys.stderr, flush=True)


def test_all_commands_of_the_design_are_there():
    assert set(COMMANDS) >= {"data", "train", "evaluate", "export", "score", "serve", "plan", "plan-diff", "doctor"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_is_there_and_loads_nothing_heavy(command):
    code = (
        "import sys\n"
        "from tpurec import cli\n"
        f"try: cli.main([{command!r}, '--help'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'torchrec', 'jax', 'ray', 'plotly', 'fastapi'} & set(sys.modules)\n"
        "print('heavy:', *sorted(heavy))\n"
    )
    started = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert "Usage: tpurec " + command in child.stdout
    assert child.stdout.splitlines()[-1] == "heavy:"
    assert time.monotonic() - started < 20  # seconds: a guard against loading something heavy, not a measurement


def test_typing_the_commands_name_in_a_shell_runs_it():
    child = subprocess.run(
        [sys.executable, "-m", "tpurec.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0 and child.stdout.startswith("tpurec ")
