"""Which JAX function runs which jagged op on a TPU. How they are bound: `_tpu_binding.py`."""

from __future__ import annotations

from collections.abc import Callable

from tpurec.kernels import jagged_bounds as bounds_kernels
from tpurec.kernels import jagged_bucketize as bucketize_kernels
from tpurec.kernels import jagged_dense as dense_kernels
from tpurec.kernels import jagged_permute as permute_kernels
from tpurec.kernels import jagged_positions as position_kernels
from tpurec.kernels import jagged_segments as segment_kernels
from tpurec.kernels import jagged_unique as unique_kernels
from tpurec.kernels import pooled_permute as pooled_kernels
from tpurec.kernels import row_blocks as block_kernels
from tpurec.ops import (
    jagged_bounds,
    jagged_bucketize,
    jagged_dense,
    jagged_offsets,
    jagged_permute,
    jagged_segments,
    jagged_unique,
    pooled_permute,
    row_blocks,
)
from tpurec.ops._tpu_binding import Choice, bind_op

IMPLEMENTATIONS = (
    (jagged_offsets.complete_cumsum, position_kernels.complete_cumsum),
    (jagged_offsets.offsets_range, position_kernels.offsets_range),
    (jagged_permute.permute_jagged, permute_kernels.permute_jagged),
    (jagged_permute.permute_jagged_grad, permute_kernels.permute_jagged_gradient),
    (jagged_permute.expand_permute, permute_kernels.expand_permute),
    (jagged_permute.invert_permute, permute_kernels.invert_permute),
    (jagged_bucketize.block_bucketize, bucketize_kernels.block_bucketize),
    (jagged_dense.jagged_to_padded_dense, dense_kernels.jagged_to_padded_dense),
    (jagged_dense.dense_to_jagged, dense_kernels.dense_to_jagged),
    (jagged_dense.jagged_dense_add, dense_kernels.jagged_dense_add),
    (jagged_dense.jagged_dense_multiply, dense_kernels.jagged_dense_multiply),
    (jagged_segments.segment_sum, segment_kernels.segment_sum),
    (jagged_segments.segment_mean, segment_kernels.segment_mean),
    (jagged_segments.segment_grad, segment_kernels.segment_gradient),
    (pooled_permute.permute_pooled, pooled_kernels.permute_pooled),
    (pooled_permute.permute_pooled_grad, pooled_kernels.permute_pooled_gradient),
    (pooled_permute.permute_multi, pooled_kernels.permute_multi),
    (jagged_bounds.check_ids, bounds_kernels.check_ids),
    (jagged_bounds.fix_bounds, bounds_kernels.fix_bounds),
    (jagged_unique.unique_ids, unique_kernels.unique_ids),
    (row_blocks.select_rows, block_kernels.select_rows),
    (row_blocks.select_rows_grad, block_kernels.select_rows_gradient),
)


def bind(choice: Callable[[], Choice]) -> None:
    """Register the jagged ops for the `tpu` device.

    Args:
        choice: as of `bind_op`.
    """
    for op, function in IMPLEMENTATIONS:
        # Ids, lengths and offsets are int64 in TorchRec, which jax only takes in its 64-bit mode.
        bind_op(op, function, choice, wide=True)
