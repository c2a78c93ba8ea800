"""Batches on their way to the ops: packed to torch, and a user's KeyedJaggedTensor checked."""

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tpurec.embeddings import SGD, FusedEmbeddingBagCollection, jagged, to_torch
from tpurec.errors import DataError
from tpurec.features.packing import PackedBatch, PackedFeature
from tpurec.ops import embedding_bag
from tpurec.sharding.host_batch import read_batch

BATCH_SIZE, CAPACITY = 6, 32


def packed_feature(seed, weighted=False, rows=40):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 4, BATCH_SIZE).astype(np.int32)
    ids = np.full(CAPACITY, -1, np.int32)
    ids[: lengths.sum()] = generator.integers(0, rows, lengths.sum())
    weights = generator.random(CAPACITY).astype(np.float32) if weighted else None
    return PackedFeature(ids, lengths, weights)


def packed_batch(weighted=False, names=("f1", "f2", "f3")):
    features = {name: packed_feature(number, weighted) for number, name in enumerate(names)}
    dense = np.arange(BATCH_SIZE * 2, dtype=np.float32).reshape(BATCH_SIZE, 2)
    return PackedBatch(dense, np.ones(BATCH_SIZE, np.float32), np.ones(BATCH_SIZE, bool), features, BATCH_SIZE)


def collection(is_weighted=False):
    """Two dims, one feature in two tables of one stack, and an order of features that is not the batch's."""
    tables = [
        EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=40, feature_names=["f3", "f1"]),
        EmbeddingBagConfig(name="b", embedding_dim=16, num_embeddings=50, feature_names=["f2"]),
        EmbeddingBagConfig(name="c", embedding_dim=8, num_embeddings=60, feature_names=["f1"]),
    ]
    return FusedEmbeddingBagCollection(tables, SGD(lr=0.1), is_weighted)


def kjt(values, lengths, keys=("f1", "f2", "f3"), **more):
    return KeyedJaggedTensor(list(keys), torch.as_tensor(values), lengths=torch.as_tensor(lengths), **more)


@pytest.mark.parametrize("weighted", [False, True])
def test_both_layouts_and_all_three_ways_to_the_ops_agree(weighted):
    """Case 11: compact and static layouts, on the path of the CPU and on those of a device that cannot wait."""
    batch, fused = packed_batch(weighted), collection(weighted)
    compact, static = to_torch(batch).features, to_torch(batch, static=True).features
    assert static.values().numel() == 3 * CAPACITY > compact.values().numel()
    users = kjt(compact.values(), compact.lengths(), weights=compact.weights_or_none())
    for stack in fused._stacks:
        outputs = []
        for way, features in (
            (jagged._checked, compact),
            (jagged._checked, static),
            (jagged._static, static),
            (jagged._static, compact),
            (jagged._compact_on_device, users),
        ):
            ids = way(features, stack)
            assert ids.rows.dtype == ids.offsets.dtype == torch.int32
            shape = (stack.pooling, stack.num_features, stack.num_rows, stack.dim)
            outputs.append(embedding_bag(stack.parts, ids.rows, ids.offsets, ids.weights, *shape))
        assert outputs[0].any()
        for output in outputs[1:]:
            assert torch.equal(output, outputs[0])


def test_shapes_of_the_static_layout_depend_on_capacities_only():
    fused = collection()
    shapes = set()
    for seed in range(3):
        features = {name: packed_feature(seed + number) for number, name in enumerate(("f1", "f2", "f3"))}
        labels, valid = np.zeros(BATCH_SIZE, np.float32), np.ones(BATCH_SIZE, bool)
        batch = PackedBatch(np.zeros((BATCH_SIZE, 1), np.float32), labels, valid, features, BATCH_SIZE)
        ids = jagged._static(to_torch(batch, static=True).features, fused._stacks[0])
        shapes.add((ids.rows.shape, ids.offsets.shape))
    assert len(shapes) == 1


def test_dense_labels_and_valid_share_the_batchs_memory():
    batch = packed_batch()
    moved = to_torch(batch)
    batch.dense[0, 0] = 99
    assert moved.dense[0, 0] == 99
    assert moved.valid.dtype == torch.bool and moved.labels.shape == (BATCH_SIZE,)


def test_a_read_only_batch_is_accepted():
    batch = PackedBatch.from_bytes(packed_batch().to_bytes())
    assert not batch.dense.flags.writeable
    assert torch.equal(to_torch(batch).features.values(), to_torch(packed_batch()).features.values())


def test_keys_are_chosen_and_missing_ones_named():
    assert to_torch(packed_batch(), keys=["f3", "f1"]).features.keys() == ["f3", "f1"]
    with pytest.raises(DataError, match="feature 'f9' is not in the batch"):
        to_torch(packed_batch(), keys=["f9"])


def test_features_without_weights_get_ones_beside_weighted_ones():
    batch = packed_batch()
    mixed = {**batch.sparse, "f2": packed_feature(1, weighted=True)}
    features = to_torch(PackedBatch(batch.dense, batch.labels, batch.valid, mixed, BATCH_SIZE)).features
    ends = features.offset_per_key()
    assert (features.weights()[: ends[1]] == 1).all()
    used = ends[2] - ends[1]
    assert torch.equal(features.weights()[ends[1] : ends[2]], torch.from_numpy(mixed["f2"].weights[:used]))


@pytest.mark.parametrize("values", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [torch.int32, torch.int64])
@pytest.mark.parametrize("as_offsets", [False, True])
def test_int32_and_int64_mix(values, lengths, as_offsets):
    """Case 09."""
    fused, compact = collection(), to_torch(packed_batch()).features
    expected = fused(compact).values()
    if as_offsets:
        features = KeyedJaggedTensor(
            compact.keys(), compact.values().to(values), offsets=compact.offsets().to(lengths), stride=BATCH_SIZE
        )
    else:
        features = kjt(compact.values().to(values), compact.lengths().to(lengths))
    assert torch.equal(fused(features).values(), expected)


@pytest.mark.parametrize(
    ("values", "lengths", "more", "message"),
    [
        ([1, 2, 3], [1] * 4 + [0] * 14, {}, "lengths sum to 4, but there are 3 values"),
        ([1, 2, 3], [1] * 2 + [0] * 16, {}, "lengths sum to 2, but there are 3 values"),
        ([1, 2], [1, 2, -1] + [0] * 15, {}, "negative value: -1"),
        ([1], [1] + [0] * 16, {"stride": 6}, "17 lengths do not fit 3 features x 6 examples"),
        (list(range(40)) * 3, [1] * 2114, {"stride": 105}, "2114 lengths do not fit 3 features x 105 examples"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_sizes(values, lengths, more, message):
    """Case 10."""
    with pytest.raises(DataError, match=message):
        collection()(kjt(values, lengths, **more))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1.7, 2.0, 3.0]), r"ids are float32 \[3\]; one dimension of int32 or int64"),
        (torch.tensor([1, 2, 3], dtype=torch.uint8), r"ids are uint8 \[3\]"),
        (torch.tensor([[1], [2], [3]]), r"ids are int64 \[3, 1\]"),
    ],
)
def test_ids_that_are_no_list_of_integers_are_refused_unsharded_and_sharded(values, message):
    """A sharded model took 1.7 for row 1, and read bytes as rows that are not there."""
    batch = KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=torch.ones(3, dtype=torch.int64))
    for look in (collection(), lambda given: read_batch(given, {"f1": False})):
        with pytest.raises(DataError, match=message):
            look(batch)


def test_no_ids_may_have_any_dtype():
    """`torch.tensor([])` is float32."""
    batch = KeyedJaggedTensor(["f1", "f2", "f3"], torch.tensor([]), lengths=torch.zeros(6, dtype=torch.int64))
    assert not collection()(batch).values().any()
    assert len(read_batch(batch, {"f1": False}).values["f1"]) == 0


def test_offsets_that_do_not_fit_are_refused_with_the_sizes():
    """Case 10: 8 offsets for 2 features x 4 examples."""
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f1", "f2"])
    fused = FusedEmbeddingBagCollection([table], SGD(lr=0.1))
    features = KeyedJaggedTensor(["f1", "f2"], torch.arange(7), offsets=torch.arange(8), stride=4)
    with pytest.raises(DataError, match="8 offsets do not fit 2 features x 4 examples"):
        fused(features)


@pytest.mark.parametrize("bad", [60, 2**31, 2**33 + 1, -2, -(2**33)])
def test_ids_that_are_no_rows_are_refused_with_their_place(bad):
    """Case 07, in a user's own batch: -1 alone means "no row"."""
    fused = collection()
    values = torch.tensor([1, bad, 3])
    features = kjt(values, [0] * 6 + [2, 1] + [0] * 10)
    with pytest.raises(DataError, match=rf"feature 'f2': id {bad} \(value 1 of the feature.*table 'b' with 50 rows"):
        fused(features)


@pytest.mark.parametrize("bad", [50, 2**31, 2**33 + 1, -2, -(2**33)])
def test_a_device_that_cannot_raise_skips_such_ids(bad):
    """Case 07: they never read another row, nor another table's."""
    fused = collection()
    good, broken = kjt([7], [0] * 6 + [1] + [0] * 11), kjt([7, bad], [0] * 6 + [2] + [0] * 11)
    static = {"length_per_key": [0, 2, 0], "offset_per_key": [0, 0, 2, 2]}
    stack = next(stack for stack in fused._stacks if stack.dim == 16)
    for ids in (
        jagged._compact_on_device(broken, stack),
        jagged._static(kjt([7, bad], [0] * 6 + [2] + [0] * 11, **static), stack),
    ):
        shape = (stack.pooling, stack.num_features, stack.num_rows, stack.dim)
        out = embedding_bag(stack.parts, ids.rows, ids.offsets, None, *shape)
        assert torch.equal(out, fused(good).values()[:, 16:32])


def test_minus_one_is_skipped_with_its_weight():
    """Case 08: ids [3, -1, 5], weights [1, 2, 3]."""
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])
    fused = FusedEmbeddingBagCollection([table], SGD(lr=0.1), is_weighted=True)
    features = kjt([3, -1, 5], [3], keys=["f"], weights=torch.tensor([1.0, 2.0, 3.0]))
    rows = fused.embedding_bags["t"].weight
    torch.testing.assert_close(fused(features).values()[0], (rows[3] + 3 * rows[5]).detach())


def test_a_feature_that_is_missing_is_named():
    with pytest.raises(DataError, match="feature 'f3' is not in the batch"):
        collection()(kjt([1], [1, 0], keys=["f1", "f2"]))


def test_more_features_than_needed_in_any_order_are_accepted():
    fused, batch = collection(), packed_batch()
    expected = fused(to_torch(batch).features).values()
    more = PackedBatch(batch.dense, batch.labels, batch.valid, {"x": packed_feature(9), **batch.sparse}, BATCH_SIZE)
    assert torch.equal(fused(to_torch(more, keys=["x", "f2", "f3", "f1"]).features).values(), expected)


@pytest.mark.parametrize(
    ("lengths", "longest", "expected", "gradient"),
    [
        ([1, 3], 3, [[5, 0, 0], [3, 7, 1]], [1, 1, 1, 1]),
        ([1, 3], 2, [[5, 0], [3, 7]], [1, 1, 1, 0]),
        ([0, 0], 2, [[0, 0], [0, 0]], []),
    ],
)
def test_a_jagged_feature_is_padded_and_a_cut_item_gets_no_gradient(lengths, longest, expected, gradient):
    """Case 04, by TorchRec's own JaggedTensor, which a model that pads its features uses."""
    values = torch.tensor([5.0, 3.0, 7.0, 1.0][: sum(lengths)], requires_grad=True)
    feature = kjt(values, torch.tensor(lengths), keys=("f1",)).to_dict()["f1"]
    padded = feature.to_padded_dense(desired_length=longest)
    assert padded.tolist() == expected
    padded.sum().backward()
    assert values.grad.tolist() == gradient


def test_lengths_given_as_weights_are_refused_with_what_happened():
    """KeyedJaggedTensor's third positional argument is the weights: an easy mistake."""
    features = KeyedJaggedTensor(["f1"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    with pytest.raises(DataError, match=r"neither lengths nor offsets.*by keyword"):
        jagged.check_sizes(features, ["f1"], is_weighted=False)
