"""What a recipe's sections [model] and [tables] say. Plain Python: the planner reads a recipe without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Model name -> the keys of [model] it uses, with their defaults.
MODEL_KEYS: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_hidden_sizes": [64], "over_hidden_sizes": [128, 64]},
    "dlrm_dcn": {
        "dense_hidden_sizes": [64],
        "over_hidden_sizes": [128, 64],
        "dcn_num_layers": 3,
        "dcn_low_rank_dim": 32,
    },
    "deepfm": {"hidden_layer_size": 64, "deep_fm_dimension": 64},
}
FACTORY_KEYS: dict[str, Any] = {"options": {}}

Pooling = Literal["sum", "mean", "none"]
TableDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and its sizes. A key that the model does not use is an error; one left out gets its default.

    Args:
        name: `dlrm`, `dlrm_dcn`, `deepfm` (the models of `torchrec.models`), or `module:factory`, a function that is
            called as `factory(tables, schema, **options)` with the `EmbeddingBagConfig` list and the Schema, and
            returns a module whose `forward(dense, kjt)` gives logits `[B]` or `[B, 1]`.
        dense_hidden_sizes: hidden layers of the dense (bottom) MLP; a last layer of `embedding_dim` is added.
        over_hidden_sizes: hidden layers of the over (top) MLP; a last layer of 1 is added.
        dcn_num_layers: cross layers of `dlrm_dcn`.
        dcn_low_rank_dim: rank of each cross layer of `dlrm_dcn`.
        hidden_layer_size: hidden layer of the dense MLP of `deepfm`.
        deep_fm_dimension: output size of the deep part of `deepfm`.
        options: keyword arguments for `module:factory`.
    """

    name: str = "dlrm"
    dense_hidden_sizes: list[int] | None = None
    over_hidden_sizes: list[int] | None = None
    dcn_num_layers: int | None = None
    dcn_low_rank_dim: int | None = None
    hidden_layer_size: int | None = None
    deep_fm_dimension: int | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if ":" in self.name:
            used = FACTORY_KEYS
        elif self.name in MODEL_KEYS:
            used = MODEL_KEYS[self.name]
        else:
            raise ValueError(
                f"no model {self.name!r}; choose {', '.join(MODEL_KEYS)}, or write module:factory for your own"
            )
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            if key == "name":
                continue
            if value is None and key in used:
                object.__setattr__(self, key, used[key])
            elif value is not None and key not in used:
                raise ValueError(f"{key} is not used by the model {self.name!r}; it uses {', '.join(used)}")
            elif value is not None and key != "options":
                sizes = value if isinstance(value, list) else [value]
                if any(size < 1 for size in sizes):
                    raise ValueError(f"{key} = {value}: sizes must be 1 or more")
        if self.name.startswith("dlrm") and not self.over_hidden_sizes:
            raise ValueError("over_hidden_sizes is empty; DLRM's over MLP needs one hidden layer or more")


@dataclass(frozen=True)
class TableOverride:
    """What one table has otherwise than [tables] says.

    Args:
        embedding_dim: columns; None for the value of [tables].
        pooling: `sum`, `mean` or `none`; None for the value of [tables].
        dtype: `float32`, `bfloat16` or `float16`; None for the value of [tables].
    """

    embedding_dim: int | None = None
    pooling: Pooling | None = None
    dtype: TableDtype | None = None

    def __post_init__(self) -> None:
        if self.embedding_dim is not None and self.embedding_dim < 1:
            raise ValueError(f"embedding_dim = {self.embedding_dim}: must be 1 or more")


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables and the optimizer that runs in their backward pass. Row counts come from the schema.

    Args:
        embedding_dim: columns of a table.
        pooling: `sum` or `mean` over the ids of a bag; `none` for tables of sequences, a vector an id, of a
            `module:factory` that makes an `EmbeddingCollection`. It then tells the planner.
        dtype: storage of the weights, `float32`, `bfloat16` or `float16`; optimizer state is float32.
        optimizer: `row_wise_adagrad`, `adagrad`, `sgd`, `adam` or `row_wise_adam` (one second moment a row).
        learning_rate: of the tables, before the schedule's factor.
        eps: added to the root of the Adagrad sum or of Adam's second moment.
        betas: decay of Adam's two moments.
        weight_decay: on the rows touched.
        decoupled_weight_decay: weight decay acts on the row (AdamW), not on the gradient (L2).
        max_gradient_norm: longest gradient of a row, above 0; 0 for no limit.
        rounding_seed: rounds rows of bfloat16 tables stochastically; -1 rounds to nearest.
        overrides: per table name.
    """

    embedding_dim: int = 16
    pooling: Pooling = "sum"
    dtype: TableDtype = "float32"
    optimizer: Literal["row_wise_adagrad", "adagrad", "sgd", "adam", "row_wise_adam"] = "row_wise_adagrad"
    learning_rate: float = 0.05
    eps: float = 1e-8
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    max_gradient_norm: float = 0.0
    rounding_seed: int = -1
    overrides: dict[str, TableOverride] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ValueError(f"embedding_dim = {self.embedding_dim}: must be 1 or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate = {self.learning_rate}: must be above 0")
        if not self.eps > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"eps = {self.eps} must be above 0, weight_decay = {self.weight_decay} must not be negative"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: must be two numbers of at least 0 and below 1")
        if not 0 <= self.max_gradient_norm < float("inf"):
            raise ValueError(f"max_gradient_norm = {self.max_gradient_norm}: must be above 0, or 0 for no limit")
        if not -1 <= self.rounding_seed < 2**31:
            raise ValueError(f"rounding_seed = {self.rounding_seed}: must lie between 0 and 2^31 - 1, or be -1")
