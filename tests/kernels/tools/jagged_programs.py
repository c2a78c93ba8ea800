"""The jagged programs that the compile tier and `benchmarks.jagged` compile, at the shapes of real models.

`DLRM_V2`: the 26 features of MLPerf DLRM-v2, 214 ids an example, batch 4,096, over 64 row-wise ranks.
`SEQUENCE`: one feature of up to 200 ids, batch 4,096, vectors of 64; half of the places are used on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tpurec.kernels import (
    jagged_bounds,
    jagged_bucketize,
    jagged_dense,
    jagged_permute,
    jagged_positions,
    jagged_segments,
    pooled_permute,
)
from tpurec.kernels.ahead_of_time import Target


@dataclass(frozen=True)
class Sizes:
    """A model's batch.

    Args:
        num_features: jagged features.
        batch_size: examples.
        num_ids: capacity of all features.
        dim: of the pooled or unpooled vectors.
        max_length: places of the padded array.
        num_buckets: row-wise ranks.
    """

    num_features: int
    batch_size: int
    num_ids: int
    dim: int
    max_length: int
    num_buckets: int

    @property
    def num_bags(self) -> int:
        """Bags of all features."""
        return self.num_features * self.batch_size


DLRM_V2 = Sizes(26, 4096, 214 * 4096, 128, 100, 64)
SEQUENCE = Sizes(1, 4096, 100 * 4096, 64, 200, 64)
SIZES = {"DLRM-v2": DLRM_V2, "sequence": SEQUENCE}


@dataclass(frozen=True)
class Program:
    """A function, and abstract arguments for a target.

    Args:
        function: makes the function for given sizes.
        arguments: makes its arguments.
        sizes: names of the shapes that it is compiled at.
    """

    function: Callable[[Sizes], Callable[..., Any]]
    arguments: Callable[[Target, Sizes], tuple[Any, ...]]
    sizes: tuple[str, ...] = field(default=tuple(SIZES))


def _lengths(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_features, sizes.batch_size), jnp.int32)


def _flat(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_bags,), jnp.int32)


def _offsets(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_bags + 1,), jnp.int32)


def _per_feature(target: Target, sizes: Sizes, more: int = 0) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_features + more,), jnp.int32)


def _ids(target: Target, sizes: Sizes, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_ids,), dtype)


def _vectors(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_ids, sizes.dim), jnp.float32)


def _dense(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.num_bags, sizes.max_length, sizes.dim), jnp.float32)


def _pooled(target: Target, sizes: Sizes) -> jax.ShapeDtypeStruct:
    return target.array((sizes.batch_size, sizes.num_features * sizes.dim), jnp.float32)


def _bucketize(sizes: Sizes) -> Callable[..., Any]:
    def function(lengths, ids, block_sizes, weights):
        return jagged_bucketize.block_bucketize(lengths, ids, block_sizes, sizes.num_buckets, weights)

    return function


PROGRAMS: dict[str, Program] = {
    "complete_cumsum": Program(lambda s: jagged_positions.complete_cumsum, lambda t, s: (_flat(t, s),)),
    "offsets_range": Program(
        lambda s: lambda offsets: jagged_positions.offsets_range(offsets, s.num_ids), lambda t, s: (_offsets(t, s),)
    ),
    "permute_jagged": Program(
        lambda s: lambda *a: jagged_permute.permute_jagged(*a, s.num_ids),
        lambda t, s: (_per_feature(t, s), _lengths(t, s), _ids(t, s), _ids(t, s, jnp.float32)),
    ),
    "permute_jagged_gradient": Program(
        lambda s: lambda *a: jagged_permute.permute_jagged_gradient(*a, s.num_ids),
        lambda t, s: (_ids(t, s, jnp.float32), _per_feature(t, s), _lengths(t, s)),
    ),
    "invert_permute": Program(lambda s: jagged_permute.invert_permute, lambda t, s: (_ids(t, s),), ("DLRM-v2",)),
    "expand_permute": Program(
        lambda s: lambda *a: jagged_permute.expand_permute(*a, s.num_ids),
        lambda t, s: (_per_feature(t, s), _per_feature(t, s, 1), _per_feature(t, s, 1)),
        ("DLRM-v2",),
    ),
    "select_bags": Program(
        lambda s: lambda *a: jagged_permute.select_bags(*a, s.batch_size, s.num_ids),
        lambda t, s: (_ids(t, s), _flat(t, s), t.array((s.batch_size,), jnp.int32), _ids(t, s, jnp.float32)),
    ),
    "block_bucketize": Program(
        _bucketize, lambda t, s: (_flat(t, s), _ids(t, s), _per_feature(t, s), _ids(t, s, jnp.float32))
    ),
    "jagged_to_padded_dense": Program(
        lambda s: lambda *a: jagged_dense.jagged_to_padded_dense(*a, s.max_length, 0.0),
        lambda t, s: (_vectors(t, s), _offsets(t, s)),
        ("sequence",),
    ),
    "jagged_to_padded_dense, ids": Program(
        lambda s: lambda *a: jagged_dense.jagged_to_padded_dense(*a, s.max_length, -1),
        lambda t, s: (_ids(t, s), _offsets(t, s)),
    ),
    "dense_to_jagged, ids": Program(
        lambda s: lambda *a: jagged_dense.dense_to_jagged(*a, s.num_ids),
        lambda t, s: (t.array((s.num_bags, s.max_length), jnp.int32), _offsets(t, s)),
        ("sequence",),
    ),
    "dense_to_jagged": Program(
        lambda s: lambda *a: jagged_dense.dense_to_jagged(*a, s.num_ids),
        lambda t, s: (_dense(t, s), _offsets(t, s)),
        ("sequence",),
    ),
    "jagged_dense_multiply": Program(
        lambda s: jagged_dense.jagged_dense_multiply,
        lambda t, s: (_vectors(t, s), _offsets(t, s), _dense(t, s)),
        ("sequence",),
    ),
    "segment_sum": Program(
        lambda s: jagged_segments.segment_sum, lambda t, s: (_vectors(t, s), _offsets(t, s)), ("sequence",)
    ),
    "segment_sum, numbers": Program(
        lambda s: jagged_segments.segment_sum, lambda t, s: (_ids(t, s, jnp.float32), _offsets(t, s))
    ),
    "segment_gradient": Program(
        lambda s: lambda *a: jagged_segments.segment_gradient(*a, s.num_ids, True),
        lambda t, s: (t.array((s.num_bags, s.dim), jnp.float32), _offsets(t, s)),
        ("sequence",),
    ),
    "permute_pooled": Program(
        lambda s: lambda *a: pooled_permute.permute_pooled(*a, s.num_features * s.dim),
        lambda t, s: (_pooled(t, s), _per_feature(t, s, 1), _per_feature(t, s)),
        ("DLRM-v2",),
    ),
    "permute_multi": Program(
        lambda s: lambda pooled, moves: pooled_permute.permute_multi([pooled], moves, (s.num_features * s.dim,), False),
        lambda t, s: (_pooled(t, s), t.array((s.num_features, 6), jnp.int32)),
        ("DLRM-v2",),
    ),
    "regroup": Program(
        lambda s: (
            lambda pooled: pooled_permute.regroup(
                [pooled], [(key % 2, 0, key * s.dim, s.dim) for key in reversed(range(s.num_features))], 2
            )
        ),
        lambda t, s: (_pooled(t, s),),
        ("DLRM-v2",),
    ),
    "fix_bounds, int64": Program(
        lambda s: lambda *a: jagged_bounds.fix_bounds(*a, None),
        lambda t, s: (
            t.array((s.num_features,), jnp.int64),
            _ids(t, s, jnp.int64),
            t.array((s.num_bags + 1,), jnp.int32),
        ),
        ("DLRM-v2",),
    ),
    "check_ids": Program(
        lambda s: lambda *a: jagged_bounds.check_ids(*a, "skip"),
        lambda t, s: (_ids(t, s), _offsets(t, s), _per_feature(t, s)),
    ),
    "check_ids, int64, hash": Program(
        lambda s: lambda *a: jagged_bounds.check_ids(*a, "hash"),
        lambda t, s: (_ids(t, s, jnp.int64), _offsets(t, s), _per_feature(t, s)),
        ("DLRM-v2",),
    ),
}


def compiled(target: Target, name: str, sizes: str) -> tuple[jax.stages.Compiled, int]:
    """Compile a program in jax's 64-bit mode, as `tpurec.ops` runs it.

    Args:
        target: what to compile for.
        name: a key of `PROGRAMS`.
        sizes: a key of `SIZES`.

    Returns:
        The program, and the bytes that it must move: every argument once, every result once.
    """
    program, least = lowered(target, name, sizes)
    return program.compile(), least


def lowered(target: Target, name: str, sizes: str) -> tuple[jax.stages.Lowered, int]:
    """The same before it is compiled.

    Args:
        target: as of `compiled`.
        name: as of `compiled`.
        sizes: as of `compiled`.

    Returns:
        As of `compiled`.
    """
    program = PROGRAMS[name]
    with jax.enable_x64(True):
        arguments = program.arguments(target, SIZES[sizes])
        function = program.function(SIZES[sizes])
        least = sum(_bytes(item) for item in jax.tree.leaves((arguments, jax.eval_shape(function, *arguments))))
        return target.lower(function, *arguments), least


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * jnp.dtype(array.dtype).itemsize
