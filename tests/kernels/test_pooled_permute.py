"""Columns of pooled embeddings in another order: the JAX functions equal FBGEMM's CPU ops."""

import fbgemm_gpu.sparse_ops  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpurec.kernels import pooled_permute

fbgemm = torch.ops.fbgemm
KEYS, DIMS = [["a", "b"], ["c", "d", "e"]], [[4, 12], [3, 1, 8]]
GROUPS = {
    "all": [["e", "a"], ["c", "b", "d"]],
    "repeated": [["a", "c"], ["c", "a", "a"], ["b"]],
    "one": [["d"]],
}


def of(array):
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize(("batch_size", "dtype"), [(0, np.int64), (7, np.int32)])
def test_permute_equals_fbgemm(batch_size, dtype):
    offsets, permute = np.array([0, 4, 4, 7, 20]).astype(dtype), np.array([3, 0, 2, 1]).astype(dtype)
    pooled = np.random.default_rng(0).standard_normal((batch_size, 20)).astype(np.float32)
    inverse = np.argsort(permute).astype(dtype)
    new_offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[permute])]).astype(dtype)
    expected = fbgemm.permute_pooled_embs_auto_grad(
        of(pooled), of(offsets).long(), of(permute).long(), of(new_offsets).long(), of(inverse).long()
    )
    found = jax.jit(pooled_permute.permute_pooled, static_argnums=3)(pooled, offsets, permute, 20)
    assert np.array_equal(found, expected)


def test_gradient_of_repeated_keys_adds_up():
    offsets, permute = jnp.array([0, 4, 7]), jnp.array([1, 0, 1])
    pooled = jnp.asarray(np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32))
    upstream = jnp.asarray(np.random.default_rng(1).standard_normal((5, 10)).astype(np.float32))

    @jax.jit
    def program():
        _, pullback = jax.vjp(lambda x: pooled_permute.permute_pooled(x, offsets, permute, 10), pooled)
        return pooled_permute.permute_pooled_gradient(upstream, offsets, permute, 7), pullback(upstream)[0]

    np.testing.assert_allclose(*program(), rtol=1e-6)


@pytest.mark.parametrize(("groups", "batch_size"), [("all", 5), ("repeated", 5), ("one", 5), ("repeated", 0)])
def test_moves_and_slices_equal_fbgemm(groups, batch_size):
    rng = np.random.default_rng(0)
    pooled = [rng.standard_normal((batch_size, sum(dims))).astype(np.float32) for dims in DIMS]
    theirs = [of(array).requires_grad_() for array in pooled]
    moves, in_shapes, out_shapes, widths = fbgemm.kt_regroup_arguments(theirs[0], KEYS, DIMS, GROUPS[groups])
    expected = fbgemm.permute_multi_embedding(theirs, moves, in_shapes, out_shapes, widths)
    permute_multi = jax.jit(pooled_permute.permute_multi, static_argnums=(2, 3))
    moved = permute_multi(pooled, moves.numpy(), tuple(widths), False)
    segments = [(row[1], row[0], row[2], row[4]) for row in moves.tolist()]
    sliced = pooled_permute.regroup([jnp.asarray(array) for array in pooled], segments, len(widths))
    for mine, slices, other in zip(moved, sliced, expected, strict=True):
        assert np.array_equal(mine, other.detach())
        assert np.array_equal(slices, other.detach())
    if batch_size:
        upstream = [rng.standard_normal(array.shape).astype(np.float32) for array in moved]
        torch.autograd.backward(expected, [of(array) for array in upstream])
        back = permute_multi(upstream, moves.numpy(), tuple(sum(dims) for dims in DIMS), True)
        for place, (mine, tensor) in enumerate(zip(back, theirs, strict=True)):
            used = np.zeros(tensor.shape[1], bool)
            for _, _, begin, _, size, _ in [row for row in moves.tolist() if row[0] == place]:
                used[begin : begin + size] = True
            # FBGEMM leaves the gradient of columns that no group uses as it was in memory.
            np.testing.assert_allclose(mine, np.where(used, tensor.grad, 0), rtol=1e-6, atol=1e-6)
