"""The jagged `tpurec::` ops on the CPU: opcheck, gradients, FBGEMM's results with unused capacity, and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tools.jagged import KINDS, make
from tpurec.ops import embedding_bag, embedding_bag_weights_grad, embedding_update_, sequence_gather
from tpurec.ops._tpu_jagged import IMPLEMENTATIONS
from tpurec.ops.column_step import column_step_
from tpurec.ops.jagged_bounds import IdOutOfRange, check_ids, fix_bounds, raise_out_of_range
from tpurec.ops.jagged_bucketize import block_bucketize
from tpurec.ops.jagged_dense import dense_to_jagged, jagged_dense_add, jagged_dense_multiply, jagged_to_padded_dense
from tpurec.ops.jagged_offsets import complete_cumsum, offsets_range
from tpurec.ops.jagged_permute import expand_permute, invert_permute, permute_jagged, permute_jagged_grad, select_bags
from tpurec.ops.jagged_segments import segment_grad, segment_mean, segment_sum
from tpurec.ops.jagged_unique import unique_ids
from tpurec.ops.pooled_permute import permute_multi, permute_pooled, permute_pooled_grad, regroup
from tpurec.ops.row_blocks import select_rows, select_rows_grad

fbgemm = torch.ops.fbgemm
OFFSETS = torch.tensor([0, 2, 2, 5, 9])
LENGTHS = torch.tensor([2, 0, 3, 4])
MOVES = torch.tensor([[1, 0, 0, 0, 3, 0], [0, 0, 0, 3, 1, 3], [0, 1, 1, 0, 2, 0], [0, 1, 0, 2, 1, -4]])


def floats(*shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(shape).standard_normal(shape)).to(dtype).requires_grad_()


def ids(size=12, dtype=torch.int64):
    return torch.from_numpy(np.random.default_rng(size).integers(0, 40, size)).to(dtype)


ARGUMENTS = {
    complete_cumsum: [(LENGTHS,), (LENGTHS.view(2, 2).int(),), (torch.zeros(0, dtype=torch.int64),)],
    offsets_range: [(OFFSETS, 9), (torch.tensor([0]), 0)],
    permute_jagged: [
        (torch.tensor([1, 0]), LENGTHS.view(2, 2), floats(12, 3), floats(12), 12),
        (torch.tensor([3, 0, 3], dtype=torch.int32), LENGTHS, ids(), None, 10),
        (torch.zeros(0, dtype=torch.int64), LENGTHS, ids(), None, 0),
    ],
    permute_jagged_grad: [(floats(12, 2).detach(), torch.tensor([3, 0, 3]), LENGTHS, 12)],
    expand_permute: [(torch.tensor([1, 0]), torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]), 4)],
    invert_permute: [(torch.tensor([2, 0, 1]),), (torch.zeros(0, dtype=torch.int32),)],
    block_bucketize: [
        (LENGTHS, ids(), torch.tensor([10, 5]), 4, floats(12), None, [], None, None, False),
        (LENGTHS, ids(), torch.tensor([10, 5]), 2, None, torch.tensor([1, 3]), [], None, None, True),
        (LENGTHS, ids(), torch.tensor([10, 5]), 2, None, None, [torch.tensor([0, 9, 20])] * 2, None, None, False),
    ],
    jagged_to_padded_dense: [
        (floats(12, 3), OFFSETS, 3, -1.0),
        (ids(), OFFSETS.int(), 0, 0.0),
        (ids(0), OFFSETS[:1], 2),
    ],
    dense_to_jagged: [(floats(4, 3, 2), OFFSETS, 12), (floats(4, 3), OFFSETS.int(), 9)],
    jagged_dense_add: [(floats(12, 2), OFFSETS, floats(4, 3, 2)), (floats(12), OFFSETS, floats(4, 3))],
    jagged_dense_multiply: [(floats(12, 2), OFFSETS, floats(4, 3, 2)), (floats(12), OFFSETS, floats(4, 3))],
    segment_sum: [(floats(12, 2), OFFSETS), (ids(), OFFSETS.int()), (floats(12, dtype=torch.float32), OFFSETS)],
    segment_mean: [(floats(12), OFFSETS)],
    segment_grad: [(floats(4, 2).detach(), OFFSETS, 12, True)],
    permute_pooled: [
        (floats(5, 9), OFFSETS, torch.tensor([3, 1, 0, 2]), 9),
        (floats(2, 9), OFFSETS, torch.tensor([0]), 4),
    ],
    permute_pooled_grad: [(floats(5, 4).detach(), OFFSETS, torch.tensor([0, 0]), 9)],
    permute_multi: [([floats(5, 3), floats(5, 3)], MOVES, [4, 3], False)],
    check_ids: [(ids(), OFFSETS, torch.tensor([20, 30]), policy) for policy in ("error", "skip", "hash")],
    fix_bounds: [
        (torch.tensor([20, 30]), ids(9), OFFSETS, None),
        (torch.tensor([20, 30]), ids(9), OFFSETS, torch.tensor([0, 1, 4])),
    ],
    unique_ids: [
        (torch.tensor([0, 40, 40, 80]), torch.tensor([0, 1, 3]), torch.tensor([0, 2, 2, 7, 7, 9, 15]), ids(20) % 5),
        (torch.tensor([0, 40, 80]).int(), torch.tensor([0, 1, 2]), OFFSETS.int(), ids(dtype=torch.int32)),
        (torch.tensor([0, 40, 80]), torch.tensor([0, 1, 2]), OFFSETS * 0, ids(0)),
    ],
    select_rows: [
        (floats(18), torch.tensor([0, 2, 2, 3]), [2, 2], [3, 4], [2, 3], True),
        (floats(18), torch.tensor([2, 0, 3], dtype=torch.int32), [0, 3], [3, 4], [2, 3]),
        (floats(0), torch.zeros(0, dtype=torch.int64), [], [], [], False),
    ],
    select_rows_grad: [(floats(10).detach(), torch.tensor([0, 2, 3, 3]), [2, 2], [3, 4], [2, 3], True)],
}
ALL = [
    pytest.param(op, arguments, id=f"{op._name}-{n}")
    for op, sets in ARGUMENTS.items()
    for n, arguments in enumerate(sets)
]


@pytest.mark.parametrize(("op", "arguments"), ALL)
def test_opcheck(op, arguments):
    if op in (permute_jagged, block_bucketize):
        # The check of compiled gradients adds outputs of integers and floats up; their values are checked below.
        torch.library.opcheck(
            op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
        arguments = [item.detach() if isinstance(item, torch.Tensor) else item for item in arguments]
    torch.library.opcheck(op, arguments)


# Checked beside their own tests: test_embedding_bag.py, test_embedding_update.py, test_sequence_gather.py, ...
CHECKED_ELSEWHERE = {
    op._name
    for op in (embedding_bag, embedding_bag_weights_grad, embedding_update_, sequence_gather, column_step_)
}  # fmt: skip


def test_every_op_is_checked():
    """Of all that are registered, also those without an implementation for the device."""
    assert {op for op, _ in IMPLEMENTATIONS} <= set(ARGUMENTS)
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tpurec::")}
    checked = {op._name for op in ARGUMENTS}
    assert checked <= names and names - checked == CHECKED_ELSEWHERE


DIFFERENTIABLE = [
    permute_jagged, block_bucketize, jagged_to_padded_dense, dense_to_jagged, jagged_dense_add, jagged_dense_multiply,
    segment_sum, segment_mean, permute_pooled, permute_multi, select_rows,
]  # fmt: skip


def _swapped(item, given):
    return [_swapped(part, given) for part in item] if isinstance(item, list) else given.get(id(item), item)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op._name)
def test_gradients_are_those_of_finite_differences(op):
    """Case 04: what is cut receives 0; what is repeated receives the sum."""
    for arguments in ARGUMENTS[op]:
        flat = [tensor for item in arguments for tensor in (item if isinstance(item, list) else [item])]
        wanted = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad and t.dtype == torch.float64]
        if not wanted:
            continue

        def function(*tensors, wanted=wanted, arguments=arguments):
            given = dict(zip(map(id, wanted), tensors, strict=True))
            outputs = op(*(_swapped(item, given) for item in arguments))
            outputs = outputs if isinstance(outputs, list) else [outputs]
            return tuple(output for output in outputs if output.is_floating_point())

        assert torch.autograd.gradcheck(function, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_permute_equals_fbgemm_and_ignores_capacity(kind, dtype):
    """Cases 01, 03, 09, 11 and 14."""
    case = make(kind, 3, 7, 101, lengths_dtype=np.int32)
    lengths, values = torch.from_numpy(case.lengths), torch.from_numpy(case.values).to(dtype)
    weights, permute = torch.from_numpy(case.weights), torch.tensor([2, 0, 1])
    found = permute_jagged(permute, lengths, values, weights, 101)
    used = case.used
    theirs = fbgemm.permute_2D_sparse_data(permute.int(), lengths, values[:used], weights[:used], used)
    for mine, other in zip(found, theirs, strict=True):
        assert torch.equal(mine[: len(other)], other)
    assert torch.all(found[1][used:] == -1) and torch.all(found[2][used:] == 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
)
def test_round_trips(lengths, num_buckets, spare, seed):
    """What is distributed, padded or permuted comes back, with any lengths and capacity."""
    rng = np.random.default_rng(seed)
    lengths = torch.tensor(lengths)
    used = int(lengths.sum())
    values = torch.from_numpy(rng.integers(0, 50, used + spare))
    _, new_ids, _, went, _ = block_bucketize(
        lengths, values, torch.tensor([7, 9]), num_buckets, None, None, [], None, None, True
    )
    assert torch.equal(new_ids[went][:used], values[:used])
    offsets = complete_cumsum(lengths)
    dense = jagged_to_padded_dense(values, offsets, 4)
    assert torch.equal(dense_to_jagged(dense, offsets, used + spare)[:used], values[:used])
    permute = torch.from_numpy(rng.permutation(6))
    moved = permute_jagged(permute, lengths, values, None, used + spare)
    back = permute_jagged(invert_permute(permute), moved[0], moved[1], None, used)
    assert torch.equal(back[0], lengths)
    assert torch.equal(back[1], values[:used])
    assert torch.equal(
        offsets_range(offsets, used), values.new_tensor([n for length in lengths for n in range(length)])
    )


def test_selected_bags():
    values, lengths = torch.arange(9.0), torch.tensor([2, 0, 3, 4])
    found = select_bags(values, lengths, torch.tensor([1, 0, 1]), values * 10, 2, 13)
    assert found[1].tolist() == [0, 2, 0, 4, 3, 4]
    assert found[0].tolist()[:6] == [0, 1, 5, 6, 7, 8] and found[0].tolist()[6:9] == [2, 3, 4]
    assert torch.equal(found[2], found[0] * 10)


def test_regroup_equals_fbgemm():
    pooled, keys, dims = (
        [floats(5, 4, dtype=torch.float32), floats(5, 6, dtype=torch.float32)],
        [["a", "b"], ["c"]],
        [[1, 3], [6]],
    )
    theirs = fbgemm.regroup_keyed_tensor(pooled, keys, dims, [["c", "a"], ["b", "a"]])
    for mine, other in zip(regroup(pooled, dims, [[2, 0], [1, 0]]), theirs, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="its dims add up to 5"):
        regroup(pooled, [[2, 3], [6]], [[0]])


def test_the_policy_error_names_feature_count_and_limit():
    """Case 07."""
    rows, counts = check_ids(torch.tensor([3, 10, -1, 2**33]), torch.tensor([0, 2, 4]), torch.tensor([10, 5]), "error")
    assert rows.tolist() == [3, -1, -1, -1]
    with pytest.raises(IdOutOfRange, match=r"'a': 1 ids outside of \[0, 10\); 'b': 2 ids outside of \[0, 5\)"):
        raise_out_of_range(counts, ["a", "b"], [10, 5])
    raise_out_of_range(counts * 0, ["a", "b"], [10, 5])


WRONG = [
    (complete_cumsum, (torch.zeros(1, 1, 1, dtype=torch.int64),), ValueError, "one or two dimensions"),
    (complete_cumsum, (torch.zeros(3),), ValueError, "torch.float32"),
    (permute_jagged, (torch.tensor([2]), LENGTHS[:2], ids(), None, 9), IndexError, "there are 2 rows"),
    (permute_jagged, (torch.tensor([0]), LENGTHS, ids(8), None, 9), IndexError, "add up to 9 .*there are 8 values"),
    (permute_jagged, (torch.tensor([3, 3]), LENGTHS, ids(), None, 7), ValueError, "capacity: 7; .* 8"),
    (permute_jagged, (torch.tensor([0]), LENGTHS, ids(), ids(3), 9), ValueError, r"weights: \[3\]; there are 12"),
    (permute_jagged, (torch.tensor([0]), -LENGTHS, ids(), None, 9), IndexError, "none may be negative"),
    (invert_permute, (torch.tensor([0, 0]),), IndexError, "not each of 0 to 1 once"),
    (jagged_to_padded_dense, (ids(8), OFFSETS, 2), IndexError, "from 0 to 9 .* 8 values"),
    (jagged_to_padded_dense, (ids(), OFFSETS[[0, 2, 1, 4]] + torch.tensor([0, 5, 0, 0]), 2), IndexError, "ascend"),
    (jagged_to_padded_dense, (ids(), OFFSETS[:0], 2), ValueError, "offsets: 0 values"),
    (dense_to_jagged, (floats(3, 2, 1), OFFSETS, 9), ValueError, r"dense: \[3, 2, 1\]; \[4, M"),
    (dense_to_jagged, (floats(4, 2, 1), OFFSETS, 8), IndexError, "8 values"),
    (jagged_dense_add, (floats(9, 2), OFFSETS, floats(4, 2, 3)), ValueError, r"\[9, 2\]; torch.float64 \[N, \[3\]"),
    (segment_mean, (ids(), OFFSETS), ValueError, "a mean needs floats"),
    (permute_pooled, (floats(2, 8), OFFSETS, torch.tensor([0]), 8), IndexError, "8 values"),
    (permute_pooled, (floats(2, 9), OFFSETS, torch.tensor([4]), 9), IndexError, "there are 4 keys"),
    (permute_pooled, (floats(2, 9), OFFSETS, torch.tensor([3, 3]), 7), ValueError, "num_columns: 7; .* 8"),
    (check_ids, (ids(), OFFSETS, torch.tensor([9, 9]), "clip"), ValueError, "policy: 'clip'"),
    (check_ids, (ids(), OFFSETS, torch.tensor([9, 9, 9]), "skip"), ValueError, "3 features"),
    (unique_ids, (torch.tensor([0]), OFFSETS, OFFSETS, ids()), ValueError, "hash_starts: 1 values"),
    (
        unique_ids,
        (OFFSETS[:4], torch.tensor([0, 3]), OFFSETS, ids()),
        ValueError,
        r"5 values; 3 features \* batch_size",
    ),
    (unique_ids, (-OFFSETS, torch.tensor([0, 4]), OFFSETS, ids()), IndexError, "do not ascend"),
    (unique_ids, (OFFSETS, torch.tensor([0, 5]), OFFSETS, ids()), IndexError, "from 0 to 5 .* 4 values"),
    (
        select_rows,
        (floats(6), torch.tensor([3]), [1], [3], [2]),
        IndexError,
        "of matrix 0 go from 3 to 3; it has 3 rows",
    ),
    (select_rows, (floats(6), torch.tensor([1]), [2], [3], [2]), ValueError, "indices: 1; num_indices add up to 2"),
    (select_rows, (floats(6), torch.tensor([1]), [1], [3], [3]), ValueError, r"inputs: \[6\]; .* \[9\]"),
    (select_rows, (floats(6), torch.tensor([1]), [1], [3], []), ValueError, "1, 1 and 0 numbers"),
    (select_rows, (floats(6), torch.tensor([1]), [1, 0], [3, 0], [2, 1], True), ValueError, "same number of rows"),
    (
        block_bucketize,
        (LENGTHS, ids(8), torch.tensor([9, 9]), 2, None, None, [], None, None, False),
        IndexError,
        "add up to 9 .* there are 8 ids",
    ),
    (
        block_bucketize,
        (LENGTHS, ids(), torch.tensor([9, 9, 9]), 2, None, None, [], None, None, False),
        ValueError,
        "no multiple of the 3 features",
    ),
    (
        block_bucketize,
        (LENGTHS, ids(), torch.tensor([9, 9]), 2, None, torch.tensor([1, 2]), [], None, None, False),
        ValueError,
        "batch_sizes: add up to 3",
    ),
    (
        block_bucketize,
        (LENGTHS, ids(), torch.tensor([9, 9]), 2, None, None, [torch.tensor([5, 9, 20])] * 2, None, None, False),
        ValueError,
        "ascending from 0",
    ),
]


@pytest.mark.parametrize(("op", "arguments", "error", "message"), WRONG)
def test_what_fbgemm_reads_out_of_bounds_is_an_error(op, arguments, error, message):
    """Cases 10 and 14: sizes that lie are refused, with the sizes."""
    with pytest.raises(error, match=message):
        op(*arguments)
