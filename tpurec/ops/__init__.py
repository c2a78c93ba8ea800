"""Torch custom ops `tpurec::...`: schema, CPU and fake implementation, autograd; `_tpu.py` binds the TPU.

The jagged ops are in modules of their own (`jagged_*.py`, `pooled_permute.py`); `fbgemm_names.py` gives them FBGEMM's
names on the TPU.
"""

from tpurec.ops.embedding_bag import embedding_bag, embedding_bag_weights_grad
from tpurec.ops.embedding_update import embedding_update_
from tpurec.ops.sequence_gather import sequence_gather

__all__ = ["embedding_bag", "embedding_bag_weights_grad", "embedding_update_", "sequence_gather"]
