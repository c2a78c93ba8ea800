"""FBGEMM's names on the device against FBGEMM's own kernels on the CPU: values, gradients, and what moves.

Each name runs over one small input whose bags are empty, short and long, with values behind the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.emulated.device.check_jagged import assert_same, moved, no_transfers, tensors
from tpurec.ops.jagged_unique import unique_ids

fbgemm = torch.ops.fbgemm
LENGTHS = torch.tensor([2, 0, 3, 1, 0, 4])
OFFSETS = torch.tensor([0, 2, 2, 5, 6, 6, 10])
USED, CAPACITY = 10, 12


@dataclass(frozen=True)
class Call:
    """One call of a name.

    Args:
        arguments: what it is called with; floats get gradients.
        reads: single numbers that it reads because their size is nowhere else.
        same_as: what has FBGEMM's gradient, where the name itself has none on the CPU.
    """

    arguments: tuple[Any, ...]
    reads: int = 0
    same_as: Callable[..., Any] | None = None


def floats(*shape):
    return torch.sin(torch.arange(1.0, 1.0 + torch.Size(shape).numel())).view(shape).requires_grad_()


IDS = torch.tensor([5, 3, 0, 5, 7, 1, 2, 2, 9, 4, 0, 0])
ROWS = torch.tensor([2, 0, 1], dtype=torch.int32)
LINES, NUMBERS = floats(CAPACITY, 2), floats(CAPACITY)
GRID = LENGTHS.view(3, 2)
POOLED = (floats(4, 7), torch.tensor([0, 1, 4, 7]), torch.tensor([2, 0, 1]))
REORDERED = (*POOLED, torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 0]))
REPEATED = (*POOLED[:2], torch.tensor([2, 0, 2]), torch.tensor([0, 3, 4, 7]), torch.tensor([1, 0, 2]))
CALLS = {
    "asynchronous_batched_complete_cumsum": Call((GRID.contiguous(),)),
    "lengths_range": Call((LENGTHS,), reads=1),
    "repeat_arange": Call((LENGTHS.int(),), reads=1),
    "offsets_range": Call((OFFSETS, USED)),
    "segment_sum_csr": Call(
        (2, torch.tensor([0, 1, 3]), floats(6)), same_as=lambda _, __, x: [torch.stack([x[:2].sum(), x[2:].sum()])]
    ),
    "permute_1D_sparse_data": Call(
        (ROWS, GRID.sum(1), IDS, NUMBERS, CAPACITY),
        same_as=lambda rows, lengths, *rest: fbgemm.permute_2D_sparse_data(rows, lengths[:, None], *rest),
    ),
    "permute_2D_sparse_data": Call((ROWS, GRID, IDS, NUMBERS, CAPACITY)),
    "permute_sparse_data": Call((ROWS, GRID, IDS, NUMBERS, CAPACITY), same_as=fbgemm.permute_2D_sparse_data),
    "permute_2D_sparse_data_input1D": Call(
        (ROWS, LENGTHS, IDS, 2, NUMBERS, CAPACITY),
        same_as=lambda rows, lengths, ids, _, *rest: fbgemm.permute_2D_sparse_data(
            rows, lengths.view(3, 2), ids, *rest
        ),
    ),
    "permute_sparse_features": Call((ROWS, GRID, IDS, NUMBERS), 1, fbgemm.permute_2D_sparse_data),
    "expand_into_jagged_permute": Call((ROWS, OFFSETS[::2].int(), torch.tensor([0, 4, 6, 10]).int(), USED)),
    "invert_permute": Call((ROWS,)),
    "jagged_index_select": Call((LINES, LENGTHS, torch.tensor([5, 0, 5]), USED)),
    "jagged_to_padded_dense": Call((LINES, [OFFSETS], [3], 2.0)),
    "jagged_1d_to_dense": Call((IDS, OFFSETS, 3, 7)),
    "jagged_2d_to_dense": Call((LINES, OFFSETS, 5)),
    "dense_to_jagged": Call((floats(6, 3, 2), [OFFSETS]), reads=1),
    "jagged_dense_elementwise_add": Call(
        (LINES, [OFFSETS], floats(6, 4, 2)),
        same_as=lambda values, offsets, dense: [fbgemm.jagged_to_padded_dense(values, offsets, [4], 0.0) + dense],
    ),
    "jagged_dense_elementwise_add_jagged_output": Call((LINES, [OFFSETS], floats(6, 4, 2))),
    "jagged_dense_dense_elementwise_add_jagged_output": Call((LINES, [OFFSETS], floats(6, 4, 2), floats(6, 4, 2))),
    "jagged_dense_elementwise_mul": Call((LINES, [OFFSETS], floats(6, 4, 2))),
    "jagged_softmax": Call((LINES, OFFSETS, 4)),
    "jagged_dense_bmm": Call((LINES, OFFSETS, floats(6, 2, 3), 4)),
    "jagged_jagged_bmm": Call((LINES, floats(CAPACITY, 3), OFFSETS, 3)),
    "batched_dense_vec_jagged_2d_mul": Call((floats(18, 4), floats(CAPACITY, 6), OFFSETS)),
    "group_index_select_dim0": Call(([LINES, floats(3, 4)], [torch.tensor([0, 7, 7]), torch.tensor([2])])),
    "batch_index_select_dim0": Call((floats(18), torch.tensor([0, 0, 3, 2]), [2, 2], [3, 4], [2, 3], True)),
    "permute_pooled_embs_auto_grad": Call(REORDERED),
    "permute_pooled_embs_auto_grad_split": Call(REORDERED),
    **{
        f"permute_duplicate_pooled_embs{variant}": Call(REPEATED, 1, lambda x, *_: [x[:, [4, 5, 6, 0, 4, 5, 6]]])
        for variant in ("", "_split", "_auto_grad", "_auto_grad_split")
    },
}


def without_capacity(item):
    """What FBGEMM gets: no values behind the last bag."""
    if isinstance(item, list):
        return [without_capacity(part) for part in item]
    if item is CAPACITY:
        return USED
    return item[:USED] if torch.is_tensor(item) and len(item) == CAPACITY else item


def leaves(arguments):
    flat = [part for item in arguments for part in (item if isinstance(item, list) else [item])]
    return [part for part in flat if torch.is_tensor(part) and part.requires_grad]


def loss_of(outputs):
    """Every number counts differently, those behind the last bag not at all."""
    floats = [cut(output) for output in outputs if torch.is_tensor(output) and output.requires_grad]
    weights = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.device) for one in floats]
    return sum((one * weight).sum() for one, weight in zip(floats, weights, strict=True))


def cut(output):
    return output[:USED] if len(output) == CAPACITY else output


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_fbgemms(name):
    call = CALLS[name]
    op = getattr(fbgemm, name)
    arguments, on_tpu = [without_capacity(item) for item in call.arguments], [moved(item) for item in call.arguments]
    with no_transfers(reads=call.reads):
        actual = tensors(op(*on_tpu))
    expected = tensors(op(*arguments))
    for mine, other in zip(actual, expected, strict=True):
        for one, two in zip(tensors(mine), tensors(other), strict=True):
            assert_same(cut(one), two)
    inputs, inputs_on_tpu = leaves(call.arguments), leaves(on_tpu)
    if not inputs:
        return
    loss = loss_of(actual)
    with no_transfers():
        found = torch.autograd.grad(loss, inputs_on_tpu)
    expected = call.same_as(*arguments) if call.same_as else expected
    for mine, other in zip(found, torch.autograd.grad(loss_of(expected), inputs), strict=True):
        assert_same(mine, other)


def test_distinct_ids():
    """FBGEMM has no CPU kernel to compare with; the second and third feature share a table."""
    tables = [torch.tensor([0, 9, 9, 20]), torch.tensor([0, 1, 3])]
    ids = IDS[:USED]
    lengths, distinct, reverse, count = unique_ids(*tables, OFFSETS, ids)
    on_tpu = [moved(item) for item in (*tables, OFFSETS, ids)]
    with no_transfers(reads=1):
        actual = fbgemm.jagged_unique_indices(*on_tpu)
    offsets = fbgemm.asynchronous_complete_cumsum(lengths)
    for mine, other in zip(actual, (lengths, offsets, distinct[: int(count)], reverse), strict=True):
        assert_same(mine, other)
    assert distinct[reverse].equal(ids)
    with no_transfers():
        nothing = fbgemm.jagged_unique_indices(*on_tpu[:2], on_tpu[2] * 0, on_tpu[3][:0])
    assert [len(tensor) for tensor in nothing] == [6, 7, 0, 0]
    with pytest.raises(RuntimeError, match=r"hash_size_cumsum \[1\]"):
        fbgemm.jagged_unique_indices(on_tpu[0][:1], *on_tpu[1:])


def test_weights_of_selected_bags_have_gradients():
    """FBGEMM has no CPU kernel: bags 1, 1 and 0 of three keys, by hand."""
    chosen, weights = torch.tensor([1, 1, 0]), moved(NUMBERS)
    given = [moved(item) for item in (IDS, LENGTHS, OFFSETS, chosen)]
    results = fbgemm.keyed_jagged_index_select_dim1(*given, 2, weights, 15)
    assert results[0].tolist() == IDS[[0, 1, 5, 5, 2, 3, 4, 6, 7, 8, 9, 6, 7, 8, 9]].tolist()
    results[2].sum().backward()
    assert weights.grad.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0]


def test_gradients_of_repeated_rows_add_up():
    """FBGEMM's gradient of `permute_2D_sparse_data` is that of an inverse permutation, which there is not."""
    weights = moved(NUMBERS)
    rows = moved(torch.tensor([2, 0, 2], dtype=torch.int32))
    result = fbgemm.permute_2D_sparse_data(rows, moved(GRID), moved(IDS), weights, 10)
    result[2].sum().backward()
    assert weights.grad.tolist() == [1, 1, 0, 0, 0, 0, 2, 2, 2, 2, 0, 0]


def test_without_bags_and_without_ids():
    """Cases 01 and 03."""
    lines, offsets = floats(0, 2), torch.zeros(1, dtype=torch.int64)
    calls = {
        "jagged_softmax": (lines, offsets, 3),
        "jagged_dense_bmm": (lines, offsets, floats(0, 2, 3), 3),
        "jagged_jagged_bmm": (lines, floats(0, 3), offsets, 3),
        "batched_dense_vec_jagged_2d_mul": (floats(6, 4), floats(0, 6), OFFSETS * 0),
        "jagged_index_select": (lines, LENGTHS * 0, torch.tensor([1, 0]), 0),
    }
    for name, arguments in calls.items():
        expected, actual = (tensors(getattr(fbgemm, name)(*given)) for given in (arguments, map(moved, arguments)))
        for mine, other in zip(actual, expected, strict=True):
            assert mine.shape == other.shape, name
            assert_same(mine, other)


def test_sizes_that_do_not_fit_raise():
    with pytest.raises(RuntimeError, match=r"jagged_dense_bmm: y \[5, 2, 3\] for 6 bags of vectors of 2"):
        fbgemm.jagged_dense_bmm(moved(LINES), moved(OFFSETS), moved(floats(5, 2, 3)), 4)
    with pytest.raises(RuntimeError, match="jagged_jagged_bmm: 12 and 10 vectors"):
        fbgemm.jagged_jagged_bmm(moved(LINES), moved(floats(10, 2)), moved(OFFSETS), 4)
    with pytest.raises(RuntimeError, match="5 vectors and 6 columns for 6 bags"):
        fbgemm.batched_dense_vec_jagged_2d_mul(moved(floats(5, 4)), moved(floats(CAPACITY, 6)), moved(OFFSETS))
    with pytest.raises(ValueError, match="num_indices add up to 3"):
        fbgemm.batch_index_select_dim0(moved(floats(6)), moved(torch.tensor([0])), [3], [3], [2])
