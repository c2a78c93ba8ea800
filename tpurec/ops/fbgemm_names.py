"""`torch.ops.fbgemm.*` on `tpu` tensors, so that TorchRec's own code runs there unchanged.

Each name does what FBGEMM 1.8's CPU kernel does, by a `tpurec::` op. It differs in this: more dtypes are taken (int64
permutations, int32 with int64); a row, bag or column that is not there is empty instead of a read behind the end of
memory; what a size argument leaves over is -1 in integers and 0 in floats instead of what was in memory.

Nothing data-sized moves to the host. Where a name leaves the size of its result to the data (no
`permuted_lengths_sum`, `total_L`, `selected_lengths_sum`), one number is read from the device, as on a GPU;
`fbgemm_host.scalar_reads()` counts these. TorchRec gives the sizes wherever it has them.
"""

from __future__ import annotations

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 - registers torch.ops.fbgemm
import torch

from tpurec.ops import fbgemm_dense, fbgemm_products, fbgemm_rows, fbgemm_sparse

_library: torch.library.Library | None = None


def register() -> None:
    """Register the names for the `tpu` key; a second call does nothing."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("fbgemm", "IMPL")
    for name, function in NAMES.items():
        _library.impl(name, function, "PrivateUse1")
    for name, function in DIFFERENTIABLE.items():
        # FBGEMM has no autograd kernel for these that another device could use, or one that is wrong where rows
        # repeat: ours are made of differentiable ops.
        _library.impl(name, function, "PrivateUse1")
        _library.impl(name, function, "AutogradPrivateUse1")


NAMES = {
    "asynchronous_complete_cumsum": fbgemm_sparse.complete_cumsum,
    "asynchronous_batched_complete_cumsum": fbgemm_sparse.complete_cumsum,
    "asynchronous_inclusive_cumsum": fbgemm_sparse.inclusive_cumsum,
    "asynchronous_exclusive_cumsum": fbgemm_sparse.exclusive_cumsum,
    "offsets_range": fbgemm_sparse.offsets_range,
    "lengths_range": fbgemm_sparse.lengths_range,
    "repeat_arange": fbgemm_sparse.lengths_range,
    "expand_into_jagged_permute": fbgemm_sparse.expand,
    "invert_permute": fbgemm_sparse.invert,
    "block_bucketize_sparse_features": fbgemm_sparse.bucketize,
    "block_bucketize_sparse_features_inference": fbgemm_sparse.bucketize_with_mapping,
    "block_bucketize_sparse_features_2d_weights": fbgemm_sparse.bucketize_2d_weights,
    "bounds_check_indices": fbgemm_sparse.bounds_check,
    "jagged_unique_indices": fbgemm_rows.jagged_unique_indices,
    "jagged_index_select_2d_forward_v2": fbgemm_rows.jagged_index_select_2d,
    "jagged_index_add_2d_forward_v2": fbgemm_rows.jagged_index_add_2d,
    "jagged_to_padded_dense_forward": fbgemm_dense.to_padded_dense,
    "jagged_to_padded_dense_backward": fbgemm_dense.to_padded_dense_gradient,
    "dense_to_jagged_forward": fbgemm_dense.to_jagged,
    "jagged_dense_elementwise_add_jagged_output": fbgemm_dense.jagged_dense_add_jagged,
    "jagged_dense_dense_elementwise_add_jagged_output_forward": fbgemm_dense.jagged_dense_dense_add,
    "jagged_dense_elementwise_mul_forward": fbgemm_dense.jagged_dense_multiply,
    "jagged_dense_elementwise_mul_backward": fbgemm_dense.jagged_dense_multiply_gradient,
    "jagged_softmax_forward": fbgemm_products.softmax,
    "jagged_softmax_backward": fbgemm_products.softmax_gradient,
    "jagged_dense_bmm_forward": fbgemm_products.times_dense,
    "jagged_jagged_bmm_forward": fbgemm_products.times_jagged,
    "batched_dense_vec_jagged_2d_mul_forward": fbgemm_products.vector_times_jagged,
    "batched_dense_vec_jagged_2d_mul_backward": fbgemm_products.vector_times_jagged_gradient,
    "permute_multi_embedding_function": fbgemm_dense.permute_multi,
    "kt_regroup_arguments": fbgemm_dense.regroup_arguments,
}
DIFFERENTIABLE = {
    "segment_sum_csr": fbgemm_sparse.segment_sum_csr,
    "permute_1D_sparse_data": fbgemm_sparse.permute_1d,
    "permute_2D_sparse_data": fbgemm_sparse.permute_2d,
    "permute_2D_sparse_data_input1D": fbgemm_sparse.permute_2d_input1d,
    "permute_sparse_data": fbgemm_sparse.permute_2d,
    "permute_sparse_features": fbgemm_sparse.permute_2d,
    "keyed_jagged_index_select_dim1": fbgemm_rows.keyed_index_select,
    "group_index_select_dim0": fbgemm_rows.group_index_select,
    "batch_index_select_dim0": fbgemm_rows.batch_index_select,
    "jagged_dense_elementwise_add": fbgemm_dense.jagged_dense_add,
    "permute_pooled_embs": fbgemm_dense.permute_pooled,
    "permute_pooled_embs_split": fbgemm_dense.permute_pooled,
    "permute_pooled_embs_auto_grad": fbgemm_dense.permute_pooled,
    "permute_pooled_embs_auto_grad_split": fbgemm_dense.permute_pooled,
    "permute_duplicate_pooled_embs": fbgemm_dense.permute_duplicate_pooled,
    "permute_duplicate_pooled_embs_split": fbgemm_dense.permute_duplicate_pooled,
    "permute_duplicate_pooled_embs_auto_grad": fbgemm_dense.permute_duplicate_pooled,
    "permute_duplicate_pooled_embs_auto_grad_split": fbgemm_dense.permute_duplicate_pooled,
    "regroup_keyed_tensor": fbgemm_dense.regroup,
}
