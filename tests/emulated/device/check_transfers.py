"""What crosses between host and device in a step, and which large arrays it makes, counted where torch_tpu meets PJRT.

The steps are steady ones: two have run before. The tables are larger than everything else, and so is their state.
"""

from contextlib import contextmanager

import pytest
import torch
from torchrec import KeyedJaggedTensor

from pipelines.tpu import EAGER_MODES
from tests.emulated import runtime
from tests.emulated.device import dlrm
from tests.emulated.runtime import Kind
from tpurec.embeddings import SGD, Adagrad, RowWiseAdagrad, fused_collections, set_learning_rate, to_torch

ROWS = 20_000
OPTIMIZERS = {"sgd": SGD(lr=0.1), "rowwise_adagrad": RowWiseAdagrad(lr=0.1), "adagrad": Adagrad(lr=0.1)}
TRANSFERS = (Kind.TO_DEVICE, Kind.TO_HOST, Kind.ON_DEVICE)
LARGE = (Kind.NEW_RESULT, Kind.RESULT_IN_PLACE)


@contextmanager
def mode_of(execution):
    """The mode, for the thread of the backward pass, too: torch_tpu's `set_eager_mode` is for this thread alone."""
    before = torch.tpu.eager_mode
    torch.tpu.eager_mode = torch.tpu.EagerMode[EAGER_MODES[execution]]
    try:
        yield
    finally:
        torch.tpu.eager_mode = before


def storages(model):
    """Tables and state, which are all that is large."""
    return [
        tensor for _, one in fused_collections(model) for stack in one._stacks for tensor in stack.parts + stack.state
    ]


def of(kinds, record):
    return [event for event in record if event[0] in kinds]


def steady_step(execution, optimizer="rowwise_adagrad", rows=ROWS, spoil=lambda model: None):
    """Records of moving a batch, of a step on it, and of reading its loss; the batch; bytes of tables and state."""
    with mode_of(execution):
        model = dlrm.make_model("tpu", OPTIMIZERS[optimizer], rows)
        spoil(model)
        step = (dlrm.compiled_step if execution == "compile" else dlrm.eager_step)(model)
        sizes = [tensor.numel() * tensor.element_size() for tensor in storages(model)]
        records = []
        for seed in (2, 5, 8):  # of one rung
            packed = dlrm.packed_batch(seed, rows)
            runtime.record(min(sizes))
            batch = to_torch(packed, "tpu", static=True)
            torch.accelerator.synchronize()
            moved = runtime.recorded()
            runtime.record(min(sizes))
            loss = step(batch)
            torch.accelerator.synchronize()
            stepped = runtime.recorded()
            runtime.record(min(sizes))
            loss.item()
            records = [moved, stepped, runtime.recorded()]
    return records, packed, sizes


def transfers_are_batch_and_loss(execution, **how):
    (moved, stepped, read), packed, _ = steady_step(execution, **how)
    features = packed.sparse.values()
    lengths, values = sum(one.lengths.nbytes for one in features), sum(one.rows.nbytes for one in features)
    inputs = [values, lengths, packed.dense.nbytes, packed.labels.nbytes, packed.valid.nbytes]
    assert of(TRANSFERS, moved) == [(Kind.TO_DEVICE, size) for size in inputs]
    assert of((Kind.EXECUTION,), stepped)
    assert of(TRANSFERS, stepped) == []
    assert of(TRANSFERS, read) == [(Kind.TO_HOST, 4)]


def large_results_are_in_place(execution, optimizer="rowwise_adagrad", **how):
    (_, stepped, _), _, sizes = steady_step(execution, optimizer, **how)
    assert sorted(of(LARGE, stepped)) == sorted((Kind.RESULT_IN_PLACE, size) for size in sizes)


@pytest.mark.parametrize("execution", EAGER_MODES)
def test_only_the_batch_goes_in_and_only_the_loss_comes_out(execution):
    transfers_are_batch_and_loss(execution)


@pytest.mark.parametrize(
    ("execution", "optimizer"),
    [(execution, "rowwise_adagrad") for execution in EAGER_MODES]
    + [(execution, optimizer) for execution in ("strict", "compile") for optimizer in ("adagrad", "sgd")],
)
def test_no_array_as_large_as_a_table_is_made_but_in_its_place(execution, optimizer):
    """Every program of the step, eager ones too: its large results are table and state, in their own memory."""
    large_results_are_in_place(execution, optimizer)


def test_a_compiled_step_is_one_program():
    (_, stepped, _), _, _ = steady_step("compile")
    assert len(of((Kind.EXECUTION,), stepped)) == 1


def test_the_modes_are_different_modes():
    """torch_tpu's `set_eager_mode` is a context manager: called as a function it does nothing."""
    strict, fused = (len(of((Kind.EXECUTION,), steady_step(mode)[0][1])) for mode in ("strict", "defer_and_fuse"))
    assert fused < strict / 2


def test_a_learning_rate_schedule_compiles_nothing_and_moves_one_number():
    model = dlrm.make_model("tpu")
    step, batch = dlrm.compiled_step(model), to_torch(dlrm.packed_batch(2), "tpu")
    for lr in (0.1, 0.05):
        set_learning_rate(model, lr)
        step(batch).item()
    compiled = runtime.programs["compiled"]
    for lr in (0.03, 0.02, 0.01):
        runtime.record()
        set_learning_rate(model, lr)
        step(batch)
        torch.accelerator.synchronize()
        assert sum(size for _, size in of(TRANSFERS, runtime.recorded())) <= 4
    assert runtime.programs["compiled"] == compiled


def test_a_compact_batch_brings_two_small_lists_a_storage():
    """A user's own KeyedJaggedTensor, eagerly: rows and first row of every feature's table; no ids, no embeddings."""
    model = dlrm.make_model("tpu", rows=ROWS)
    collection = next(one for _, one in fused_collections(model))
    for _ in range(2):
        features = KeyedJaggedTensor(list(dlrm.KEYS), torch.arange(600), lengths=torch.full((24,), 25)).to("tpu")
        runtime.record(10_000)
        collection(features).values().sum().backward()
        torch.accelerator.synchronize()
    assert of(TRANSFERS, runtime.recorded()) == [(Kind.TO_DEVICE, 4 * (len(dlrm.KEYS) + 1))] * 2


def test_a_copy_and_a_read_would_be_noticed():
    model = dlrm.make_model("tpu", rows=ROWS)
    table = storages(model)[0]
    ids = torch.arange(100, dtype=torch.int32).to("tpu")
    torch.accelerator.synchronize()
    runtime.record(table.numel() * table.element_size())
    double = table + table
    torch.accelerator.synchronize()
    ids.cpu()
    found = runtime.recorded()
    assert of(LARGE, found) == [(Kind.NEW_RESULT, table.numel() * table.element_size())]
    assert of(TRANSFERS, found) == [(Kind.TO_HOST, 400)]
    del double


def test_reading_a_table_copies_it_and_writing_one_copies_its_storage():
    """Outside of steps; what it costs to make and load a checkpoint."""
    collection = next(one for _, one in fused_collections(dlrm.make_model("tpu", rows=ROWS)))
    weight, storage = collection.embedding_bags["t0"].weight, collection.stack(0).parts[0]
    table_bytes, storage_bytes = ROWS * 8 * 4, storage.numel() * storage.element_size()
    runtime.record(table_bytes)
    values = weight.detach().cpu()
    assert runtime.recorded() == [(Kind.EXECUTION, 0), (Kind.NEW_RESULT, table_bytes), (Kind.TO_HOST, table_bytes)]
    runtime.record(table_bytes)
    collection.load_state_dict({"embedding_bags.t0.weight": values}, strict=False)
    torch.accelerator.synchronize()
    assert of(TRANSFERS, runtime.recorded()) == [(Kind.TO_DEVICE, table_bytes)]
    assert of(LARGE, runtime.recorded()) == [(Kind.NEW_RESULT, storage_bytes)]
