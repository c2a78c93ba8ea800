"""Schema, transforms, hash, id policy and packing: one implementation for training, offline scoring and serving.

NumPy and Arrow only: reader processes and the server's request path need no torch.
"""

from tpurec.features.columns import Columns, Counts, SparseColumn
from tpurec.features.feature_specs import DenseFeature, LabelColumn, SparseFeature, TextInput
from tpurec.features.packing import Ladder, PackedBatch, PackedFeature, pack
from tpurec.features.problems import Problem
from tpurec.features.rows import ParsedRows, RowError, columns_from_rows, table_from_rows
from tpurec.features.schema import Schema, shipped_schemas
from tpurec.features.storage import to_storage
from tpurec.features.transform import Transformer

__all__ = [
    "Columns",
    "Counts",
    "DenseFeature",
    "LabelColumn",
    "Ladder",
    "PackedBatch",
    "PackedFeature",
    "ParsedRows",
    "Problem",
    "RowError",
    "Schema",
    "SparseColumn",
    "SparseFeature",
    "TextInput",
    "Transformer",
    "columns_from_rows",
    "pack",
    "shipped_schemas",
    "table_from_rows",
    "to_storage",
]
