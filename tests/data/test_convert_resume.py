"""An interrupted conversion goes on where it was; what changed is converted anew, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.data import conversion_pool
from pipelines.data.conversion_unit import convert_unit
from pipelines.data.convert import convert_files
from pipelines.reading import find_files
from tests.data.test_convert import SHOP, lines, requests, write_schema
from tpurec.errors import DataError, TpurecError


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.tsv").write_text(lines(10 * number, 10 * number + 10))
    return folder


@pytest.fixture
def converted(monkeypatch) -> list[str]:
    """Names of the files that are really read."""
    names = []

    def record(unit, *rest):
        names.append(unit.file.path.name)
        return convert_unit(unit, *rest)

    monkeypatch.setattr(conversion_pool, "convert_unit", record)
    return names


def _interrupt_after(rows: int):
    seen = 0

    def progress(number: int) -> None:
        nonlocal seen
        seen += number
        if seen > rows:
            raise KeyboardInterrupt

    return progress


def test_after_an_interruption_finished_files_are_not_converted_again(tmp_path, source, converted):
    with pytest.raises(KeyboardInterrupt):
        convert_files([source], tmp_path / "out", SHOP, progress=_interrupt_after(20))
    assert converted == ["0.tsv", "1.tsv", "2.tsv"]
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / ".out.partial").glob(".unfinished*"))  # of the file that was being written
    assert len(list((tmp_path / ".out.partial").glob("*.parquet"))) == 2
    with pytest.raises(DataError, match=r"no \*\.parquet file"):  # training does not see them
        find_files(str(tmp_path), "data.train")
    converted.clear()
    result = convert_files([source], tmp_path / "out", SHOP)
    assert converted == ["2.tsv", "3.tsv"] and result.units_done_before == 2
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(40)]
    assert (result.counts.read, result.counts.kept) == (40, 40)
    assert not (tmp_path / ".out.partial").exists()


def test_a_broken_file_costs_only_itself(tmp_path, source, converted):
    # Large enough that the cut is not met already when columns are checked, before any work.
    good = pa.compress(lines(40, 8_000).encode(), "zstd", asbytes=True)
    (source / "4.tsv.zst").write_bytes(good[:-4])
    with pytest.raises(DataError, match=r"4\.tsv\.zst.*cut short"):
        convert_files([source], tmp_path / "out", SHOP)
    (source / "4.tsv.zst").write_bytes(good)
    converted.clear()
    convert_files([source], tmp_path / "out", SHOP)
    assert converted == ["4.tsv.zst"]
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(8_000)]


def test_run_again_nothing_is_done_and_only_new_or_changed_files_are_converted(tmp_path, source, converted):
    convert_files([source], tmp_path / "out", SHOP)
    converted.clear()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = convert_files([source], tmp_path / "out", SHOP)
    assert converted == [] and again.counts.kept == 40 and again.units_done_before == 4
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == stamps
    (source / "1.tsv").write_text(lines(100, 103))
    os.utime(source / "2.tsv", ns=(1, 1))
    (source / "!first.tsv").write_text(lines(200, 202))  # comes first: all others move on by one
    result = convert_files([source], tmp_path / "out", SHOP)
    assert converted == ["!first.tsv", "1.tsv", "2.tsv"] and result.units_done_before == 2
    want = [*range(200, 202), *range(10), *range(100, 103), *range(20, 40)]
    assert requests(tmp_path / "out") == [f"r{n}" for n in want]
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_file_lost_from_out_is_made_again(tmp_path, source, converted):
    convert_files([source], tmp_path / "out", SHOP)
    converted.clear()
    (tmp_path / "out" / "00001-0000-000.parquet").unlink()
    convert_files([source], tmp_path / "out", SHOP)
    assert converted == ["1.tsv"]
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(40)]


def test_out_of_another_schema_or_other_inputs_is_only_replaced_on_request(tmp_path, source):
    convert_files([source], tmp_path / "out", SHOP)
    other = SHOP.with_id_policy("skip")
    with pytest.raises(DataError, match=r"another schema.*--overwrite"):
        convert_files([source], tmp_path / "out", other)
    with pytest.raises(DataError, match=r"0\.tsv, which is not among the inputs.*--overwrite"):
        convert_files([source / "1.tsv"], tmp_path / "out", SHOP)
    assert len(requests(tmp_path / "out")) == 40
    convert_files([source / "1.tsv"], tmp_path / "out", other, overwrite=True)
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(10, 20)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="not written by this command"):
        convert_files([source], tmp_path / "mine", SHOP, overwrite=True)


def test_a_failed_conversion_leaves_the_out_that_was_there(tmp_path, source):
    convert_files([source], tmp_path / "out", SHOP)
    before = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    (source / "1.tsv").write_text("bad\n" * 50)
    with pytest.raises(DataError, match="50 of"):
        convert_files([source], tmp_path / "out", SHOP)
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text()) == before
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(40)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path, source):
    def grow(rows: int) -> None:
        with (source / "0.tsv").open("a") as file:
            file.write("more")

    with pytest.raises(DataError, match=r"0\.tsv: was changed while it was read"):
        convert_files([source], tmp_path / "out", SHOP, progress=grow)


_COMMAND = [sys.executable, "-m", "tpurec.cli", "data", "convert"]


def _start_large(tmp_path, workers: int) -> subprocess.Popen:
    """A conversion of a small file and a large one, seen to have finished the small one."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.tsv").write_text(lines(0, 10))
    (folder / "1.tsv").write_text(lines(0, 100_000) * 20)
    words = [folder, tmp_path / "out", "--schema", write_schema(tmp_path), "--workers", workers, "--json"]
    process = subprocess.Popen([*_COMMAND, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 100
    while not (tmp_path / ".out.partial" / "_progress.json").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    return process


@pytest.mark.multiprocess
@pytest.mark.parametrize(("signal_number", "workers"), [(signal.SIGKILL, 1), (signal.SIGINT, 1), (signal.SIGINT, 2)])
def test_a_killed_or_interrupted_command_goes_on_with_the_same_result(tmp_path, signal_number, workers):
    process = _start_large(tmp_path, workers)
    process.send_signal(signal_number)
    assert process.wait(60) == (130 if signal_number == signal.SIGINT else -signal_number)
    assert not (tmp_path / "out").exists()
    if signal_number == signal.SIGINT:
        assert not list((tmp_path / ".out.partial").glob(".unfinished*"))
    (tmp_path / "in" / "1.tsv").write_text(lines(10, 20))
    words = [tmp_path / "in", tmp_path / "out", "--schema", tmp_path / "shop.toml", "--json"]
    done = json.loads(subprocess.run([*_COMMAND, *map(str, words)], stdout=subprocess.PIPE, check=True).stdout)
    assert (done["rows_kept"], done["units_done_before"]) == (20, 1)
    assert requests(tmp_path / "out") == [f"r{n}" for n in range(20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "shop.toml"]


@pytest.mark.multiprocess
def test_a_worker_that_is_killed_is_an_error_and_no_hang(tmp_path, source, monkeypatch):
    monkeypatch.setattr(conversion_pool, "_convert_in_worker", _kill_itself)
    with pytest.raises(TpurecError, match="worker process of the conversion was killed"):
        convert_files([source], tmp_path / "out", SHOP, workers=2)
    assert not (tmp_path / "out").exists()


def _kill_itself(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
