"""Reordering the columns of pooled embeddings, key by key. Plain JAX; the functions are the specification.

Where order and dims are known when the program is traced (`regroup`), columns are slices put side by side: one read and
one write. Where they are arrays on the device, as TorchRec passes them (`permute_pooled`, `permute_multi`), columns are
gathered, whose width no compiler can know.

Legend: B examples, K keys, D columns of all keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpurec.kernels.jagged_positions import of_segments

# Columns of FBGEMM's permute rows: input and output tensor, begin in each, length; the sixth chains duplicates.
_INPUT, _OUTPUT, _FROM, _TO, _LENGTH = range(5)


def regroup(pooled: Sequence[jax.Array], segments: Sequence[Sequence[int]], num_outputs: int) -> list[jax.Array]:
    """Put slices of columns side by side.

    Args:
        pooled: arrays `[B, D_i]`.
        segments: of each slice: output, input, first column, number of columns; in the order of the columns.
        num_outputs: how many arrays to make.

    Returns:
        The arrays `[B, sum of their slices]`.
    """
    batch_size, dtype = pooled[0].shape[0], pooled[0].dtype
    outputs = []
    for output in range(num_outputs):
        pieces = [pooled[i][:, begin : begin + size] for to, i, begin, size in segments if to == output]
        outputs.append(jnp.concatenate(pieces, axis=1) if pieces else jnp.zeros((batch_size, 0), dtype))
    return outputs


def permute_pooled(pooled_BD: jax.Array, offsets: jax.Array, permute_K: jax.Array, num_columns: int) -> jax.Array:
    """Reorder keys whose order and dims are arrays.

    Args:
        pooled_BD: `[B, D]`.
        offsets: integers `[K + 1]`: the columns of key k are `offsets[k]` to `offsets[k + 1]`.
        permute_K: integers `[T]`: key t of the result is key `permute_K[t]`; keys may repeat.
        num_columns: columns of the result, D unless keys repeat or are left out.

    Returns:
        `[B, num_columns]`; 0 in columns that no key fills.
    """
    source, inside = _pooled_columns(offsets, permute_K, num_columns)
    return _take_columns(pooled_BD, source, inside)


def permute_pooled_gradient(gradient: jax.Array, offsets: jax.Array, permute_K: jax.Array, dims: int) -> jax.Array:
    """The gradient of `permute_pooled`, also of repeated keys.

    Args:
        gradient: `[B, num_columns]`.
        offsets: as of `permute_pooled`.
        permute_K: as of `permute_pooled`.
        dims: D.

    Returns:
        `[B, D]`.
    """
    source, inside = _pooled_columns(offsets, permute_K, gradient.shape[1])
    target = jnp.where(inside, source, dims)
    return jnp.zeros((gradient.shape[0], dims), gradient.dtype).at[:, target].add(gradient, mode="drop")


def permute_multi(
    pooled: list[jax.Array], permutes: jax.Array, out_lengths: tuple[int, ...], reverse: bool = False
) -> list[jax.Array]:
    """Move columns between several arrays by FBGEMM's list of moves (`permute_multi_embedding`).

    Args:
        pooled: arrays `[B, D_i]`; with `reverse`, of the outputs' gradients.
        permutes: integers `[P, 6]`: input, output, first column in either, number of columns, and a link that is not
            used here.
        out_lengths: columns of each result.
        reverse: exchange the roles of input and output and add up what several moves bring: the gradient.

    Returns:
        Arrays `[B, out_lengths[i]]`.
    """
    widths = [array.shape[1] for array in pooled]
    of_input = jnp.array([sum(widths[:i]) for i in range(len(widths))], jnp.int32)
    of_output = jnp.array([sum(out_lengths[:i]) for i in range(len(out_lengths))], jnp.int32)
    total_in, total_out = sum(widths), sum(out_lengths)
    if permutes.shape[0] == 0 or total_in == 0 or total_out == 0:
        return [jnp.zeros((pooled[0].shape[0], width), pooled[0].dtype) for width in out_lengths]
    moves = permutes.astype(jnp.int32)
    tensor_in, tensor_out, column_in, column_out = (
        (_OUTPUT, _INPUT, _TO, _FROM) if reverse else (_INPUT, _OUTPUT, _FROM, _TO)
    )
    begin_in = of_input[moves[:, tensor_in]] + moves[:, column_in]
    begin_out = of_output[moves[:, tensor_out]] + moves[:, column_out]
    everything = jnp.concatenate(pooled, axis=1)
    if reverse:
        # A column of a gradient belongs to one move; its target may get several.
        target, moved = _moved_columns(begin_out, begin_in, moves[:, _LENGTH], total_in)
        target = jnp.where(moved, target, total_out)
        zeros = jnp.zeros((everything.shape[0], total_out), everything.dtype)
        moved_columns = zeros.at[:, target].add(everything, mode="drop")
    else:
        source, moved = _moved_columns(begin_in, begin_out, moves[:, _LENGTH], total_out)
        moved_columns = _take_columns(everything, source, moved)
    ends = [sum(out_lengths[: i + 1]) for i in range(len(out_lengths))]
    return [moved_columns[:, end - width : end] for end, width in zip(ends, out_lengths, strict=True)]


def _pooled_columns(offsets: jax.Array, permute_K: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array]:
    if permute_K.shape[0] == 0 or offsets.shape[0] < 2:
        return jnp.zeros(num_columns, jnp.int32), jnp.zeros(num_columns, bool)
    begins = offsets[permute_K].astype(jnp.int32)
    widths = offsets[permute_K + 1].astype(jnp.int32) - begins
    ends = jnp.cumsum(widths, dtype=jnp.int32)
    shift = of_segments(begins - (ends - widths), jnp.append(ends - widths, ends[-1]), num_columns)
    column = jnp.arange(num_columns, dtype=jnp.int32)
    return column + shift, column < ends[-1]


def _moved_columns(
    from_P: jax.Array, to_P: jax.Array, length_P: jax.Array, num_columns: int
) -> tuple[jax.Array, jax.Array]:
    """Moves in any order: each adds its shift where it begins and takes it away where it ends."""
    ends = jnp.concatenate([to_P, to_P + length_P])
    changes = jnp.zeros((num_columns, 2), jnp.int32)
    both = jnp.stack([from_P - to_P, jnp.ones_like(from_P)], axis=1)
    changes = jnp.cumsum(changes.at[ends].add(jnp.concatenate([both, -both]), mode="drop"), axis=0, dtype=jnp.int32)
    return jnp.arange(num_columns, dtype=jnp.int32) + changes[:, 0], changes[:, 1] > 0


def _take_columns(pooled_BD: jax.Array, source: jax.Array, inside: jax.Array) -> jax.Array:
    columns = pooled_BD.shape[1]
    if columns == 0 or pooled_BD.shape[0] == 0:
        return jnp.zeros((pooled_BD.shape[0], source.shape[0]), pooled_BD.dtype)
    taken = jnp.take(pooled_BD, jnp.clip(source, 0, columns - 1), axis=1, mode="clip")
    return jnp.where(inside, taken, jnp.zeros((), pooled_BD.dtype))
