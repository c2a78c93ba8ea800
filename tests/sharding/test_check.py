"""`tpurec check`: what it refuses, its sums and its verdict, and (compile tier) what libtpu says."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from tpurec import cli
from tpurec.embeddings import Adam, RowWiseAdagrad
from tpurec.errors import TpurecError
from tpurec.kernels import ahead_of_time
from tpurec.kernels.compile_process import Compiled, CompileProcess, KernelProgram, first_reason
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage
from tpurec.sharding.check import (
    RankMemory,
    programs_of,
    rank_memory,
    reason_not,
    remedy_of,
    stack_programs,
    working_bytes,
)
from tpurec.sharding.drawn_ids import draw_batch
from tpurec.sharding.exchange_volume import ExchangeVolume
from tpurec.sharding.planner import plan
from tpurec.sharding.sources import recipe_path
from tpurec.sharding.step_shapes import config_of, step_shapes
from tpurec.sharding.tables import FeatureSpec, TableSpec

ROOT = Path(__file__).resolve().parents[2]
LIST = """
batch_size = 512
[[tables]]
name = "user"
num_embeddings = 50_000
embedding_dim = 128
pin = "row_wise"
features = [{name = "user_id", ids_per_example = 2}]
"""


def table(name="user", rows=50_000, dim=128, ids=2.0, weighted=False, **more):
    return TableSpec(name, rows, dim, (FeatureSpec(f"{name}_id", ids, weighted),), **more)


def shapes_of(tables, slice_="v6e-4", batch_size=512, optimizer=None):
    found = plan(tables, slice_, batch_size)
    assert found.fits
    return step_shapes(tables, found, batch_size, optimizer)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command that pyproject.toml declares, also where an older editable install does not know it yet."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][cli.GROUP]
    point = EntryPoint("check", declared["check"], cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def tables_file(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(LIST)
    return path


def test_usage_errors_and_slices_without_tpus(run, tables_file, tmp_path):
    code, _, err = run(tables_file)
    assert code == 2 and "--slice" in err
    code, out, err = run(tables_file, "--slice", "cpu-4", "--json")
    assert code == 1 and "nothing to compile" in json.loads(out)["error"]["message"]
    code, _, err = run(tables_file, "--slice", "v6e-5")
    assert code == 1 and "v6e-5" in err
    tables_file.write_text(LIST.replace("batch_size = 512", ""))
    code, _, err = run(tables_file, "--slice", "v6e-4")
    assert code == 2 and "--batch-size" in err


def test_refuses_a_plan_of_another_slice_or_of_other_tables(run, tables_file, tmp_path):
    path = tmp_path / "plan.json"
    plan([table("item")], "v6e-4", 512).save(path)
    code, _, err = run(tables_file, "--slice", "v6e-8", "--plan", path)
    assert code == 1 and "v6e-4" in err and "v6e-8" in err
    code, _, err = run(tables_file, "--slice", "v6e-4", "--plan", path)
    assert code == 1 and "'user'" in err


def test_tables_that_cannot_be_planned_are_refused_in_one_line(run, tables_file):
    tables_file.write_text(LIST.replace("50_000", "2_000_000_000"))
    code, _, err = run(tables_file, "--slice", "v6e-4")
    assert code == 1 and "cannot be planned for v6e-4" in err and "tpurec plan" in err


def test_missing_libtpu_names_the_extra(run, tables_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    code, _, err = run(tables_file, "--slice", "v6e-4")
    assert code == 1 and "tpurec[tpu]" in err


def test_sizes_are_those_that_the_exchange_agrees_on():
    tables = [table(pin="row_wise"), table("tiny", 200, 128, 1.0, pin="data_parallel"), table("own", pin="table_wise")]
    found = plan(tables, "v6e-4", 512)
    step = step_shapes(tables, found, 512)
    volume = ExchangeVolume([config_of(one) for one in tables], RowWiseAdagrad(lr=0.1), found)
    counted = volume.step(draw_batch(tables, found.assumptions, rank * 128, 128) for rank in range(4))
    others = 3 / 4
    assert sum(one.message_bytes for one in step.stacks) / 2 * others == counted.bytes["ids"]
    assert sum(one.vector_elements for one in step.stacks) * 4 * others == counted.bytes["vectors"]
    assert step.ranks_drawn == 4 and step.batch_size == 128


def test_a_replicated_table_takes_a_step_of_its_own_and_weights_double_the_requests():
    (plain,) = programs_of(shapes_of([table("tiny", 200, 128, pin="data_parallel")]))
    assert set(plain.programs) == {"lookup", "replicated update"}
    assert plain.programs["replicated update"].num_ids == 200
    (weighted,) = programs_of(shapes_of([table(weighted=True, pin="row_wise")]))
    assert weighted.programs["lookup"].weighted and weighted.programs["update"].weighted
    (other,) = programs_of(shapes_of([table(pin="row_wise")]))
    ids, bags = other.shapes.request
    assert other.shapes.request_bytes == 4 * (ids + bags + 1)
    assert weighted.shapes.request_bytes == 4 * (2 * ids + bags + 1)


def test_hyper_parameters_that_compile_in_reach_the_program():
    clipped = RowWiseAdagrad(lr=0.1, max_gradient_norm=1.0)
    (stack,) = programs_of(shapes_of([table(pin="row_wise")], optimizer=clipped))
    assert stack.programs["update"].optimizer.beyond_kernels == "gradient clipping"
    (stack,) = programs_of(shapes_of([table(pin="row_wise", optimizer="adam")]))
    assert stack.state_bytes >= 2 * stack.table_bytes


@pytest.mark.parametrize(
    ("tables", "limit"),
    [
        ([table("odd", dim=12)], "multiples of 8"),
        ([table("half", dtype="float16")], "float16"),
        ([table("thin", dim=8, dtype="bfloat16")], "multiples of 16"),
    ],
)
def test_a_table_that_no_kernel_takes_is_named_with_the_limit(tables, limit):
    """In plans that were made for CPUs; for a TPU there are none."""
    stacks = programs_of(shapes_of(tables, "cpu-4"))
    problem, _ = reason_not(stacks, {}, None)
    assert repr(tables[0].name) in problem and limit in problem
    assert all(not stack.programs for stack in stacks)


def test_a_stack_beyond_one_tensor_is_cut_and_so_is_its_state():
    step = shapes_of([table(pin="row_wise")])
    large = dataclasses.replace(step.stacks[0].stack, num_rows=40_000_000)
    cut = stack_programs(dataclasses.replace(step.stacks[0], stack=large))
    assert cut.programs["update"].storage.num_parts == 2 and cut.table_bytes >= 40_000_000 * 512
    halved = dataclasses.replace(large, dtype=torch.bfloat16, optimizer=Adam(lr=0.1))
    cut = stack_programs(dataclasses.replace(step.stacks[0], stack=halved))
    assert cut.programs["update"].storage.num_parts == 1 and cut.state_bytes >= 2 * 40_000_000 * 512
    assert stack_programs(step.stacks[0], 1 << 20).programs["lookup"].storage.num_parts > 1


def test_column_shards_that_need_whole_rows_take_steps_of_their_own():
    clipped = RowWiseAdagrad(lr=0.1, max_gradient_norm=1.0)
    (stack,) = programs_of(shapes_of([table(dim=64, weighted=True, pin="column_wise")], optimizer=clipped))
    update = stack.programs["update"]
    assert update.op == "column_step" and not update.weighted and not update.optimizer.max_norm
    assert stack.programs["lookup"].op == "embedding_bag" and stack.programs["lookup"].weighted
    (plain,) = programs_of(shapes_of([table(dim=64, pin="column_wise", optimizer="sgd")]))
    assert plain.programs["update"].op == "embedding_update"
    answers = {program: Compiled("plain", "") for program in stack.programs.values()}
    needed = rank_memory([stack], answers, {}, 4, 10**9).counted["column_gradients"]
    assert needed == 2 * 4 * stack.shapes.gradients[0] * stack.shapes.stack.width


def test_unpooled_tables_have_a_place_for_every_id_and_look_up_distinct_rows():
    step = shapes_of([table(pooling="none", pin="table_wise"), table("item", pin="row_wise")])
    sequences, bags = step.stacks
    assert sequences.stack.unpooled and not bags.stack.unpooled
    assert sequences.sizes.sequences == (sequences.sizes.local_ids,) and bags.sizes.sequences == ()
    assert 0 < sequences.sizes.rows <= sequences.sizes.local_ids and not sequences.sizes.bag_ids
    assert sequences.gathered_bytes == 4 * sequences.sizes.local_ids * sequences.stack.width
    assert stack_programs(sequences).programs.keys() == {"lookup", "update"}


def test_memory_adds_up_and_the_verdict_turns_at_the_last_byte():
    stacks = programs_of(shapes_of([table(pin="row_wise")]))
    (stack,) = stacks
    held = stack.table_bytes + stack.state_bytes
    answers = {
        stack.programs["lookup"]: Compiled("sparsecore", "", stack.table_bytes + 100, 1000, 0, 20, 7),
        stack.programs["update"]: Compiled("sparsecore", "", held + 300, held, held, 4000, 5),
    }
    assert working_bytes(stack, stack.programs["update"], answers[stack.programs["update"]]) == 4300
    memory = rank_memory(stacks, answers, {"dense_model": 1e6}, 4, 10**9)
    assert memory.compiled == {
        "tables": stack.table_bytes,
        "optimizer_state": stack.state_bytes,
        "largest_program": 4300,
        "code": 12,
    }
    assert memory.counted["vectors_exchange"] == 16 * stack.shapes.vector_elements
    assert memory.needed_bytes == sum([*memory.compiled.values(), *memory.counted.values(), *memory.estimated.values()])
    full = dataclasses.replace(memory, usable_bytes=memory.needed_bytes)
    assert full.fits and reason_not(stacks, answers, full) == ("", "")
    short = dataclasses.replace(memory, usable_bytes=memory.needed_bytes - 1)
    assert not short.fits and "HBM" in reason_not(stacks, answers, short)[0]


def test_an_update_that_copies_its_table_is_charged_for_the_copy():
    (stack,) = programs_of(shapes_of([table(pin="row_wise")]))
    held = stack.table_bytes + stack.state_bytes
    program = stack.programs["update"]
    assert working_bytes(stack, program, Compiled("plain", "", held, held, 0, 0)) == held


def test_a_compile_error_names_tables_program_and_remedy():
    (stack,) = programs_of(shapes_of([table(pin="row_wise")]))
    answers = {program: Compiled("sparsecore", "") for program in stack.programs.values()}
    answers[stack.programs["update"]] = Compiled("plain", "", error="Ran out of memory on HBM: 47G")
    problem, remedy = reason_not([stack], answers, None)
    assert "'user'" in problem and "update does not compile" in problem and "larger slice" in remedy
    assert "batch" in remedy_of("scoped vmem limit exceeded")


def test_first_reason_takes_the_line_that_names_the_limit():
    text = "noise\nRESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM.\n--------\nFor simplicity, ...\nat foo.cc"
    assert first_reason(text) == "RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM."
    assert first_reason("") == "no message"


def test_nothing_fits_without_memory():
    assert not RankMemory({"tables": 1}, {}, {}, 0).fits


def test_recipes_are_told_from_table_lists(tmp_path, tables_file):
    assert recipe_path(str(tables_file)) is None
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nschema = "criteo"\n')
    assert recipe_path(str(recipe)) == recipe == recipe_path(str(tmp_path))


def test_a_process_that_dies_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with CompileProcess("v6e") as compiler, pytest.raises(TpurecError, match="ended with code 1"):
        compiler.compile(KernelProgram(Storage(1000, 128), 8, 8))


@pytest.mark.compile
@pytest.mark.parametrize("slice_", ["v6e-8", "tpu7x:2x2x1"])
def test_compiles_a_table_list_for_a_slice(run, tables_file, slice_):
    """Lookup and update are legal, the update is in place, and the sums are the compiler's."""
    code, out, err = run(tables_file, "--slice", slice_, "--json")
    found = json.loads(out)
    assert code == 0 and found["legal"] and found["fits"] and not found["ran_on_hardware"], err
    (stack,) = found["stacks"]
    lookup, update = stack["programs"]
    assert (lookup["program"], update["program"]) == ("lookup", "update")
    assert lookup["implementation"] == update["implementation"] == "sparsecore"
    assert update["alias_bytes"] == stack["table_bytes"] + stack["state_bytes"]
    memory = found["hbm_per_rank"]
    assert memory["compiled"]["tables"] == stack["table_bytes"] and memory["compiled"]["code"] > 0
    assert memory["free_bytes"] == memory["usable_bytes"] - memory["needed_bytes"]
    assert found["hbm_needed_bytes_per_chip"] == memory["needed_bytes"] * found["ranks_per_chip"]


@pytest.mark.compile
def test_the_compiler_refuses_what_exceeds_hbm_and_goes_on(run):
    """Three arrays of 15.9 GiB do not fit into a v6e: the compiler's own words, and the next program compiles."""
    with CompileProcess("v6e") as compiler:
        large = KernelProgram(Storage(33_000_000, 128), 64, 64, optimizer=RowOptimizer("adam"))
        assert "Ran out of memory" in compiler.compile(large).error
        assert not compiler.compile(KernelProgram(Storage(1000, 128), 8, 8)).error


@pytest.mark.compile
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
def test_steps_of_spread_rows_are_legal_and_in_place(chip):
    """Without a copy of the table; temporaries are some copies of the gradients."""
    rule = RowOptimizer("rowwise_adagrad")
    program = KernelProgram(Storage(1 << 20, 128), 4096, 4096, optimizer=rule, columns=True)
    with CompileProcess(chip) as compiler:
        found = compiler.compile(program)
    assert not found.error and found.implementation == "plain"
    assert found.alias_bytes == program.storage.num_bytes + rule.state_bytes(program.storage)
    assert found.temp_bytes < 12 * 4096 * 128 * 4


@pytest.mark.compile
def test_two_compile_side_by_side_and_a_locked_libtpu_is_a_clear_error(monkeypatch):
    program = KernelProgram(Storage(1000, 128), 8, 8)
    with CompileProcess("v6e") as one, CompileProcess("v6e") as other:
        assert not one.compile(program).error and not other.compile(program).error
    monkeypatch.setitem(ahead_of_time.LIBTPU_ENVIRONMENT, "ALLOW_MULTIPLE_LIBTPU_LOAD", "0")
    with CompileProcess("v6e") as one, CompileProcess("v6e") as other:
        assert not one.compile(program).error
        with pytest.raises(TpurecError, match="in use by another process"):
            other.compile(program)


@pytest.mark.compile
def test_interrupt_ends_the_compiling_process_too(tables_file):
    code = (
        "from tpurec import cli; from importlib.metadata import EntryPoint; "
        "point = EntryPoint('check', 'tpurec.sharding.check_command:check', cli.GROUP); "
        "cli.entry_points = lambda group: [point]; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "check", str(tables_file), "--slice", "v6e-8"], stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    child = None
    while child is None and process.poll() is None and time.monotonic() < deadline:
        for pid in children.read_text().split():
            if b"compile_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                child = int(pid)
        time.sleep(0.05)
    assert child is not None
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err
    assert not Path(f"/proc/{child}").exists()
