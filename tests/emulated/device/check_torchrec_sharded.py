"""What TorchRec's sharded modules do to jagged tensors between their exchanges, with the tensors on the device."""

import torch
from fbgemm_gpu.permute_pooled_embedding_modules import PermutePooledEmbeddings
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import VariableBatchEmbeddingBagCollectionAwaitable
from torchrec.distributed.mc_modules import _restore_dedup_feature_boundary
from torchrec.distributed.types import NoWait

from tests.emulated.device.both_devices import Behaviour, assert_same, check
from tests.emulated.device.check_jagged import no_transfers
from tpurec.ops.jagged_unique import unique_ids

KEYS, DIMS, SIZES = ["a", "b", "c"], [4, 8, 4], [12, 6, 20]


def pooled_of_own_sizes():
    """Vectors of 12, 6 and 20 bags, key after key, and which of them each of 40 examples has."""
    count = sum(size * dim for size, dim in zip(SIZES, DIMS, strict=True))
    indices = torch.stack([torch.arange(40) * 7 % size for size in SIZES])
    return [torch.sin(torch.arange(1.0, 1.0 + count)).requires_grad_(), indices]


def spread_over_examples(pooled, indices):
    """The end of a pooled lookup with a batch size per key: keys in the model's order, a vector an example."""
    reorder = PermutePooledEmbeddings(DIMS, [2, 0, 1], pooled.device)
    return VariableBatchEmbeddingBagCollectionAwaitable(
        awaitables=[NoWait(pooled)],
        inverse_indices=(KEYS, indices),
        inverse_indices_permute_indices=None,
        batch_size_per_feature_pre_a2a=SIZES,
        uncombined_embedding_dims=DIMS,
        embedding_names=["c", "a", "b"],
        embedding_dims=[4, 4, 8],
        permute_op=reorder,
    )._wait_impl()


def test_pooled_vectors_of_a_size_per_key_reach_their_examples():
    # What `PermutePooledEmbeddings` keeps of its lists: offsets of four numbers, orders of three.
    check(Behaviour(spread_over_examples, pooled_of_own_sizes, writes=(32, 24, 24, 32), backward=True))


def test_distinct_ids_are_counted_by_the_feature_that_they_came_from():
    """TorchRec corrects the lengths of FBGEMM's op, which spreads a table's distinct ids over all its features."""
    lengths = torch.tensor([3, 0, 1, 2, 9, 4])  # `a` has a table of its own; `b` and `c`, which is long, share one
    ids = torch.arange(19) * 5 % 7
    tables = torch.tensor([0, 10, 10, 20]), torch.tensor([0, 1, 3])
    batch = KeyedJaggedTensor(KEYS, ids, lengths=lengths)
    _, distinct, reverse, count = unique_ids(*tables, batch.offsets(), ids)
    expected = _restore_dedup_feature_boundary(lengths, 3, distinct[: int(count)], reverse)
    on_tpu = batch.to("tpu")
    given = [*(tensor.to("tpu") for tensor in tables), on_tpu.offsets(), on_tpu.values()]
    with no_transfers(reads=1):
        _, _, distinct, reverse = torch.ops.fbgemm.jagged_unique_indices(*given)
        actual = _restore_dedup_feature_boundary(on_tpu.lengths(), 3, distinct, reverse)
    for mine, other in zip(actual, expected, strict=True):
        assert_same(mine, other)
    assert torch.equal(actual[1][actual[2]].cpu(), ids)
    assert int(actual[0].sum()) == int(count)
