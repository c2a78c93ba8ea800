"""What stands behind FBGEMM's names on a TPU, with CPU tensors: equal to FBGEMM's kernels for any jagged input.

The functions are made of `tpurec::` ops, which run on the CPU, too; tests/emulated runs them on the device.
"""

import fbgemm_gpu.sparse_ops  # noqa: F401 - registers torch.ops.fbgemm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpurec.ops import fbgemm_dense, fbgemm_products, fbgemm_rows, fbgemm_sparse
from tpurec.ops.aten_names import per_sample_weights_gradient
from tpurec.ops.fbgemm_host import scalar_reads

fbgemm = torch.ops.fbgemm


@st.composite
def jagged(draw):
    """Lengths of bags, offsets of int32 or int64, and a generator of floats of any shape."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), max_size=9)), dtype=torch.int64)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    return lengths, offsets, lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def close(mine, other):
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def behind(lengths, longest):
    """Where FBGEMM leaves memory as it was: values behind the longest bag that it was told of."""
    return torch.tensor([n >= longest for length in lengths.tolist() for n in range(length)], dtype=torch.bool)


@settings(max_examples=60, deadline=None)
@given(jagged(), st.integers(1, 7), st.integers(1, 3))
def test_softmax(case, longest, width):
    lengths, offsets, floats = case
    values, grad = floats(int(lengths.sum()), width), floats(int(lengths.sum()), width)
    result = fbgemm_products.softmax(values, offsets, longest)
    cut = behind(lengths, longest)
    close(result[~cut], fbgemm.jagged_softmax_forward(values, offsets, longest)[~cut])
    assert not result[cut].any()
    back = fbgemm_products.softmax_gradient(grad, result, offsets, longest)
    close(back[~cut], fbgemm.jagged_softmax_backward(grad, result, offsets, longest)[~cut])
    assert not back[cut].any()


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, -torch.inf])
def test_softmax_of_masked_values(masked):
    """A mask may be the least finite number, and may hide a whole bag; the padding of shorter bags takes no share."""
    values = torch.tensor([masked, masked, 1.0, masked, 2.0])[:, None]
    offsets = torch.tensor([0, 2, 2, 5])
    result = fbgemm_products.softmax(values, offsets, 4)
    torch.testing.assert_close(result, fbgemm.jagged_softmax_forward(values, offsets, 4), equal_nan=True)
    back = fbgemm_products.softmax_gradient(torch.ones_like(values), result, offsets, 4)
    torch.testing.assert_close(
        back, fbgemm.jagged_softmax_backward(torch.ones_like(values), result, offsets, 4), equal_nan=True
    )


@settings(max_examples=60, deadline=None)
@given(jagged(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_matrix_products(case, longest, rows, columns):
    lengths, offsets, floats = case
    x, y, dense = (floats(size, *rest) for size, *rest in (
        (int(lengths.sum()), rows), (int(lengths.sum()), columns), (len(lengths), rows, columns)
    ))  # fmt: skip
    cut = behind(lengths, longest)
    of_dense = fbgemm_products.times_dense(x, offsets, dense, longest)
    close(of_dense[~cut], fbgemm.jagged_dense_bmm_forward(x, offsets, dense, longest)[~cut])
    assert not of_dense[cut].any()
    of_jagged = fbgemm_products.times_jagged(x, y, offsets, longest)
    close(of_jagged, fbgemm.jagged_jagged_bmm_forward(x, y, offsets, longest))


@settings(max_examples=60, deadline=None)
@given(jagged(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_vectors_times_jagged(case, longest, heads, width):
    lengths, offsets, floats = case
    v, a = floats(heads * len(lengths), longest), floats(int(lengths.sum()), heads * width)
    result = fbgemm_products.vector_times_jagged(v, a, offsets)
    if not len(lengths):
        assert len(result) == 0  # FBGEMM divides by the number of bags
        return
    close(result, fbgemm.batched_dense_vec_jagged_2d_mul_forward(v, a, offsets))
    back = fbgemm_products.vector_times_jagged_gradient(result, v, a, offsets)
    for mine, other in zip(back, fbgemm.batched_dense_vec_jagged_2d_mul_backward(result, v, a, offsets), strict=True):
        close(mine, other)


@settings(max_examples=40, deadline=None)
@given(jagged(), st.data())
def test_selected_rows_and_their_gradient(case, data):
    lengths, _, floats = case
    if not len(lengths):
        return  # FBGEMM asks for the last of no bags
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5)))
    values, size = floats(int(lengths.sum()), 2).requires_grad_(), int(lengths[chosen].sum())
    ends = lengths.cumsum(0), lengths[chosen].cumsum(0)
    result = fbgemm_rows.jagged_index_select_2d(values, chosen, *ends, size)
    expected = fbgemm.jagged_index_select(values, lengths, chosen)[0]
    close(result.detach(), expected.detach())
    grad = floats(size, 2)
    back = fbgemm_rows.jagged_index_add_2d(grad, chosen, *reversed(ends), len(values), size)
    close(back, torch.autograd.grad(expected, values, grad)[0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_repeated_pooled_keys(dims, data):
    order = data.draw(st.lists(st.integers(0, len(dims) - 1), min_size=1, max_size=7))
    before, after = (
        torch.tensor([0, *np.cumsum(sizes)]) for sizes in (dims, [dims[key] for key in order])
    )  # fmt: skip
    pooled = torch.arange(3.0 * sum(dims)).view(3, -1)
    arguments = (pooled, before, torch.tensor(order), after, torch.zeros(len(order), dtype=torch.int64))
    reads = scalar_reads()
    result = fbgemm_dense.permute_duplicate_pooled(*arguments)
    assert scalar_reads() == reads + 1
    if pooled.numel():
        assert torch.equal(result, fbgemm.permute_duplicate_pooled_embs(*arguments))


@settings(max_examples=40, deadline=None)
@given(jagged())
def test_ranges_of_lengths(case):
    lengths, _, _ = case
    assert torch.equal(fbgemm_sparse.lengths_range(lengths), fbgemm.lengths_range(lengths))
    if lengths.any():
        shape = [int(lengths.sum()), 1]
        assert torch.equal(fbgemm_sparse.lengths_range(lengths, shape), fbgemm.lengths_range(lengths, shape))


@settings(max_examples=60, deadline=None)
@given(jagged(), st.booleans(), st.sampled_from([-1, 2]))
def test_gradient_of_the_weights_of_bags(case, with_bags, padding):
    """Empty bags at the begin, the end and in between; the padding id counts for nothing."""
    lengths, offsets, floats = case
    size, bags = int(lengths.sum()), torch.repeat_interleave(lengths).to(offsets.dtype)
    ids = (floats(size).abs() * 9).to(offsets.dtype) % 7
    table, grad = floats(7, 3), floats(len(lengths), 3)
    of_each = bags if with_bags else bags[:0]
    mine = per_sample_weights_gradient(grad, table, ids, offsets, of_each, 0, padding)
    expected = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, table, ids, offsets[:-1], bags, 0, padding
    )  # fmt: skip
    close(mine, expected)


def test_weights_of_means_are_refused():
    zeros = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="mode 1; weights of ids go with sums"):
        per_sample_weights_gradient(torch.ones(1, 2), torch.ones(3, 2), zeros, zeros, zeros, 1)
