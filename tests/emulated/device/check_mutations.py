"""Planted faults in the path to the device, each of which a test of this tier has to notice. This is the list.

| fault | noticed by |
|---|---|
| arguments swapped in a binding (eps and weight decay) | one step against the CPU |
| bags handed over example by example instead of feature by feature | one step against the CPU |
| update not applied | one step against the CPU |
| update applied twice | one step against the CPU |
| weights ignored in the lookup | one step against the CPU |
| weights ignored in the update | one step against the CPU |
| ids shifted by one table | one step against the CPU |
| forward alone compiled | the guard (check_training.py); without the guard: one step against the CPU |
| a compilation per batch | the judgement of programs (check_execution.py; here, without a ladder: graphs counted) |
| tables and state not donated | large results in place (check_transfers.py) |
| a table handed to the compiled step through a view | large results in place |
| ids that go through the host | transfers (check_transfers.py) |
| Pallas not told which chip to lower for | the program does not lower (check_compiled_for_chips.py) |

Every fault gets a dim of its own, as programs are cached by shape.
"""

from contextlib import nullcontext

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.embeddings.test_fused import batch
from tests.emulated.device import check_transfers
from tests.emulated.device.dlrm import compiled_step, make_model, packed_batch
from tpurec.embeddings import FusedEmbeddingBagCollection, RowWiseAdagrad, fused, fused_collections, jagged, to_torch
from tpurec.embeddings.lookup import StackedIds
from tpurec.features.packing import Ladder
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.ops import _tpu, _tpu_binding, _tpu_guard


def one_step_equals_the_cpu(dim, shift_ids=False, forward=lambda collection: collection):
    """Look up, compare; step, compare."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[feature])
        for name, rows, feature in (("a", 40, "f1"), ("b", 50, "f2"))
    ]
    optimizer = RowWiseAdagrad(lr=0.1, eps=1e-8, weight_decay=0.01)
    torch.manual_seed(0)
    on_cpu = FusedEmbeddingBagCollection(tables, optimizer, is_weighted=True)
    on_tpu = FusedEmbeddingBagCollection(tables, optimizer, is_weighted=True, device="tpu")
    on_tpu.load_state_dict(on_cpu.state_dict())
    if shift_ids:
        on_tpu._stacks[0].feature_row_starts = on_tpu._stacks[0].feature_row_starts[::-1]
    features = batch(["f1", "f2"], weighted=True)
    expected, actual = on_cpu(features).values(), forward(on_tpu)(features.to("tpu")).values()
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    gradient = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    expected.backward(gradient)
    actual.backward(gradient.to("tpu"))
    for name, weight in on_cpu.state_dict().items():
        torch.testing.assert_close(on_tpu.state_dict()[name].cpu(), weight, rtol=1e-5, atol=1e-5)
    for name, state in on_cpu.optimizer_state_dict().items():
        torch.testing.assert_close(on_tpu.optimizer_state_dict()[name].cpu(), state, rtol=1e-4, atol=1e-6)


look_up, update = _tpu.bag_kernel.embedding_bag, _tpu.update_kernel.update


def update_twice(parts, state, *arguments, **keywords):
    parts, state = update(parts, state, *arguments, **keywords)
    return update(parts, state, *arguments, **keywords)


def update_without_weights(parts, state, grads, ids, offsets, weights, lr, **keywords):
    return update(parts, state, grads, ids, offsets, None, lr, **keywords)


FAULTS = {
    "arguments_swapped": (_tpu, "RowOptimizer", lambda name, eps, decay, *rest: RowOptimizer(name, decay, eps, *rest)),
    "bags_by_example": (_tpu, "_to_bags", lambda grad, num_features, dim: grad.reshape(-1, dim)),
    "update_not_applied": (_tpu.update_kernel, "update", lambda parts, state, *a, **k: (tuple(parts), tuple(state))),
    "update_applied_twice": (_tpu.update_kernel, "update", update_twice),
    "weights_ignored_in_lookup": (
        _tpu.bag_kernel,
        "embedding_bag",
        lambda parts, ids, offsets, weights, **keywords: look_up(parts, ids, offsets, None, **keywords),
    ),
    "weights_ignored_in_update": (_tpu.update_kernel, "update", update_without_weights),
}


def test_without_a_fault_the_comparison_passes():
    one_step_equals_the_cpu(dim=8)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_binding_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        one_step_equals_the_cpu(dim=16 + 8 * list(FAULTS).index(fault))


def test_ids_shifted_by_a_table_are_noticed():
    with pytest.raises(AssertionError):
        one_step_equals_the_cpu(dim=8, shift_ids=True)


def test_a_compilation_per_batch_is_noticed():
    """Without a ladder every number of ids is a shape: more graphs than the ladder has rungs."""
    step = compiled_step(make_model("tpu"))
    torch._dynamo.utils.counters.clear()
    for seed in range(5):
        step(to_torch(packed_batch(seed, longest=2 + seed % 3, ladder=Ladder(tuple(range(1, 40)))), "tpu"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 3


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch about its own graph
def test_the_forward_alone_compiled_is_noticed_even_without_the_guard(monkeypatch):
    monkeypatch.setattr(_tpu_guard, "dropped_updates", lambda graph: [])
    with pytest.raises(AssertionError, match="not close"):
        one_step_equals_the_cpu(
            dim=72, forward=lambda collection: torch.compile(collection, backend="tpu", fullgraph=True, dynamic=False)
        )


@pytest.mark.parametrize("execution", ["strict", "compile"])
def test_tables_that_are_not_donated_are_noticed(execution, monkeypatch):
    from torch_tpu._internal.pallas import pallas

    call = pallas.tpu_torch_pallas.call_custom_kernel
    monkeypatch.setattr(
        pallas.tpu_torch_pallas,
        "call_custom_kernel",
        lambda *arguments, donate_argnums, **keywords: call(*arguments, donate_argnums=[], **keywords),
    )
    with pytest.raises(AssertionError):
        check_transfers.large_results_are_in_place(execution, rows=21_000)


def test_a_table_handed_over_through_a_view_is_noticed():
    """As it was once: the trigger of the backward pass was a weight, so storage and view were inputs of one program."""

    def spoil(model):
        for _, collection in fused_collections(model):
            collection._trigger = collection.embedding_bags["t0"].weight

    with pytest.raises(AssertionError):
        check_transfers.large_results_are_in_place("compile", rows=22_000, spoil=spoil)


def test_ids_that_go_through_the_host_are_noticed(monkeypatch):
    stack_ids = jagged.stack_ids

    def through_the_host(features, stack):
        ids = stack_ids(features, stack)
        return StackedIds(ids.rows.cpu().to("tpu"), ids.offsets, ids.weights)

    monkeypatch.setattr(fused.jagged, "stack_ids", through_the_host)
    with pytest.raises(AssertionError):
        check_transfers.transfers_are_batch_and_loss("strict", rows=23_000)


def test_a_chip_that_pallas_is_not_told_is_noticed(monkeypatch):
    before = _tpu.bound()
    monkeypatch.setattr(_tpu_binding, "compiling_for", lambda chip: nullcontext())
    _tpu.bind(_tpu.Config(chip="v6e"))
    try:
        with pytest.raises(Exception, match="Unsupported TPU device kind: cpu"):
            compiled_step(make_model("tpu", rows=24_000))(to_torch(packed_batch(2), "tpu"))
    finally:
        _tpu.bind(before)
        torch._dynamo.reset()
