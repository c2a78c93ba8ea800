"""Jagged ops on any input against FBGEMM: the op on the CPU, the JAX function, and the gradients of both.

Sizes are 0, 1, odd and large, one program each; lengths, dtypes and numbers are anything that fits. Floats are small
whole numbers, which add up exactly in any order, so that equal means equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 - registers torch.ops.fbgemm
import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpurec.kernels import (
    jagged_bounds,
    jagged_bucketize,
    jagged_dense,
    jagged_permute,
    jagged_positions,
    pooled_permute,
)
from tpurec.ops import jagged_bounds as bounds_ops
from tpurec.ops.jagged_bucketize import block_bucketize
from tpurec.ops.jagged_dense import dense_to_jagged, jagged_dense_add, jagged_dense_multiply, jagged_to_padded_dense
from tpurec.ops.jagged_offsets import complete_cumsum
from tpurec.ops.jagged_permute import invert_permute, permute_jagged, select_bags
from tpurec.ops.pooled_permute import permute_pooled

fbgemm = torch.ops.fbgemm
FEATURES, WIDTH = 3, 2
SIZES = ((0, 3), (1, 1), (5, 0), (7, 33), (43, 1025))  # bags of a feature, capacity
INTEGERS = (torch.int32, torch.int64)
any_input = settings(max_examples=25, deadline=None)


@dataclass(frozen=True)
class Case:
    """Bags of `FEATURES` features, and a source of numbers.

    Args:
        lengths: `[FEATURES, bags]`.
        capacity: values that there are; those behind the last bag belong to nobody.
        numbers: makes everything else.
    """

    lengths: Tensor
    capacity: int
    numbers: np.random.Generator

    @property
    def other_dtype(self) -> torch.dtype:
        """Not that of the lengths: int32 and int64 are mixed both ways."""
        return torch.int32 if self.lengths.dtype == torch.int64 else torch.int64

    @property
    def used(self) -> int:
        """Values in bags."""
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Tensor:
        """Of all bags, one behind the other, of the lengths' dtype."""
        flat = self.lengths.reshape(-1)
        return torch.cat([flat.new_zeros(1), flat.cumsum(0, dtype=flat.dtype)])

    def floats(self, *shape: int) -> Tensor:
        """Whole numbers from -9 to 9, float32."""
        return torch.from_numpy(self.numbers.integers(-9, 10, shape).astype(np.float32))

    def ids(self, size: int, dtype: torch.dtype, low: int = 0, high: int = 100) -> Tensor:
        """Integers of a dtype."""
        return torch.from_numpy(self.numbers.integers(low, high, size)).to(dtype)


@st.composite
def cases(draw) -> Case:
    """Any lengths, or all in one bag, or features that are empty."""
    bags, capacity = draw(st.sampled_from(SIZES))
    total = FEATURES * bags
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["any", "one bag", "a feature empty", "full"]))
    lengths = numbers.integers(0, draw(st.integers(1, 60)), total)
    if kind == "one bag" and total:
        lengths = np.where(np.arange(total) == numbers.integers(total), capacity, 0)
    if kind == "a feature empty":
        lengths[: total // FEATURES * int(numbers.integers(1, FEATURES + 1))] = 0
    lengths = np.diff(np.minimum(np.cumsum([0, *lengths]), capacity))
    if kind == "full" and total:
        lengths[-1] += capacity - lengths.sum()
    return Case(torch.from_numpy(lengths).to(draw(st.sampled_from(INTEGERS))).view(FEATURES, bags), capacity, numbers)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def of(found) -> Tensor:
    """A torch tensor of either kind of array."""
    return found if torch.is_tensor(found) else torch.from_numpy(np.array(found))


def same(found, expected: Tensor, used: int | None = None) -> None:
    """Equal in dtype and value; behind `used`, where FBGEMM has nothing: 0 for floats, -1 for integers."""
    found = of(found)
    assert found.dtype == expected.dtype
    size = len(found) if used is None else used
    assert torch.equal(found[:size].detach(), expected.detach())
    assert (found[size:] == (0 if expected.is_floating_point() else -1)).all()


def gradients(function, inputs, upstream):
    """Of a torch function's only floating result with respect to its inputs."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    result = function(*leaves)
    return torch.autograd.grad(result, leaves, upstream) if result.requires_grad else None


@partial(jax.jit, static_argnums=0)
def pulled_back(function, values, offsets, dense, upstream):
    """The same of a JAX function of jagged values and a dense array."""
    return jax.vjp(lambda values, dense: function(values, offsets, dense), values, dense)[1](upstream)


@any_input
@given(cases(), st.sampled_from([1, 4, 70]), st.sampled_from([0.0, -3.0]))
def test_padding(case, longest, padding):
    """Cases 01, 03, 04, 09, 11 and 14."""
    offsets, values, used = case.offsets, case.floats(case.capacity, WIDTH), case.used

    def theirs(values):
        return fbgemm.jagged_to_padded_dense(values, [offsets], [longest], padding)

    expected = theirs(values[:used])
    function = jax.jit(jagged_dense.jagged_to_padded_dense, static_argnums=(2, 3))
    same(jagged_to_padded_dense(values, offsets, longest, padding), expected)
    same(function(values.numpy(), offsets.numpy(), longest, padding), expected)
    upstream = case.floats(*expected.shape)
    (gradient,) = gradients(theirs, [values[:used]], upstream)
    (mine,) = gradients(lambda values: jagged_to_padded_dense(values, offsets, longest, padding), [values], upstream)
    same(mine, gradient, used)
    back = jax.jit(jagged_dense.dense_to_jagged, static_argnums=2)  # what the op's gradient is on a device
    same(back(upstream.numpy(), offsets.numpy(), case.capacity), gradient, used)


@any_input
@given(cases(), st.sampled_from([1, 4, 70]))
def test_padded_back_to_jagged(case, longest):
    offsets, used = case.offsets, case.used
    dense = case.floats(len(offsets) - 1, longest, WIDTH)

    def theirs(dense):
        return fbgemm.dense_to_jagged(dense, [offsets], used)[0]

    def mine(dense):
        return dense_to_jagged(dense, offsets, case.capacity)

    if len(offsets) == 1:
        same(mine(dense), dense.new_zeros(0, WIDTH), 0)
        return
    same(mine(dense), theirs(dense), used)
    function = jax.jit(jagged_dense.dense_to_jagged, static_argnums=2)
    same(function(dense.numpy(), offsets.numpy(), case.capacity), theirs(dense), used)
    upstream = case.floats(case.capacity, WIDTH)
    (expected,) = gradients(theirs, [dense], upstream[:used])
    same(gradients(mine, [dense], upstream)[0], expected)
    pad = jax.jit(jagged_dense.jagged_to_padded_dense, static_argnums=(2, 3))
    same(pad(upstream.numpy(), offsets.numpy(), longest, 0.0), expected)


ARITHMETIC = {
    "add": (jagged_dense_add, jagged_dense.jagged_dense_add, "jagged_dense_elementwise_add_jagged_output"),
    "multiply": (jagged_dense_multiply, jagged_dense.jagged_dense_multiply, "jagged_dense_elementwise_mul"),
}


@pytest.mark.parametrize("name", ARITHMETIC)
@any_input
@given(cases())
def test_arithmetic(name, case):
    """Bags may be longer and shorter than a row of the dense array."""
    offsets, used, longest = case.offsets, case.used, 4
    values, dense = case.floats(case.capacity, WIDTH), case.floats(len(offsets) - 1, longest, WIDTH)
    op, function, of_fbgemm = ARITHMETIC[name]
    if len(offsets) == 1:
        assert op(values, offsets, dense).shape == (case.capacity, WIDTH)
        return

    def theirs(values, dense):
        return getattr(fbgemm, of_fbgemm)(values, [offsets], dense)[0]

    expected, upstream = theirs(values[:used], dense), case.floats(case.capacity, WIDTH)
    found = op(values, offsets, dense)
    same(found[:used], expected)
    compiled = jax.jit(function)(values.numpy(), offsets.numpy(), dense.numpy())
    same(of(compiled)[:used], expected)
    wanted = gradients(theirs, [values[:used], dense], upstream[:used])
    mine = gradients(lambda *inputs: op(inputs[0], offsets, inputs[1]), [values, dense], upstream)
    by_jax = pulled_back(function, *(one.numpy() for one in (values, offsets, dense, upstream)))
    for one in (mine, by_jax):
        same(of(one[0])[:used], wanted[0])
        same(one[1], wanted[1])


@any_input
@given(cases())
def test_permuted_features_with_weights(case):
    """Also as FBGEMM's one-dimensional form, which has no gradient."""
    values, weights, used = case.ids(case.capacity, case.other_dtype), case.floats(case.capacity), case.used
    permute = torch.from_numpy(case.numbers.permutation(FEATURES)).int()
    function = jax.jit(jagged_permute.permute_jagged, static_argnums=4)
    per_feature = case.lengths.sum(1, dtype=case.lengths.dtype)
    for name, lengths in (("permute_2D_sparse_data", case.lengths), ("permute_1D_sparse_data", per_feature)):
        theirs = getattr(fbgemm, name)(permute, lengths, values[:used], weights[:used], used)
        arguments = permute, lengths, values, weights
        for mine in (
            permute_jagged(*arguments, case.capacity),
            function(*(one.numpy() for one in arguments), case.capacity),
        ):
            same(mine[0], theirs[0])
            same(mine[1], theirs[1], used)
            same(mine[2], theirs[2], used)
    upstream = case.floats(case.capacity)
    (mine,) = gradients(
        lambda weights: permute_jagged(permute, case.lengths, values, weights, case.capacity)[2], [weights], upstream
    )
    if used:  # without values FBGEMM's result has no gradient function to ask
        (expected,) = gradients(
            lambda weights: fbgemm.permute_2D_sparse_data(permute, case.lengths, values[:used], weights, used)[2],
            [weights[:used]], upstream[:used],
        )  # fmt: skip
        same(mine, expected, used)
    back = jax.jit(jagged_permute.permute_jagged_gradient, static_argnums=3)
    same(back(*(one.numpy() for one in (upstream, permute, case.lengths)), case.capacity), mine)


@any_input
@given(cases(), st.booleans())
def test_buckets(case, keep):
    """Cases 07, 09, 11 and 14: ids from below 0 to beyond all blocks, positions, and the way back."""
    flat, used, dtype, num_buckets = case.lengths.reshape(-1), case.used, case.other_dtype, 7
    ids, weights = case.ids(case.capacity, dtype, -5, 200), case.floats(case.capacity)
    blocks = case.ids(FEATURES, dtype, 1, 60)
    theirs = fbgemm.block_bucketize_sparse_features_inference(
        flat, ids[:used], True, True, blocks, num_buckets, weights[:used], None, -1, None, True, keep
    )
    expected = [theirs[0], theirs[1], theirs[3], theirs[4], theirs[5], theirs[2]]
    rest = (None, [], None, None, keep)
    function = jax.jit(jagged_bucketize.block_bucketize, static_argnums=(3, 9))
    arrays = [one.numpy() for one in (flat, ids, blocks)]
    by_jax = function(*arrays, num_buckets, weights.numpy(), *rest)
    for found in (block_bucketize(flat, ids, blocks, num_buckets, weights, *rest), by_jax):
        for place, (mine, other) in enumerate(zip(found, expected, strict=True)):
            mine = of(mine)
            same(mine if place == 0 else mine[:used], other)
        back = of(found[3]).long()
        moved = of(found[5])
        assert torch.equal(moved[back][:used], weights[:used])


@any_input
@given(cases(), st.booleans())
def test_the_same_bags_of_every_key(case, weighted):
    """FBGEMM has no CPU kernel for `keyed_jagged_index_select_dim1`: bag by bag."""
    bags, lengths, used = case.lengths.shape[1], case.lengths.reshape(-1), case.used
    values, weights = case.ids(case.capacity, torch.int64), case.floats(case.capacity) if weighted else None
    chosen = case.ids(4 if bags else 0, torch.int64, 0, max(bags, 1))
    wanted = [int(key * bags + bag) for key in range(FEATURES) for bag in chosen]
    capacity = 12 * case.capacity
    found = select_bags(values, lengths, chosen, weights, bags, capacity)
    arrays = [None if one is None else one.numpy() for one in (values, lengths, chosen, weights)]
    by_jax = jax.jit(jagged_permute.select_bags, static_argnums=(4, 5))(*arrays, bags, capacity)
    for given_values, place in ((values, 0), (weights, 2)):
        if given_values is not None:
            parts = given_values[:used].split(lengths.tolist())
            expected = torch.cat([given_values[:0], *(parts[bag] for bag in wanted)])
            for mine in (found, by_jax):
                same(mine[place], expected, len(expected))
    for mine in (found, by_jax):
        same(mine[1], lengths[wanted])


@any_input
@given(st.integers(0, 7), st.lists(st.integers(0, 5), min_size=5, max_size=5), st.integers(0, 2**32 - 1))
def test_permuted_columns(batch_size, dims, seed):
    case = Case(torch.zeros(FEATURES, 0), 0, np.random.default_rng(seed))
    columns, permute = 25, torch.from_numpy(case.numbers.permutation(5))
    dims[-1] += columns - sum(dims)
    pooled, upstream = case.floats(batch_size, columns), case.floats(batch_size, columns)
    before = torch.tensor([0, *np.cumsum(dims)])
    after, inverse = torch.tensor([0, *np.cumsum(np.array(dims)[permute])]), invert_permute(permute)

    def theirs(pooled):
        return fbgemm.permute_pooled_embs_auto_grad(pooled, before, permute, after, inverse)

    expected = theirs(pooled)
    arrays = before.numpy(), permute.numpy()
    same(permute_pooled(pooled, before, permute, columns), expected)
    function = jax.jit(pooled_permute.permute_pooled, static_argnums=3)
    same(function(pooled.numpy(), *arrays, columns), expected)
    (wanted,) = gradients(theirs, [pooled], upstream)
    same(gradients(lambda pooled: permute_pooled(pooled, before, permute, columns), [pooled], upstream)[0], wanted)
    back = jax.jit(pooled_permute.permute_pooled_gradient, static_argnums=3)
    same(back(upstream.numpy(), *arrays, columns), wanted)


@any_input
@given(cases(), st.sampled_from(INTEGERS))
def test_offsets_and_inverse_permutations(case, dtype):
    lengths = case.lengths.reshape(-1)
    for one in (lengths, case.lengths):
        theirs = fbgemm.asynchronous_complete_cumsum(one)
        same(complete_cumsum(one), theirs)
        same(jax.jit(jagged_positions.complete_cumsum)(one.numpy()), theirs)
    permute = torch.from_numpy(case.numbers.permutation(len(lengths))).to(dtype)
    same(invert_permute(permute), fbgemm.invert_permute(permute))
    same(jax.jit(jagged_permute.invert_permute)(permute.numpy()), fbgemm.invert_permute(permute))


@any_input
@given(cases(), st.sampled_from(INTEGERS), st.integers(0, 3))
def test_bounds(case, dtype, lies):
    """Cases 07, 09, 10 and 14: ids without a row, and offsets that go backwards, beyond the ids, or below 0."""
    if not case.lengths.numel():
        return  # FBGEMM asks for the batch size of no bags
    ids, offsets = case.ids(case.capacity, dtype, -5, 60), case.offsets.to(dtype)
    for place in case.numbers.integers(0, len(offsets), lies):
        offsets[place] = int(case.numbers.integers(-9, case.capacity + 9))
    num_rows = case.ids(FEATURES, torch.int64, 1, 60)
    new_ids, new_offsets, count = ids.clone(), offsets.clone(), torch.zeros(1, dtype=torch.int64)
    fbgemm.bounds_check_indices(num_rows, new_ids, new_offsets, 2, count)
    by_jax = jax.jit(jagged_bounds.fix_bounds)(*(one.numpy() for one in (num_rows, ids, offsets)), None)
    for mine in (bounds_ops.fix_bounds(num_rows, ids, offsets, None), by_jax):
        same(mine[0], new_ids)
        same(mine[1], new_offsets)
