"""What TorchRec's own tests ask of a JaggedTensor and a KeyedTensor, with their tensors on the device.

Data have 148 bytes (lengths of int32) to kilobytes.
"""

import pytest
import torch
from torch.utils import _pytree as pytree
from torchrec import JaggedTensor, KeyedTensor
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import jt_is_equal, permute_multi_embedding, regroup_kts

from tests.emulated.device.both_devices import Behaviour, check

BATCH_SIZE = 37


def counts(kind="mixed"):
    found = torch.arange(BATCH_SIZE) * 7 % 5
    return found * 0 if kind == "all empty" else found


def jagged(kind="mixed", width=None, weighted=False):
    size = int(counts(kind).sum())
    shape = (size,) if width is None else (size, width)
    values = torch.sin(torch.arange(1.0, 1.0 + torch.Size(shape).numel())).view(shape).requires_grad_()
    weights = torch.linspace(-1, 1, size).view(-1, *[1] * (len(shape) - 1)).requires_grad_() if weighted else None
    return values, counts(kind), weights


def inputs(*arguments, **keywords):
    return lambda: [one for one in jagged(*arguments, **keywords) if one is not None]


def rows():
    """What `from_dense` gets: a tensor a bag, the second one empty."""
    return [torch.arange(float(size)).requires_grad_() for size in (3, 0, 40, 1)]


def three_bags(values, lengths, weights):
    return JaggedTensor(values, weights, lengths[:3])


READ_BAGS = (8, 8) * 3  # TorchRec asks for the begin and the end of each bag
JAGGED = {
    "lengths of offsets": Behaviour(
        lambda values, lengths: [
            made := JaggedTensor(values, offsets=JaggedTensor(values, lengths=lengths).offsets()), made.lengths()
        ],
        inputs(),
    ),
    "from_dense": Behaviour(
        lambda values, weights: JaggedTensor.from_dense(values, weights), lambda: [rows(), rows()],
        writes=(16,), backward=True,
    ),
    "from_dense_lengths": Behaviour(
        # The size of a masked tensor depends on the mask: torch reads it.
        lambda dense, lengths, weights: JaggedTensor.from_dense_lengths(dense, lengths, weights),
        lambda: [torch.arange(BATCH_SIZE * 4.0).view(-1, 4), counts(), torch.ones(BATCH_SIZE, 4)],
        reads=(8, 8, 8, 8),
    ),
    "to_dense": Behaviour(lambda *given: three_bags(*given).to_dense(), inputs(weighted=True), reads=READ_BAGS),
    "to_dense_weights": Behaviour(
        lambda *given: three_bags(*given).to_dense_weights(), inputs(weighted=True), reads=READ_BAGS
    ),
    "to_padded_dense": Behaviour(
        lambda values, lengths: JaggedTensor(values, lengths=lengths).to_padded_dense(3, 9.0), inputs(), backward=True
    ),
    "to_padded_dense of vectors": Behaviour(
        lambda values, lengths: JaggedTensor(values, lengths=lengths).to_padded_dense(6),
        inputs(width=4), backward=True,
    ),
    "to_padded_dense, nothing but empty bags": Behaviour(
        lambda values, lengths: JaggedTensor(values, lengths=lengths).to_padded_dense(2, -1.0), inputs("all empty")
    ),
    "to_padded_dense of the longest": Behaviour(
        lambda values, lengths: JaggedTensor(values, lengths=lengths).to_padded_dense(), inputs(), reads=(8,)
    ),
    "to_padded_dense_weights": Behaviour(
        lambda values, lengths, weights: JaggedTensor(values, weights, lengths).to_padded_dense_weights(5, 1.0),
        lambda: [jagged()[0].detach(), *jagged(weighted=True)[1:]], backward=True,
    ),
    "pytree": Behaviour(
        lambda values, lengths: pytree.tree_unflatten(
            *pytree.tree_flatten(JaggedTensor(values, lengths=lengths))
        ),
        inputs(),
    ),
    "copy_": Behaviour(
        lambda values, lengths: JaggedTensor(torch.empty_like(values), lengths=lengths * 0).copy_(
            JaggedTensor(values.detach(), lengths=lengths)
        ),
        lambda: [jagged()[0].detach(), counts()],
    ),
    "equality": Behaviour(
        lambda values, lengths: [
            jt_is_equal(made := JaggedTensor(values, lengths=lengths), made),
            jt_is_equal(made, JaggedTensor(values + 1, lengths=lengths)),
        ],
        inputs(), reads=(1, 1, 1, 1),
    ),
}  # fmt: skip

KEYS, DIMS = (["x", "y"], ["z"]), ([16, 32], [8])
ONCE, REPEATED = [["z", "x"], ["y"]], [["z", "x"], ["y", "x"]]


def pooled():
    return [
        torch.sin(torch.arange(1.0, 1.0 + BATCH_SIZE * sum(dims))).view(-1, sum(dims)).requires_grad_() for dims in DIMS
    ]


def keyed(*values):
    return [KeyedTensor(names, dims, one) for names, dims, one in zip(KEYS, DIMS, values, strict=True)]


def regroup_twice(module):
    """The second call makes nothing anew."""

    def act(*values):
        module.clear_cache()
        return [module(keyed(*values)), module(keyed(*values))]

    return act


ORDER = (32, 24, 32, 24)  # dims and orders of three keys, there and back
KEYED = {
    "from_tensor_list": Behaviour(
        lambda one, two: KeyedTensor.from_tensor_list(["a", "b"], [one, two]), pooled, backward=True
    ),
    "from_tensor_list by rows": Behaviour(
        lambda one: KeyedTensor.from_tensor_list(["a", "b"], [one, one], key_dim=0, cat_dim=0), lambda: pooled()[:1]
    ),
    "metadata": Behaviour(
        lambda one, two: [[kt.offset_per_key(), kt.length_per_key(), kt.keys()] for kt in keyed(one, two)], pooled
    ),
    "getitem and to_dict": Behaviour(
        lambda *values: [[kt.to_dict(), kt[kt.keys()[0]]] for kt in keyed(*values)], pooled, backward=True
    ),
    "pytree": Behaviour(
        lambda *values: pytree.tree_unflatten(*pytree.tree_flatten(keyed(*values))), pooled
    ),
    "regroup": Behaviour(
        lambda *values: KeyedTensor.regroup(keyed(*values), ONCE), pooled, writes=ORDER, backward=True
    ),
    "regroup with repeated keys": Behaviour(
        lambda *values: KeyedTensor.regroup(keyed(*values), REPEATED), pooled, backward=True
    ),
    "regroup_as_dict": Behaviour(
        lambda *values: KeyedTensor.regroup_as_dict(keyed(*values), [["z"], ["x"]], ["one", "two"]), pooled
    ),
    "permute_multi_embedding": Behaviour(
        lambda *values: permute_multi_embedding(keyed(*values), REPEATED), pooled, writes=(96,), backward=True
    ),
    "regroup_kts": Behaviour(lambda *values: regroup_kts(keyed(*values), REPEATED), pooled, backward=True),
    "KTRegroupAsDict": Behaviour(
        regroup_twice(KTRegroupAsDict(REPEATED, ["one", "two"])), pooled, writes=(96,), backward=True
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda values: values.cpu().to(values.device), r"moved \(148,\) and \(148,\) bytes"),
        (lambda values: values + (values.device.type == "tpu"), "not close"),
        (lambda values: values.double() if values.device.type == "cpu" else values, "float64 on the CPU"),
    ],
    ids=["a round trip", "a value", "a dtype"],
)
def test_a_difference_is_noticed(act, message):
    with pytest.raises(AssertionError, match=message):
        check(Behaviour(act, lambda: [torch.arange(float(BATCH_SIZE))]))


@pytest.mark.parametrize("name", JAGGED)
def test_jagged_tensor_as_on_the_cpu(name):
    check(JAGGED[name])


@pytest.mark.parametrize("name", KEYED)
def test_keyed_tensor_as_on_the_cpu(name):
    check(KEYED[name])


def test_an_unknown_group_is_named():
    values = [one.to("tpu") for one in pooled()]
    with pytest.raises(RuntimeError, match="no tensor has the keys w"):
        regroup_kts(keyed(*values), [["w"]])
