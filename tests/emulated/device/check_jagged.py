"""The jagged ops on the device against their CPU ops, FBGEMM's names over all kinds of data, and what they move.

Values move to the device before and to the host after; between, nothing data-sized may: the shim counts.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all

from tests.emulated.runtime import Kind, record, recorded
from tests.kernels.tools.jagged import KINDS, make
from tests.ops.test_jagged_ops import ARGUMENTS
from tpurec.ops.fbgemm_host import scalar_reads
from tpurec.ops.jagged_permute import select_bags

fbgemm = torch.ops.fbgemm
BATCH_SIZE, CAPACITY = 37, 1000
SMALL = 512  # bytes: one number a key, or a list of moves; the smallest data here have 148 (lengths) to 8,000


def moved(item):
    """Arguments on the device; offsets and orders included."""
    if isinstance(item, torch.Tensor):
        return item.detach().to("tpu").requires_grad_(item.requires_grad)
    return [moved(part) for part in item] if isinstance(item, list) and item and torch.is_tensor(item[0]) else item


def tensors(outputs):
    return [output for output in (outputs if isinstance(outputs, (list, tuple)) else [outputs]) if output is not None]


def assert_same(mine, other):
    assert mine.dtype == other.dtype
    if other.is_floating_point():
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(mine.cpu(), other)


@contextmanager
def no_transfers(reads=0, largest=0):
    """Nothing moves between host and device but `reads` numbers to the host, and pieces of `largest` bytes at most."""
    torch.accelerator.synchronize()
    before = scalar_reads()
    record()
    yield
    torch.accelerator.synchronize()
    to_host = [size for kind, size in recorded() if kind == Kind.TO_HOST]
    to_device = [size for kind, size in recorded() if kind == Kind.TO_DEVICE]
    assert scalar_reads() - before == reads
    assert len([size for size in to_host if size > largest]) == reads, to_host
    assert all(size <= max(8, largest) for size in to_host), to_host
    assert all(size <= max(8, largest) for size in to_device), to_device


def test_the_counter_notices_a_round_trip():
    values = torch.arange(CAPACITY, device="tpu")
    with pytest.raises(AssertionError, match="8000"), no_transfers():
        values.cpu()
    with pytest.raises(AssertionError, match="8000"), no_transfers():
        torch.arange(CAPACITY).to("tpu")


ALL = [
    pytest.param(op, arguments, id=f"{op._name}-{n}")
    for op, sets in ARGUMENTS.items()
    for n, arguments in enumerate(sets)
]


@pytest.mark.parametrize(("op", "arguments"), ALL)
def test_every_op_and_gradient_equals_the_cpu(op, arguments):
    on_tpu = [moved(item) for item in arguments]
    with no_transfers():
        actual = op(*on_tpu)
    expected = op(*arguments)
    used = int(arguments[2][-1]) if op._name == "expand_permute" else None  # what lies behind means nothing
    for mine, other in zip(tensors(actual), tensors(expected), strict=True):
        assert_same(mine if used is None else mine[:used], other if used is None else other[:used])
    flat = [part for item in arguments for part in (item if isinstance(item, list) else [item])]
    flat_tpu = [part for item in on_tpu for part in (item if isinstance(item, list) else [item])]
    pairs = [(a, b) for a, b in zip(flat_tpu, flat, strict=True) if torch.is_tensor(b) and b.requires_grad]
    if not pairs:
        return
    losses = []
    for outputs in (actual, expected):
        floats = [output for output in tensors(outputs) if output.is_floating_point()]
        losses.append(sum((output * output).sum() for output in floats))
    on_device = torch.autograd.grad(losses[0], [a for a, _ in pairs])
    for mine, other in zip(on_device, torch.autograd.grad(losses[1], [b for _, b in pairs]), strict=True):
        assert_same(mine, other)


# FBGEMM's names, over the kinds of jagged data: one program a name, as shapes are the same


def _case(kind, lengths_dtype, values_dtype):
    case = make(kind, 3, BATCH_SIZE, CAPACITY, lengths_dtype=lengths_dtype, values_dtype=values_dtype)
    used = case.used
    weights = np.where(np.arange(CAPACITY) < used, case.weights, 0)
    return torch.from_numpy(case.lengths), torch.from_numpy(case.values), torch.from_numpy(weights), used


def names(lengths, values, weights, used):
    """Name, arguments, and which results are values of which only the first `used` count."""
    order, flat = torch.tensor([2, 0, 1], dtype=torch.int32), lengths.reshape(-1)
    offsets = fbgemm.asynchronous_complete_cumsum(flat)
    dense = torch.arange(3.0 * BATCH_SIZE * 4).view(-1, 2, 2)
    sizes = torch.tensor([200, 90, 1000]).to(values.dtype)
    lines = torch.stack([weights, weights * 2], 1)
    yield "asynchronous_complete_cumsum", (lengths,), ()
    yield "asynchronous_inclusive_cumsum", (flat,), ()
    yield "asynchronous_exclusive_cumsum", (flat,), ()
    yield "segment_sum_csr", (BATCH_SIZE, torch.tensor([0, 1, 3]).to(lengths.dtype), flat), ()
    yield "permute_2D_sparse_data", (order, lengths, values, weights, CAPACITY), (1, 2)
    yield "permute_1D_sparse_data", (order, lengths.sum(1).to(lengths.dtype), values, weights, CAPACITY), (1, 2)
    yield "permute_2D_sparse_data_input1D", (order, flat, values, BATCH_SIZE, weights, CAPACITY), (1, 2)
    yield "block_bucketize_sparse_features", (flat, values, True, True, sizes, 4, weights), (1, 2, 3, 4)
    yield "jagged_to_padded_dense", (lines, [offsets], [4], -1.0), ()
    yield "jagged_2d_to_dense", (lines, offsets, 4), ()
    yield "dense_to_jagged", (dense, [offsets], CAPACITY), (0,)
    yield "jagged_dense_elementwise_add", (lines, [offsets], dense), ()
    yield "jagged_dense_elementwise_add_jagged_output", (lines, [offsets], dense), (0,)
    yield "jagged_dense_elementwise_mul", (lines, [offsets], dense), (0,)


@pytest.mark.parametrize(
    ("lengths_dtype", "values_dtype"), [(np.int64, np.int64), (np.int32, np.int64), (np.int64, np.int32)]
)
def test_fbgemm_names_equal_the_cpu(lengths_dtype, values_dtype):
    """Cases 03, 09, 11 and 14."""
    kinds = KINDS if lengths_dtype == values_dtype else ["mixed"]
    for kind in kinds:
        lengths, values, weights, used = _case(kind, lengths_dtype, values_dtype)
        for name, arguments, jagged in names(lengths, values, weights, used):
            cut = [item[:used] if torch.is_tensor(item) and len(item) == CAPACITY else item for item in arguments]
            expected = tensors(getattr(fbgemm, name)(*cut))
            on_tpu = [moved(item) for item in arguments]
            with no_transfers():
                actual = tensors(getattr(fbgemm, name)(*on_tpu))
            for place, (mine, other) in enumerate(zip(actual, expected, strict=True)):
                if isinstance(other, list):
                    continue  # the offsets, as they were given
                size = min(used, len(other)) if place in jagged else len(other)
                assert_same(mine[:size], other[:size])


def test_an_unknown_size_costs_one_number():
    lengths, values, weights, used = _case("mixed", np.int64, np.int64)
    order = torch.tensor([2, 0, 2], dtype=torch.int32)
    expected = fbgemm.permute_2D_sparse_data(order, lengths, values[:used], weights[:used])
    given = [moved(item) for item in (order, lengths, values, weights)]
    with no_transfers(reads=1):
        actual = fbgemm.permute_2D_sparse_data(*given)
    for mine, other in zip(actual, expected, strict=True):
        assert_same(mine, other)


def test_selected_bags_equal_the_cpu():
    lengths, values, weights, _ = _case("mixed", np.int64, np.int64)
    chosen = torch.tensor([36, 0, 0, 5])
    expected = select_bags(values, lengths.view(-1), chosen, weights, BATCH_SIZE, 200)
    given = [moved(item) for item in (values, lengths.view(-1), chosen, weights)]
    size = int(expected[1].sum())
    offsets = moved(fbgemm.asynchronous_complete_cumsum(lengths.view(-1)))
    with no_transfers():
        actual = fbgemm.keyed_jagged_index_select_dim1(
            given[0], given[1], offsets, given[2], BATCH_SIZE, given[3], size
        )
    for mine, other, count in zip(actual, expected, (size, 12, size), strict=True):
        assert_same(mine, other[:count])


@pytest.mark.parametrize("mode", [1, 2])
def test_bounds_check_changes_in_place(mode):
    given = [torch.tensor(x) for x in ([10, 5], [3, 10, -1, 5], [0, 2, 1, 3, 9])]
    on_cpu, on_tpu = [item.clone() for item in given], [moved(item) for item in given]
    count = torch.zeros(1, dtype=torch.int64, device="tpu")
    fbgemm.bounds_check_indices(*on_cpu, mode, torch.zeros(1, dtype=torch.int64))
    with no_transfers():
        fbgemm.bounds_check_indices(*on_tpu, mode, count)
    for mine, other in zip(on_tpu, on_cpu, strict=True):
        assert torch.equal(mine.cpu(), other)
    assert count.item() == (4 if mode == 1 else 0)
    with pytest.raises(RuntimeError, match="ids or offsets are out of bounds"):
        fbgemm.bounds_check_indices(*[moved(item) for item in given], 0, count)


def test_what_does_not_fit_raises():
    lengths, values, _, _ = (
        moved(item) if torch.is_tensor(item) else item for item in _case("mixed", np.int64, np.int64)
    )
    order = moved(torch.tensor([0], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="two dimensions"):
        fbgemm.permute_2D_sparse_data(order, lengths.view(-1), values)
    with pytest.raises(RuntimeError, match="3 dimensions; 1 or 2"):
        fbgemm.asynchronous_complete_cumsum(lengths.view(1, 3, -1))
    pooled = moved(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="regroup_keyed_tensor: no tensor has the keys z"):
        fbgemm.regroup_keyed_tensor([pooled], [["a"]], [[2]], [["z"]])
    with pytest.raises(RuntimeError, match="kt_regroup_arguments: no tensor has the keys y, z"):
        fbgemm.kt_regroup_arguments(pooled, [["a"]], [[2]], [["z", "a", "y"]])


# TorchRec's own methods


def _kjt(kind="mixed", weighted=True):
    lengths, values, weights, used = _case(kind, np.int64, np.int64)
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=values[:used],
        weights=weights[:used] if weighted else None,
        lengths=lengths.view(-1),
    )


def _variable_stride(device):
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(7, device=device),
        lengths=torch.tensor([2, 1, 0, 1, 3], device=device),
        weights=torch.arange(7.0, device=device),
        stride_per_key_per_rank=[[2], [3]],
    )


def _received(device):
    """What two ranks sent, in the order of an all-to-all: rank by rank."""
    tensors = [torch.tensor([1, 1, 0, 2, 1, 0, 1, 0], device=device), torch.arange(6, device=device)]
    recat = torch.tensor([0, 2, 1, 3], dtype=torch.int32, device=device)
    return KeyedJaggedTensor.dist_init(["a", "b"], tensors, False, 2, recat, [2, 2])


def _bucketized(kjt, device):
    sizes = torch.tensor([5, 4], device=device)
    result, permute = bucketize_kjt_before_all2all(kjt, 2, sizes, output_permute=True, bucketize_pos=True)
    return [result.values(), result.lengths(), result.weights(), permute]


DISTRIBUTED = {
    "dist_init": lambda device: _tensors_of(_received(device)),
    "bucketize": lambda device: _bucketized(_received(device), device),
    "bucketize, a stride per key": lambda device: _bucketized(_variable_stride(device), device),
}


def _tensors_of(kjt):
    return [tensor for tensor in (kjt.values(), kjt.lengths(), kjt.weights_or_none()) if tensor is not None]


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_what_sharded_modules_do_to_jagged_tensors(name):
    for mine, other in zip(DISTRIBUTED[name]("tpu"), DISTRIBUTED[name]("cpu"), strict=True):
        assert_same(mine, other)


def test_lengths_that_lie_and_strided_tensors():
    """Case 10's kind on a device: nothing is read behind the values; views need no copy by the caller."""
    offsets = torch.tensor([0, 2, 9], device="tpu")
    dense = fbgemm.jagged_to_padded_dense(torch.arange(4.0, device="tpu").view(4, 1), [offsets], [3], -1.0)
    assert dense.flatten().tolist() == [0, 1, -1, 2, 3, -1]
    order, lengths = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([[1, 2, 0], [0, 1, 3]])
    expected = fbgemm.permute_2D_sparse_data(order, lengths.t(), torch.arange(14)[::2])
    actual = fbgemm.permute_2D_sparse_data(moved(order), moved(lengths).t(), moved(torch.arange(14))[::2], None, 7)
    for mine, other in zip(actual[:2], expected[:2], strict=True):
        assert_same(mine, other)


def test_a_compiled_function_keeps_its_jagged_ops():
    """One graph: TorchRec's ops are traced by their fake implementations, and run as on the CPU."""
    lengths, values, weights, used = _case("mixed", np.int64, np.int64)
    order = torch.tensor([2, 0, 1], dtype=torch.int32)

    def function(order, lengths, values, weights):
        new_lengths, new_values, new_weights = fbgemm.permute_2D_sparse_data(order, lengths, values, weights, CAPACITY)
        offsets = fbgemm.asynchronous_complete_cumsum(new_lengths.reshape(-1))
        return new_values, fbgemm.jagged_to_padded_dense(new_weights.unsqueeze(1), [offsets], [5], 0.0)

    expected = function(order, lengths, values, weights)
    given = [moved(item) for item in (order, lengths, values, weights)]
    actual = torch.compile(function, backend="tpu", fullgraph=True, dynamic=False)(*given)
    assert_same(actual[0][:used], expected[0][:used])
    assert_same(actual[1], expected[1])
