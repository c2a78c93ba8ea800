"""The whole compiled step with the Pallas kernels, as torch_tpu hands it to a TPU's compiler, compiled by libtpu.

The CPU behind the emulator cannot run such a program: torch.compile fails there, after the program was captured.
torch_tpu 0.2.0 says what it donates by `jax.buffer_donor` on the arguments; libtpu makes aliases of arguments and
results of that.
"""

from functools import cache

import pytest
import torch

from tests.emulated import runtime
from tests.emulated.chips import compile_for, large_results
from tests.emulated.device import dlrm
from tpurec.embeddings import Adagrad, RowWiseAdagrad, fused_collections, to_torch
from tpurec.features.packing import Ladder
from tpurec.ops import _tpu

ROWS, DIM, HIDDEN, BATCH_SIZE, LONGEST = 200_000, 32, 64, 512, 8
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad(lr=0.1), "adagrad": Adagrad(lr=0.1)}
# What a step keeps for its batch: inputs and outputs of the layers, pooled rows, their pairwise products.
_WIDTHS = [dlrm.NUM_DENSE, HIDDEN, DIM, 3 * DIM, 6 + DIM, HIDDEN, 1]
ACTIVATION_BYTES = 4 * BATCH_SIZE * sum(_WIDTHS)
# docs/kernels.md: staging memory of the kernels, whatever the sizes.
KERNEL_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def _binding():
    before = _tpu.bound()
    yield
    _tpu.bind(before)
    torch._dynamo.reset()


@cache  # torch_tpu does not compile a program again, not even one that failed
def captured_step(chip, optimizer):
    """The step's program for a chip, and the bytes of tables and of state."""
    model = dlrm.make_model("tpu", OPTIMIZERS[optimizer], ROWS, DIM, HIDDEN)
    packed = dlrm.packed_batch(0, ROWS, BATCH_SIZE, LONGEST, Ladder((2048,)))
    batch = to_torch(packed, "tpu")
    torch.accelerator.synchronize()
    _tpu.bind(_tpu.Config(chip=chip))
    with runtime.capture() as programs, pytest.raises(Exception, match="tpu_custom_call for Host"):
        dlrm.compiled_step(model)(batch)
    (program,) = programs
    stacks = [stack for _, one in fused_collections(model) for stack in one._stacks]
    tables, state = (
        [tensor.numel() * tensor.element_size() for stack in stacks for tensor in getattr(stack, name)]
        for name in ("parts", "state")
    )
    return program, tables, state


@pytest.mark.parametrize(
    ("chip", "optimizer"),
    [
        ("v5e", "rowwise_adagrad"),
        ("v5p", "rowwise_adagrad"),
        ("v6e", "rowwise_adagrad"),
        ("v6e", "adagrad"),
        ("7x", "rowwise_adagrad"),
        ("7x", "adagrad"),
    ],
)
def test_tables_and_state_are_updated_in_place(chip, optimizer):
    program, tables, state = captured_step(chip, optimizer)
    report = compile_for(program, chip, large_bytes=min(tables + state) // 2)
    assert report.kernels == 2  # lookup and update; dispatch chose kernels, not plain JAX
    assert report.alias_bytes == sum(tables) + sum(state)
    assert report.temp_bytes <= KERNEL_BYTES + 4 * ACTIVATION_BYTES
    assert report.large == []


def test_without_donation_the_report_shows_the_copies():
    program, tables, state = captured_step("v6e", "rowwise_adagrad")
    assert program.count(b"jax.buffer_donor") >= 1
    report = compile_for(program.replace(b"jax.buffer_donor", b"jax.buffer_other"), "v6e", min(tables + state) // 2)
    assert report.alias_bytes == 0
    assert len(report.large) >= 2


def test_the_report_finds_large_results_by_opcode():
    text = """
    %fusion.1 = f32[100,128]{1,0:T(8,128)} fusion(%a, %b), kind=kLoop
    %copy-start.7 = (f32[16,128]{1,0}, f32[16,128]{1,0}, u32[]{:S(2)}) copy-start(%c)
    ROOT %t = (f32[100,128]{1,0}) tuple(%fusion.1)
    %p = f32[100,128]{1,0} parameter(0)
    """
    assert large_results(text, 51_200) == ["fusion f32[100,128]"]
    assert large_results(text, 51_201) == []
    assert len(large_results(text, 8192)) == 3
