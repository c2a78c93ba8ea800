"""What TorchRec's own tests ask of a KeyedJaggedTensor, with its tensors on the device.

Three keys of 37 bags: data have 148 bytes (a key's lengths) to kilobytes; metadata have 8 bytes a key.
"""

import pytest
import torch
from torch.utils import _pytree as pytree
from torchrec import KeyedJaggedTensor
from torchrec.sparse.jagged_tensor import ComputeJTDictToKJT, ComputeKJTToJTDict, kjt_is_equal

from tests.emulated.device.both_devices import Behaviour, check

KEYS, BATCH_SIZE = ["a", "b", "c"], 37
PER_KEY = 24  # bytes of one int64 a key
STRIDES = (12,)  # TorchRec adds up lengths by the strides, an int32 a key


def lengths(kind="mixed"):
    counts = torch.cat([(torch.arange(BATCH_SIZE) * 7 % 5).roll(shift) for shift in (0, 5, 11)])
    if kind == "a key is empty":
        counts[BATCH_SIZE : 2 * BATCH_SIZE] = 0
    return counts * 0 if kind == "all empty" else counts


def batch(kind="mixed", weighted=True, keys=KEYS):
    counts = lengths(kind)
    values = torch.arange(int(counts.sum())) * 11 % 97
    weights = torch.linspace(-1, 1, len(values)).requires_grad_() if weighted else None
    return KeyedJaggedTensor(list(keys), values, weights=weights, lengths=counts)


def parts(kind="mixed"):
    made = batch(kind)
    return [made.values(), made.lengths(), made.weights()]


def offsets_and_values():
    made = batch()
    return [made.values(), made.offsets(), made.weights()]


def variable(weighted=True, inverse=False):
    """Key `a` has 12 bags, `b` none, `c` 20; with `inverse`, which of them each of 40 examples has."""
    counts = lengths()[:32]
    values = torch.arange(int(counts.sum()))
    indices = (torch.arange(120) * 5 % 12).view(3, 40)
    indices[1] = 0
    return KeyedJaggedTensor(
        KEYS,
        values,
        weights=values / 7 if weighted else None,
        lengths=counts,
        stride_per_key_per_rank=[[12], [0], [20]],
        inverse_indices=(KEYS, indices) if inverse else None,
    )


def without_examples():
    nothing = torch.zeros(0, dtype=torch.int64)
    return KeyedJaggedTensor(KEYS, nothing, lengths=nothing)


def of_keys(kjt):
    """All that is known per key, on the host."""
    return [kjt.length_per_key(), kjt.offset_per_key(), kjt.index_per_key(), kjt.stride_per_key(), kjt.stride()]


def with_jagged(kjt):
    return [kjt, list(kjt.to_dict().values())]


BEHAVIOURS = {
    "from_lengths_sync": Behaviour(
        lambda values, counts, weights: [
            made := KeyedJaggedTensor.from_lengths_sync(KEYS, values, counts, weights), *of_keys(made)
        ],
        parts,
        reads=(PER_KEY,),
    ),
    "from_offsets_sync": Behaviour(
        lambda values, offsets, weights: [
            made := KeyedJaggedTensor.from_offsets_sync(KEYS, values, offsets, weights), *of_keys(made)
        ],
        offsets_and_values,
        reads=(PER_KEY,),
    ),
    "lengths and offsets of each other": Behaviour(
        lambda values, counts, _: (
            KeyedJaggedTensor(KEYS, values, offsets=KeyedJaggedTensor(KEYS, values, lengths=counts).offsets())
        ).lengths(),
        parts,
    ),
    "unsync": Behaviour(lambda kjt: of_keys(kjt.sync().unsync().sync()), lambda: [batch()], reads=(PER_KEY,) * 2),
    "from_jt_dict": Behaviour(
        lambda jagged: KeyedJaggedTensor.from_jt_dict(jagged),
        lambda: [batch(weighted=False).to_dict()],
        reads=(PER_KEY,),
    ),
    "concat": Behaviour(
        lambda one, two: KeyedJaggedTensor.concat([one, two]), lambda: [batch(), batch(keys=["d", "e", "f"])]
    ),
    "concat without weights": Behaviour(
        lambda one, two: KeyedJaggedTensor.concat([one, two]),
        lambda: [batch(weighted=False), batch("a key is empty", False, ["d", "e", "f"])],
    ),
    "split": Behaviour(lambda kjt: kjt.split([1, 2]), lambda: [batch()], reads=(PER_KEY,)),
    "split with an empty segment": Behaviour(
        lambda kjt: kjt.split([2, 0, 1]), lambda: [batch("a key is empty")], reads=(PER_KEY,)
    ),
    "split into itself": Behaviour(lambda kjt: kjt.split([3]), lambda: [batch()], reads=(PER_KEY,)),
    "permute": Behaviour(
        lambda kjt: kjt.permute([2, 0, 1]), lambda: [batch()], reads=(PER_KEY,), writes=(12,), backward=True
    ),
    "permute by a tensor": Behaviour(
        lambda kjt, order: kjt.permute([1, 2, 0], order),
        lambda: [batch(weighted=False), torch.tensor([1, 2, 0], dtype=torch.int32)],
        reads=(PER_KEY,),
    ),
    "permute a part": Behaviour(lambda kjt: kjt.permute([2]), lambda: [batch()], reads=(PER_KEY,)),
    "permute with repeated keys": Behaviour(
        lambda kjt: kjt.permute([0, 2, 0, 0]), lambda: [batch("a key is empty")], reads=(PER_KEY,), writes=(16,)
    ),
    "permute nothing but empty bags": Behaviour(
        lambda kjt: kjt.permute([2, 0, 1]), lambda: [batch("all empty")], reads=(PER_KEY,), writes=(12,)
    ),
    "to_dict": Behaviour(
        lambda kjt: [kjt.to_dict(), kjt.to_dict()], lambda: [batch()], reads=(PER_KEY,), backward=True
    ),
    "to_dict without offsets": Behaviour(
        lambda kjt: list(kjt.to_dict(compute_offsets=False).values()), lambda: [batch("all empty")], reads=(PER_KEY,)
    ),
    "getitem": Behaviour(
        lambda kjt: [kjt[key] for key in KEYS], lambda: [batch("a key is empty")], reads=(PER_KEY,), backward=True
    ),
    "without examples": Behaviour(  # case 01
        lambda kjt: [kjt.to_dict(), kjt.permute([1, 0]), kjt.split([1, 2]), kjt["b"], *of_keys(kjt)],
        lambda: [without_examples()],
    ),
    "flatten_lengths": Behaviour(
        lambda kjt: KeyedJaggedTensor(KEYS, kjt.values(), lengths=kjt.lengths().view(3, -1)).flatten_lengths(),
        lambda: [batch()],
        reads=(PER_KEY,),
    ),
    "modules to and from dicts": Behaviour(
        lambda kjt: ComputeJTDictToKJT()(ComputeKJTToJTDict()(kjt)), lambda: [batch()], reads=(PER_KEY, PER_KEY)
    ),
    "pytree": Behaviour(
        lambda kjt: pytree.tree_map_only(torch.Tensor, lambda tensor: tensor + tensor, kjt).values(),
        lambda: [batch()],
    ),
    "flatten and back": Behaviour(
        lambda kjt: [pytree.tree_unflatten(*pytree.tree_flatten(kjt)), *of_keys(kjt)], lambda: [batch()], (PER_KEY,)
    ),
    "equality": Behaviour(
        lambda one, two, three: [kjt_is_equal(one, two), kjt_is_equal(one, three)],
        lambda: [batch(), batch(), batch(keys=["c", "b", "a"])],
        reads=(1, PER_KEY, PER_KEY, 1, 1, 1),
    ),
    "empty": Behaviour(
        lambda kjt: [KeyedJaggedTensor.empty_like(kjt).values(), KeyedJaggedTensor.empty_like(kjt).lengths()],
        lambda: [batch("all empty", False)],
    ),
    "copy_": Behaviour(
        lambda one, two: one.copy_(two), lambda: [batch(weighted=False), batch(weighted=False).permute([1, 0, 2])]
    ),
    "dist_tensors": Behaviour(
        lambda kjt: [kjt.dist_labels(), kjt.dist_splits([1, 2]), kjt.dist_tensors()], lambda: [batch()], (PER_KEY,)
    ),
    "stride per key: metadata": Behaviour(of_keys, lambda: [variable()], (PER_KEY,), STRIDES),
    "stride per key: to_dict": Behaviour(with_jagged, lambda: [variable()], (PER_KEY,), STRIDES),
    "stride per key: getitem": Behaviour(
        lambda kjt: [kjt[key] for key in KEYS], lambda: [variable(weighted=False)], (PER_KEY,), STRIDES
    ),
    "stride per key: split": Behaviour(lambda kjt: kjt.split([2, 1]), lambda: [variable()], (PER_KEY,), STRIDES),
    "stride per key: permute": Behaviour(
        # TorchRec gives no size to either permutation of segments: two numbers are read.
        lambda kjt: kjt.permute([2, 0, 1]), lambda: [variable()], (PER_KEY, 8, 8), (12, *STRIDES, PER_KEY, PER_KEY)
    ),
    "stride per key: concat": Behaviour(
        lambda one, two: KeyedJaggedTensor.concat([one, two]),
        lambda: [variable(), KeyedJaggedTensor(["d"], torch.arange(6), torch.ones(6), torch.tensor([4, 2]),
                                               stride_per_key_per_rank=[[2]])],
    ),
    "inverse indices": Behaviour(
        lambda kjt: [kjt, kjt.stride(), kjt.inverse_indices()[1]], lambda: [variable(inverse=True)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_as_on_the_cpu(name):
    check(BEHAVIOURS[name])


def test_the_gradient_of_a_part_is_zero_elsewhere():
    """FBGEMM's own gradient of a permutation that leaves keys out ends the process."""
    made = batch().to("tpu")
    weights = made.weights().detach().requires_grad_()
    KeyedJaggedTensor(KEYS, made.values(), weights, made.lengths()).permute([2]).weights().sum().backward()
    size = made.length_per_key()[2]
    assert weights.grad.tolist() == [0.0] * (len(weights) - size) + [1.0] * size


def test_moving_there_and_back_keeps_everything():
    made = variable(inverse=True)
    back = made.to("tpu").to("cpu")
    assert kjt_is_equal(made, back) and back.inverse_indices()[1].equal(made.inverse_indices()[1])


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda kjt: kjt["z"], KeyError),
        (lambda kjt: kjt.permute([3]), IndexError),
        (lambda kjt: kjt.split([4]), IndexError),
        (lambda kjt: kjt.inverse_indices(), AssertionError),
    ],
    ids=["getitem", "permute", "split", "inverse indices"],
)
def test_mistakes_raise_what_they_raise_on_the_cpu(act, error):
    for device in ("cpu", "tpu"):
        with pytest.raises(error):
            act(batch().to(device))
