"""Schema, transforms, hash, id policy and packing: one implementation for training, offline scoring and serving.

NumPy and Arrow only: reader processes and the server's request path need no torch.
"""

from tpurec.features.columns import Columns, Counts, SparseColumn
from tpurec.features.packing import Ladder, PackedBatch, PackedFeature, pack
from tpurec.features.schema import DenseFeature, LabelColumn, Schema, SparseFeature, TextInput, shipped_schemas
from tpurec.features.transform import Problem, Transformer

__all__ = [
    "Columns",
    "Counts",
    "DenseFeature",
    "LabelColumn",
    "Ladder",
    "PackedBatch",
    "PackedFeature",
    "Problem",
    "Schema",
    "SparseColumn",
    "SparseFeature",
    "TextInput",
    "Transformer",
    "pack",
    "shipped_schemas",
]
