"""What a schema says about one column: label, dense feature, sparse feature, and how text files look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Rows are int32 everywhere behind the transform.
MAX_NUM_EMBEDDINGS = 2**31 - 1

IdPolicy = Literal["error", "skip", "hash"]


@dataclass(frozen=True)
class LabelColumn:
    """The column that holds the label.

    Args:
        column: column name.
        threshold: if given, label = 1 where value >= threshold, else 0; otherwise values must lie in [0, 1].
        missing: a number that stands for a missing label (such as -1); None: only blanks and NaN are missing.
    """

    column: str
    threshold: float | None = None
    missing: float | None = None


@dataclass(frozen=True)
class DenseFeature:
    """One number per example.

    The rule, in this order: the raw value is rounded to float32; a blank (null, NaN, empty field) becomes `blank`; a
    negative value follows `negative`; then the transform is computed in float64 and rounded to float32.

    Args:
        name: feature name.
        column: column name; by default the feature name.
        transform: `log1p`: sign(x) * log(1 + |x|); `identity`: x; `standardize`: (x - mean) / std.
        blank: the raw value that stands in for a blank.
        negative: `keep` (log1p is then odd: a sign survives), `clip` to 0, or `blank` (treated as a blank).
        mean: of the raw values, for `standardize`.
        std: of the raw values, for `standardize`; > 0.
    """

    name: str
    column: str = ""
    transform: Literal["log1p", "identity", "standardize"] = "log1p"
    blank: float = 0.0
    negative: Literal["keep", "clip", "blank"] = "keep"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _default_to_name(self, "column")
        if not self.std > 0:
            raise ValueError(f"std of dense feature {self.name!r} must be > 0")
        if self.transform != "standardize" and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError(f"mean and std of dense feature {self.name!r} belong to transform = 'standardize'")


@dataclass(frozen=True)
class SparseFeature:
    """Zero, one or several ids per example.

    Args:
        name: feature name.
        num_embeddings: rows of the table; a hashed id is only defined together with it.
        column: column name; by default the feature name.
        kind: how an id is written: `hex` (1 to 16 hex digits), `integer` (int64) or `text`.
        transform: `hash` (see hashing.py), `vocabulary` (the entry's position) or `identity` (the id is the row).
        table: table name; by default the feature name. Features that name the same table share it.
        salt: of the hash, 0 <= salt < 2**64.
        multi_valued: several ids per example; the column is a list, or text with `separator`.
        separator: splits the text of a multi-valued column; empty pieces are blanks.
        weights: column with one weight per id; a list where the ids are a list.
        vocabulary: entries in row order, for `vocabulary`; in a TOML file also the path of a vocabulary file, relative
            to the schema file, which is then read in.
        id_policy: overrides the schema's policy for this feature.
    """

    name: str
    num_embeddings: int
    column: str = ""
    kind: Literal["hex", "integer", "text"] = "text"
    transform: Literal["hash", "vocabulary", "identity"] = "hash"
    table: str = ""
    salt: int = 0
    multi_valued: bool = False
    separator: str = ""
    weights: str = ""
    vocabulary: tuple[str, ...] | tuple[int, ...] = ()
    id_policy: IdPolicy | None = None

    def __post_init__(self) -> None:
        _default_to_name(self, "column")
        _default_to_name(self, "table")
        who = f"sparse feature {self.name!r}"
        if not 1 <= self.num_embeddings <= MAX_NUM_EMBEDDINGS:
            raise ValueError(
                f"num_embeddings of {who} is {self.num_embeddings}, it must be from 1 to {MAX_NUM_EMBEDDINGS}"
            )
        if not 0 <= self.salt < 2**64:
            raise ValueError(f"salt of {who} is {self.salt}, it must be from 0 to 2**64 - 1")
        if self.separator and not self.multi_valued:
            raise ValueError(f"{who} has a separator: set multi_valued = true")
        if self.transform == "identity" and self.kind == "text":
            raise ValueError(f"{who}: transform = 'identity' needs kind = 'integer' or 'hex', text is no row number")
        if (self.transform == "vocabulary") != bool(self.vocabulary):
            raise ValueError(f"{who}: transform = 'vocabulary' and a non-empty vocabulary go together")
        if len(self.vocabulary) > self.num_embeddings:
            raise ValueError(
                f"{who}: the vocabulary has {len(self.vocabulary)} entries, num_embeddings is {self.num_embeddings}"
            )
        _check_vocabulary(self, who)


@dataclass(frozen=True)
class TextInput:
    """How text files (TSV, CSV) of this data look; Parquet files need none of it.

    Args:
        columns: column order of files without a header line.
        header: whether the first line names the columns; None: it does if it names more than half of the schema's.
        delimiter: one character; None: tab for .tsv and .txt, comma for .csv.
        short_rows: a row with fewer fields than columns: `reject`, or `blank`: the missing last fields are blanks.
        min_fields: with `blank`: rows with fewer fields than this are rejected.
    """

    columns: tuple[str, ...] = ()
    header: bool | None = None
    delimiter: str | None = None
    short_rows: Literal["reject", "blank"] = "reject"
    min_fields: int = 1

    def __post_init__(self) -> None:
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ValueError(f"input.delimiter is {self.delimiter!r}, it must be one character")
        if len(set(self.columns)) != len(self.columns):
            raise ValueError("input.columns names a column twice")


def _default_to_name(feature: Any, field: str) -> None:
    if not feature.name:
        raise ValueError("a feature needs a name")
    if not getattr(feature, field):
        object.__setattr__(feature, field, feature.name)


def _check_vocabulary(feature: SparseFeature, who: str) -> None:
    wanted = int if feature.kind == "integer" else str
    for entry in feature.vocabulary:
        if type(entry) is not wanted:
            raise ValueError(f"{who}: vocabulary entry {entry!r} must be {'a number' if wanted is int else 'text'}")
    if len(set(feature.vocabulary)) != len(feature.vocabulary):
        raise ValueError(f"{who}: the vocabulary has an entry twice")
