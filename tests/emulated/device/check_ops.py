"""Every op on the device, with the plain-JAX kernels, against its CPU op.

Tolerance 1e-5 of the largest value: float32 on both sides, XLA and FBGEMM add up in another order.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.ops import jagged_cases as cases
from tpurec.kernels.optimizer_state import pack_state, unpack_state
from tpurec.kernels.optimizers import RowOptimizer
from tpurec.kernels.storage import Storage, pack, unpack
from tpurec.ops import embedding_bag, embedding_bag_weights_grad, embedding_update_

STATIC_KINDS = [kind for kind in cases.KINDS if kind != "no_examples"]  # one shape: one compilation for all of them
DIMS = (8, 24, 128, 288, 1280)
LR = 0.1


def on_tpu(array):
    return None if array is None else torch.from_numpy(np.array(array)).to("tpu")


def packed(table):
    storage = Storage(*table.shape)
    return storage, [on_tpu(part) for part in pack(jnp.asarray(table), storage)]


def unpacked(parts, storage):
    return np.asarray(unpack([jnp.asarray(part.cpu().numpy()) for part in parts], storage))


def assert_close(actual, expected, message):
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * scale, err_msg=message)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", DIMS)
def test_lookup(dim, pooling, weighted):
    table = cases.table(dim)
    _, parts = packed(table)
    for kind in STATIC_KINDS:
        case = cases.make(kind)
        weights = case.weights(pooling) if weighted else None
        shape = (pooling, cases.NUM_FEATURES, *table.shape)
        expected = embedding_bag(
            [torch.from_numpy(table)], cases.tensor(case.ids), cases.tensor(case.offsets), cases.tensor(weights), *shape
        )
        actual = embedding_bag(parts, on_tpu(case.ids), on_tpu(case.offsets), on_tpu(weights), *shape)
        assert_close(actual.cpu().numpy(), expected.numpy(), kind)


def test_lookup_without_examples():
    """Case 01."""
    table = cases.table(16)
    _, parts = packed(table)
    ids, offsets = on_tpu(np.zeros(0, np.int32)), on_tpu(np.zeros(1, np.int32))
    assert embedding_bag(parts, ids, offsets, None, "sum", 2, *table.shape).shape == (0, 32)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", [8, 288])
def test_weights_gradient(dim, pooling):
    table = cases.table(dim)
    _, parts = packed(table)
    for kind in STATIC_KINDS:
        case, grad = cases.make(kind), cases.gradient(cases.BATCH_SIZE, dim)
        weights = case.weights(pooling)
        shape = (pooling, cases.NUM_FEATURES, *table.shape)
        ids, offsets = cases.tensor(case.ids), cases.tensor(case.offsets)
        expected = embedding_bag_weights_grad(
            torch.from_numpy(grad), [torch.from_numpy(table)], ids, offsets, torch.from_numpy(weights), *shape
        )
        on_device = on_tpu(weights).requires_grad_()
        embedding_bag(parts, ids.to("tpu"), offsets.to("tpu"), on_device, *shape).backward(on_tpu(grad))
        # A weighted mean divides by sums of weights; the smallest here is about 0.01.
        scale = np.abs(expected.numpy()).max(initial=1.0)
        np.testing.assert_allclose(on_device.grad.cpu().numpy(), expected.numpy(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("dim", "pooling", "weighted", "weight_decay"),
    [
        (8, "sum", False, 0.0),
        (24, "mean", True, 0.01),
        (128, "sum", True, 0.0),
        (288, "mean", False, 0.0),
        (1280, "sum", False, 0.0),
    ],
)
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_update(optimizer, dim, pooling, weighted, weight_decay):
    before, grad = cases.table(dim), cases.gradient(cases.BATCH_SIZE, dim)
    rule = RowOptimizer(optimizer, 1e-8, weight_decay)
    for kind in STATIC_KINDS:
        case = cases.make(kind)
        weights = case.weights("mean") if weighted else None
        state = cases.state(optimizer, dim, 0.01)
        shape = (optimizer, 1e-8, weight_decay, pooling, [0, 1], *before.shape)
        table, sums = cases.tensor(before), cases.tensor(state)
        embedding_update_(
            [table],
            [] if sums is None else [sums],
            cases.tensor(grad),
            cases.tensor(case.ids),
            cases.tensor(case.offsets),
            cases.tensor(weights),
            torch.tensor(LR),
            *shape,
        )
        storage, parts = packed(before)
        accumulators = None if state is None else jnp.asarray(state)
        packed_state = [on_tpu(part) for part in pack_state(rule, accumulators, storage)]
        lr = torch.tensor(LR, device="tpu")
        arguments = [on_tpu(array) for array in (grad, case.ids, case.offsets, weights)]
        embedding_update_(parts, packed_state, *arguments, lr, *shape)
        actual = unpacked(parts, storage)
        np.testing.assert_allclose(actual, table.numpy(), rtol=1e-5, atol=1e-4 * LR, err_msg=kind)
        used = case.ids[: case.offsets[-1]]
        untouched = np.setdiff1d(np.arange(cases.NUM_ROWS), used)
        assert np.array_equal(actual[untouched], before[untouched]), kind
        if sums is not None:
            arrays = tuple(jnp.asarray(part.cpu().numpy()) for part in packed_state)
            assert_close(np.asarray(unpack_state(rule, arrays, storage)), sums.numpy(), kind)


def test_bfloat16_tables():
    table = torch.from_numpy(cases.table(32)).bfloat16()
    storage = Storage(*table.shape, "bfloat16")
    parts = [on_tpu(part) for part in pack(jnp.asarray(table.float().numpy()).astype(jnp.bfloat16), storage)]
    case = cases.make("mixed")
    shape = ("sum", cases.NUM_FEATURES, *table.shape)
    expected = embedding_bag([table], cases.tensor(case.ids), cases.tensor(case.offsets), None, *shape)
    actual = embedding_bag(parts, on_tpu(case.ids), on_tpu(case.offsets), None, *shape)
    assert_close(actual.cpu().numpy(), expected.numpy(), "lookup")
