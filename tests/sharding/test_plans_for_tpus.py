"""A plan for TPUs is one that they can execute, or there is none and the text says what would do; CPUs take more."""

import dataclasses
import json

import pytest
import torch

from tests.sharding.problems import table
from tpurec.embeddings import Adagrad, RowWiseAdagrad
from tpurec.errors import ConfigError
from tpurec.kernels.limits import MAX_TENSOR_BYTES, problem_of_rows
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.placement import make_stacks, tables_of
from tpurec.sharding.planner import plan
from tpurec.sharding.step_shapes import config_of
from tpurec.sharding.tables import read_tables


@pytest.mark.parametrize(
    ("dim", "dtype", "problem", "remedy"),
    [
        (12, "float32", "embedding_dim 12: kernels take multiples of 8", "Use 8 or 16."),
        (24, "bfloat16", "embedding_dim 24: kernels take multiples of 16", "Use 16 or 32."),
        (64, "float16", "dtype 'float16'", "Use bfloat16"),
        (1284, "float32", "embedding_dim 1284", "Use 1280"),
    ],
)
@pytest.mark.parametrize("slice_", ["v5e-4", "v6e-1", "tpu7x:2x2x1"])
def test_rows_that_no_kernel_takes_are_refused_with_what_would_do(dim, dtype, problem, remedy, slice_):
    odd = table("odd", 1000, dim, dtype=dtype)
    with pytest.raises(ConfigError) as caught:
        plan([odd, table("other", 1000)], slice_, 64)
    assert problem in caught.value.problem and slice_ in caught.value.problem and "'odd'" in caught.value.problem
    assert remedy in caught.value.remedy
    assert plan([odd], "cpu-4", 64).fits


def test_rows_wider_than_a_kernel_takes_are_cut_into_columns():
    wide = table("wide", 1000, 2048)
    (placed,) = plan([wide], "v6e-8", 64).tables
    assert placed.sharding == "column_wise"
    assert all(problem_of_rows(stop - start, "float32") is None for start, stop in (s.columns for s in placed.shards))
    with pytest.raises(ConfigError, match="cut the columns over more ranks"):
        plan([wide], "v6e-1", 64)
    with pytest.raises(ConfigError, match="cut the columns"):
        plan([dataclasses.replace(wide, forbid=("column_wise",))], "v6e-8", 64)


@pytest.mark.parametrize("slice_", ["v5e-4", "v6e-8", "v5p-8"])
def test_whatever_is_planned_is_laid_out_in_rows_that_the_kernels_take(slice_):
    """As execution lays it out, with column shards whose steps need whole rows among them."""
    tables = [
        table(f"{dtype}_{dim}_{way}", 5000, dim, dtype=dtype, pin=way)
        for dim in (32, 48, 64, 1600)
        for dtype in ("float32", "bfloat16")
        for way in (None, "column_wise")
    ]
    found = plan(tables, slice_, 512)
    configs = [config_of(one) for one in tables]
    dtypes = [getattr(torch, one.dtype) for one in tables]
    stacks = make_stacks(
        tables_of(found, [(configs, dtypes, [False] * len(tables))]),
        [RowWiseAdagrad(lr=0.1)],
        found.topology.num_ranks,
    )
    assert any(stack.squares for stack in stacks)
    for stack in stacks:
        assert problem_of_rows(stack.width, str(stack.dtype).removeprefix("torch.")) is None


def test_stacks_above_the_largest_tensor_are_cut_and_the_list_may_say_what_that_is(tmp_path):
    big = table("t", 40_000_000, 128, pin="table_wise")
    (stack,) = plan([big], "v6e-4", 4096).stacks
    assert stack.num_tensors == 2
    (stack,) = plan([big], "v6e-4", 4096, Assumptions(max_tensor_bytes=MAX_TENSOR_BYTES // 4)).stacks
    assert stack.num_tensors == 5
    (stack,) = plan([dataclasses.replace(big, num_embeddings=1000)], "cpu-4", 4096).stacks
    assert stack.num_tensors == 1
    path = tmp_path / "tables.json"
    entry = {"name": "t", "num_embeddings": 1000, "embedding_dim": 64, "features": [{"name": "f"}]}
    path.write_text(json.dumps({"tables": [entry], "assumptions": {"max_tensor_bytes": 100_000}}))
    listed = read_tables(path)
    (stack,) = plan(listed.tables, "v6e-4", 64, listed.assumptions).stacks
    assert stack.num_tensors == 3  # 1,000 rows of 256 bytes on each rank
    with pytest.raises(ConfigError, match="max_tensor_bytes 100: less than"):
        plan(listed.tables, "v6e-4", 64, Assumptions(max_tensor_bytes=100))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_embeddings": 40_000_000}, "its weights take 19.07 GiB"),
        ({"num_embeddings": 20_000_000, "optimizer": "adam", "dtype": "bfloat16"}, None),
        (
            {"num_embeddings": 36_000_000, "optimizer": "adagrad", "dtype": "bfloat16"},
            "its accumulators of adagrad take",
        ),
    ],
)
def test_a_table_on_a_single_tpu_is_one_tensor_and_more_ranks_are_named(changes, words):
    """Without workers a model keeps each table whole."""
    answer = plan([dataclasses.replace(table("big", 1, 128), **changes), table("small", 1000)], "v6e-1", 4096)
    if words is None:
        assert answer.fits
        return
    (problem,) = answer.problems
    assert problem.table == "big" and words in problem.message and "at most 16.00 GiB" in problem.message
    assert problem.bytes_missing == changes["num_embeddings"] * 128 * 4 - MAX_TENSOR_BYTES
    actions = [remedy["action"] for remedy in problem.remedies]
    assert any("use v6e-" in action for action in actions), actions


def test_more_rows_on_a_rank_than_ids_can_name_are_a_problem_of_their_own():
    """The memory suffices: rows of 32 bytes."""
    two = [
        table(f"t{number}", 1_200_000_000, 8, optimizer="sgd", pin="table_wise", pin_ranks=(0,)) for number in range(2)
    ]
    answer = plan(two, "v5p-8", 4096)
    assert not answer.fits
    problem = answer.problems[0]
    assert "2,400,000,000 rows on a rank; 2,147,483,647 is the limit" in problem.message and problem.table == "t0"
    assert any("allow every sharding" in remedy["action"] for remedy in problem.remedies)
    assert plan([dataclasses.replace(one, pin_ranks=(number,)) for number, one in enumerate(two)], "v5p-8", 4096).fits


@pytest.mark.parametrize("slice_", ["cpu-2", "v6e-4"])
def test_memory_of_stacks_is_that_of_the_rows_that_execution_lays_out(slice_):
    """Tables of other widths are stacks of their own: each takes on every rank what it takes on its fullest."""
    tables = [
        table(f"t{number}", 80_000, dim, optimizer="adagrad", pin="table_wise", pin_ranks=(number % 2,))
        for number, dim in enumerate((24, 32, 24, 96, 128))
    ]
    found = plan(tables, slice_, 64)
    configs = [config_of(one) for one in tables]
    collections = [(configs, [torch.float32] * len(tables), [False] * len(tables))]
    laid_out = make_stacks(tables_of(found, collections), [Adagrad(lr=0.1)], found.topology.num_ranks)
    assert sorted((stack.width, stack.rows) for stack in found.stacks) == [
        (24, 160_000), (32, 80_000), (96, 80_000), (128, 80_000)
    ]  # fmt: skip
    needed = sum(stack.num_rows * stack.width * 8 for stack in laid_out)
    assert found.estimates.hbm_parts["tables_and_optimizer"] == needed
