"""The CPU lookup against the specification in `tpurec/kernels/embedding_bag.py`.

Tolerance 2e-6 of the largest value: both add up a few dozen float32 products, in another order.
"""

from functools import partial

import jax
import numpy as np
import pytest
import torch

from tests.ops import jagged_cases as cases
from tpurec.kernels.embedding_bag import reference
from tpurec.ops import embedding_bag, embedding_bag_weights_grad


def _look_up(case, table, weights, pooling, **changes):
    arguments = dict(
        parts=[table],
        ids=cases.tensor(case.ids),
        offsets=cases.tensor(case.offsets),
        weights=weights,
        pooling=pooling,
        num_features=cases.NUM_FEATURES,
        num_rows=table.shape[0],
        dim=table.shape[1],
    )
    return embedding_bag(**{**arguments, **changes})


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", cases.DIMS)
def test_equals_the_reference(dim, pooling, weighted, monkeypatch):
    """Cases 01, 03, 05, 06, 07, 08, 11, 12 and 14, hot and distinct rows, through both CPU kernels."""
    table = cases.table(dim)
    for kind in cases.KINDS:
        case = cases.make(kind)
        weights = case.weights(pooling) if weighted else None
        expected = reference(table, case.ids, case.offsets, weights, pooling=pooling)
        tolerance = 2e-6 * max(1.0, np.abs(expected).max(initial=0))
        for threads, kernel in ((1, "FBGEMM"), (4, "torch")):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            actual = _look_up(case, cases.tensor(table), cases.tensor(weights), pooling)
            assert actual.dtype == torch.float32
            bags, message = cases.to_bags(actual.numpy()), f"{kind}, {kernel}"
            np.testing.assert_allclose(bags, expected, rtol=2e-6, atol=tolerance, err_msg=message)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tables_are_pooled_in_float32(dtype, weighted):
    """A sum rounded to bfloat16 on the way would be off by a hundredth."""
    case, table = cases.make("mixed"), cases.tensor(cases.table(32)).to(dtype)
    weights = case.weights() if weighted else None
    expected = reference(table.float().numpy(), case.ids, case.offsets, weights)
    actual = _look_up(case, table, cases.tensor(weights), "sum")
    np.testing.assert_allclose(cases.to_bags(actual.numpy()), expected, rtol=2e-6, atol=2e-6)


def test_int32_and_int64_mix():
    """Case 09."""
    case, table = cases.make("mixed"), cases.tensor(cases.table(8))
    expected = _look_up(case, table, None, "sum")
    for ids in (torch.int32, torch.int64):
        for offsets in (torch.int32, torch.int64):
            changes = {"ids": cases.tensor(case.ids).to(ids), "offsets": cases.tensor(case.offsets).to(offsets)}
            assert torch.equal(_look_up(case, table, None, "sum", **changes), expected)


@pytest.mark.parametrize("big", [2**31, 2**32, 2**32 + 5, 2**33 + 3, -(2**32) + 5, -1])
def test_large_int64_ids_never_wrap_to_a_row(big):
    """Case 07."""
    table = cases.tensor(cases.table(8))
    out = embedding_bag([table], torch.tensor([5, big]), torch.tensor([0, 2]), None, "sum", 1, *table.shape)
    assert torch.equal(out[0], table[5])


def test_weighted_sum_and_mean_of_the_known_example():
    """Cases 05, 06 and 08."""
    table = torch.arange(8.0)[:, None].expand(8, 4).contiguous()

    def pooled(ids, weights, pooling):
        offsets = torch.tensor([0, len(ids)])
        return embedding_bag([table], torch.tensor(ids), offsets, torch.tensor(weights), pooling, 1, 8, 4)[0, 0].item()

    assert pooled([1, 2], [10.0, 100.0], "sum") == 210
    assert pooled([1, 2], [10.0, 100.0], "mean") == pytest.approx(210 / 110)
    assert pooled([1, 2], [10.0, -10.0], "mean") == 0
    assert pooled([3, -1, 5], [1.0, 2.0, 3.0], "sum") == 18


def test_offsets_that_start_behind_the_first_id_skip_what_is_before():
    table = cases.tensor(cases.table(8))
    out = embedding_bag([table], torch.tensor([9, 4, 5]), torch.tensor([1, 2, 3]), None, "sum", 1, *table.shape)
    assert torch.equal(out, table[4:6])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", [8, 24, 128, 288])
def test_weights_gradient_equals_that_of_the_reference(dim, pooling):
    """JAX differentiates the reference. Tolerance 1e-4 of the largest gradient: a mean divides by sums near 0."""
    table = cases.table(dim)

    def loss(weights, case, grads):
        return (reference(table, case.ids, case.offsets, weights, pooling=pooling) * grads).sum()

    for kind in cases.KINDS:
        case = cases.make(kind)
        grads = cases.gradient(case.batch_size, dim)
        weights = cases.tensor(case.weights(pooling)).requires_grad_()
        _look_up(case, cases.tensor(table), weights, pooling).backward(cases.tensor(grads))
        expected = np.asarray(jax.grad(partial(loss, case=case, grads=cases.to_bags(grads)))(case.weights(pooling)))
        scale = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(weights.grad.numpy(), expected, rtol=1e-4, atol=1e-5 * scale, err_msg=kind)


def test_a_table_that_wants_a_gradient_is_refused_with_the_remedy():
    table = torch.zeros(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="FusedEmbeddingBagCollection"):
        embedding_bag([table], torch.tensor([1]), torch.tensor([0, 1]), None, "sum", 1, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 1, 2])}, "3 values; 3 features"),
        ({"offsets": torch.tensor([0, 1, 2, 9])}, "go from 0 to 9, but there are 2 ids"),
        ({"weights": torch.ones(3)}, r"weights: torch.float32 \[3\]; floats \[2\]"),
        ({"ids": torch.tensor([0.0, 1.0])}, "ids: torch.float32"),
        ({"pooling": "max"}, "pooling: 'max'"),
        ({"num_rows": 5}, r"\[4, 8\]; on the CPU one floating \[5, 8\]"),
        ({"parts": [torch.zeros(2, 8), torch.zeros(2, 8)]}, "on the CPU one floating"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    arguments = dict(
        parts=[torch.zeros(4, 8)],
        ids=torch.tensor([0, 1]),
        offsets=torch.tensor([0, 1, 2, 2]),
        weights=None,
        pooling="sum",
        num_features=3,
        num_rows=4,
        dim=8,
    )
    embedding_bag(**arguments)
    with pytest.raises((ValueError, IndexError), match=message):
        embedding_bag(**{**arguments, **changes})


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted, pooling):
    case, table = cases.make("skipped_inside"), cases.tensor(cases.table(8))
    weights = cases.tensor(case.weights()).requires_grad_() if weighted else None
    ids, offsets = cases.tensor(case.ids), cases.tensor(case.offsets)
    torch.library.opcheck(embedding_bag, ([table], ids, offsets, weights, pooling, 2, *table.shape))
    if weighted:
        grad = cases.tensor(cases.gradient(case.batch_size, 8))
        arguments = (grad, [table], ids, offsets, weights.detach(), pooling, 2, *table.shape)
        torch.library.opcheck(embedding_bag_weights_grad, arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(backend):
    case, table = cases.make("mixed"), cases.tensor(cases.table(8))
    ids, offsets = cases.tensor(case.ids), cases.tensor(case.offsets)

    def loss(weights):
        return (embedding_bag([table], ids, offsets, weights, "mean", 2, *table.shape) * 2).square().sum()

    eager = cases.tensor(case.weights()).requires_grad_()
    loss(eager).backward()
    compiled = cases.tensor(case.weights()).requires_grad_()
    torch.compile(loss, backend=backend, fullgraph=True)(compiled).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)
