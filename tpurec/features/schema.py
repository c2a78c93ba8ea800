"""The schema: which columns are label, dense and sparse, and how raw values become model inputs.

A schema is written in TOML and travels with everything made from it: in Parquet metadata (key `tpurec.schema`), in a
RUN folder and in a bundle. It is frozen; `with_id_policy` returns a changed copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpurec.config import from_mapping, read_toml, to_toml
from tpurec.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"tpurec.schema"
VERSION = 1
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
        header: whether the first line names the columns; None: it does if it names every column of the schema.
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


@dataclass(frozen=True)
class Schema:
    """Label, dense and sparse features of a data set; the order of features is the order of model inputs.

    Args:
        name: of the data set.
        label: the label column; None for data that is only scored.
        dense: dense features; column j of `Columns.dense` is `dense[j]`.
        sparse: sparse features.
        id_policy: what happens to an id that has no row (out of range, negative, malformed, not in the vocabulary):
            `error`, `skip` (the id and its weight are left out) or `hash` (a hash of the id chooses the row).
        keys: columns that are carried to the scores.
        input: how text files look.
        hash: name of the hash function, see hashing.py.
        version: of this format.
    """

    name: str
    label: LabelColumn | None = None
    dense: tuple[DenseFeature, ...] = ()
    sparse: tuple[SparseFeature, ...] = ()
    id_policy: IdPolicy = "error"
    keys: tuple[str, ...] = ()
    input: TextInput = TextInput()
    hash: Literal["mix64"] = "mix64"
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the schema format; this software reads version {VERSION}")
        if not self.dense and not self.sparse:
            raise ValueError("the schema has no feature")
        _refuse_twice("feature", [f.name for f in (*self.dense, *self.sparse)])
        weights = [f.weights for f in self.sparse if f.weights]
        ids = {f.column for f in self.sparse}
        for column in weights:
            if column in ids:
                raise ValueError(f"column {column!r} is used both as ids and as weights")
        _check_tables(self)
        _check_hash_policy(self)

    # ---- reading and writing -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file, or take one that ships with the product by name.

        Args:
            path: a TOML file, or a name of `shipped_schemas()` such as `criteo` if no such file exists.

        Returns:
            The schema, with vocabulary files read in.

        Raises:
            ConfigError: no such file or name, or a bad value (with its key).
        """
        file = Path(path)
        if not file.exists() and str(path) in shipped_schemas():
            text = (resources.files("tpurec.features") / "schemas" / f"{path}.toml").read_text(encoding="utf-8")
            return cls.from_text(text, where=f"schema {path}")
        if not file.exists():
            raise ConfigError(
                f"{path}: no such schema file.", f"Give a TOML file or one of: {', '.join(shipped_schemas())}."
            )
        mapping = read_toml(file)
        _read_vocabularies(mapping, file)
        return from_mapping(cls, mapping, str(file))

    @classmethod
    def from_text(cls, text: str, where: str = "schema") -> Schema:
        """Parse TOML text as written by `to_text`.

        Args:
            text: TOML.
            where: what the text is, for error texts.

        Returns:
            The schema.

        Raises:
            ConfigError: not TOML, or a bad value (with its key).
        """
        import tomllib

        try:
            mapping = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where}: not valid TOML: {error}.") from None
        return from_mapping(cls, mapping, where)

    def to_text(self) -> str:
        """Write the schema as TOML; values that equal their default are left out.

        Returns:
            Text that `from_text` reads back to an equal schema.
        """
        return to_toml(_without_defaults(self))

    @classmethod
    def from_arrow(cls, schema: pa.Schema, source: str) -> Schema:
        """Take the schema out of Arrow metadata.

        Args:
            schema: an Arrow schema written by `with_metadata`.
            source: file name for the error text.

        Returns:
            The schema.

        Raises:
            DataError: the metadata has no tpurec schema.
        """
        text = (schema.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise DataError(
                f"{source}: no tpurec schema in the file's metadata.",
                "Convert it with `tpurec data convert IN OUT --schema S`.",
            )
        return cls.from_text(text.decode(), where=source)

    @classmethod
    def from_parquet(cls, path: str | Path) -> Schema:
        """Read the schema that travels in a Parquet file.

        Args:
            path: a Parquet file, or a folder: its first `*.parquet` by name.

        Returns:
            The schema.

        Raises:
            DataError: no Parquet file there, or one without a tpurec schema.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = Path(path)
        if file.is_dir():
            files = sorted(file.glob("*.parquet"))
            if not files:
                raise DataError(f"{path}: no *.parquet file in this folder.", "Check the path.")
            file = files[0]
        try:
            return cls.from_arrow(pq.read_schema(file), str(file))
        except FileNotFoundError:
            raise DataError(f"{path}: no such file.", "Check the path.") from None
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: not a Parquet file: {error}.") from None

    def with_metadata(self, schema: pa.Schema) -> pa.Schema:
        """Put this schema into the metadata of an Arrow schema.

        Args:
            schema: any Arrow schema; other metadata is kept.

        Returns:
            The Arrow schema with the key `tpurec.schema`.
        """
        return schema.with_metadata({**(schema.metadata or {}), METADATA_KEY: self.to_text().encode()})

    # ---- what follows from it ------------------------------------------------------------------------------------

    def arrow_schema(self, labels: bool = True) -> pa.Schema:
        """Storage types of training Parquet: raw values, not transformed ones.

        Args:
            labels: include the label column.

        Returns:
            Label and dense float32; hex and text string, integer int64, lists of these where multi-valued; weights
            float32 or list<float32>; all nullable; the tpurec schema in the metadata. Key columns are not included:
            they keep the type they come with.
        """
        import pyarrow as pa

        fields: dict[str, pa.DataType] = {}
        if labels and self.label is not None:
            fields[self.label.column] = pa.float32()
        for dense in self.dense:
            fields.setdefault(dense.column, pa.float32())
        for sparse in self.sparse:
            one = pa.int64() if sparse.kind == "integer" else pa.string()
            fields[sparse.column] = pa.list_(one) if sparse.multi_valued else one
            if sparse.weights:
                fields[sparse.weights] = pa.list_(pa.float32()) if sparse.multi_valued else pa.float32()
        return self.with_metadata(pa.schema([pa.field(name, type_) for name, type_ in fields.items()]))

    def columns(self, labels: bool = True, keys: bool = False) -> list[str]:
        """Names of the columns that are read, each once; a reader needs no others.

        Args:
            labels: include the label column.
            keys: include the key columns.

        Returns:
            Column names: label, dense, sparse (with weights), keys.
        """
        names = [self.label.column] if labels and self.label is not None else []
        names += [feature.column for feature in self.dense]
        for feature in self.sparse:
            names += [feature.column, feature.weights] if feature.weights else [feature.column]
        return list(dict.fromkeys(names + (list(self.keys) if keys else [])))

    @property
    def tables(self) -> dict[str, int]:
        """Table name to num_embeddings, in order of first use."""
        return {feature.table: feature.num_embeddings for feature in self.sparse}

    def policy_of(self, feature: SparseFeature) -> IdPolicy:
        """The id policy that holds for a feature.

        Args:
            feature: a sparse feature of this schema.

        Returns:
            Its own policy, or else the schema's.
        """
        return feature.id_policy or self.id_policy

    def with_id_policy(self, policy: IdPolicy | None) -> Schema:
        """The schema under a recipe's `data.id_policy`.

        Args:
            policy: overrides the policy of the schema and of every feature; None changes nothing.

        Returns:
            A changed copy.

        Raises:
            ConfigError: not a policy, or `hash` where a vocabulary leaves no row to hash to.
        """
        if policy is None:
            return self
        if policy not in ("error", "skip", "hash"):
            raise ConfigError(f"id_policy = {policy!r}: not a policy.", "Use error, skip or hash.")
        sparse = tuple(dataclasses.replace(feature, id_policy=None) for feature in self.sparse)
        try:
            return dataclasses.replace(self, sparse=sparse, id_policy=policy)
        except ValueError as error:
            raise ConfigError(f"id_policy = {policy!r}: {error}.") from None

    def fingerprint(self) -> str:
        """Identify what decides the numbers: label, features, hash and policies (not names of files or key columns).

        Returns:
            16 hex digits, equal for schemas that transform every row alike.
        """
        plain = dataclasses.asdict(self)
        decides = {key: plain[key] for key in ("label", "dense", "sparse", "hash")}
        for feature, entry in zip(self.sparse, decides["sparse"], strict=True):
            entry["id_policy"] = self.policy_of(feature)
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def shipped_schemas() -> list[str]:
    """Names of the schemas that ship with the product.

    Returns:
        Names for `Schema.load`, sorted.
    """
    folder = resources.files("tpurec.features") / "schemas"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _default_to_name(feature: Any, field: str) -> None:
    if not feature.name:
        raise ValueError("a feature needs a name")
    if not getattr(feature, field):
        object.__setattr__(feature, field, feature.name)


def _refuse_twice(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} is there twice")


def _check_vocabulary(feature: SparseFeature, who: str) -> None:
    wanted = int if feature.kind == "integer" else str
    for entry in feature.vocabulary:
        if type(entry) is not wanted:
            raise ValueError(f"{who}: vocabulary entry {entry!r} must be {'a number' if wanted is int else 'text'}")
    if len(set(feature.vocabulary)) != len(feature.vocabulary):
        raise ValueError(f"{who}: the vocabulary has an entry twice")


def _check_tables(schema: Schema) -> None:
    """Features that share a table must send one id to one row."""
    first: dict[str, SparseFeature] = {}
    for feature in schema.sparse:
        other = first.setdefault(feature.table, feature)
        for field in ("num_embeddings", "kind", "transform", "salt", "vocabulary"):
            mine, its = getattr(feature, field), getattr(other, field)
            if mine != its:
                shown = "" if field == "vocabulary" else f" ({its!r} and {mine!r})"
                raise ValueError(
                    f"features {other.name!r} and {feature.name!r} share table {feature.table!r} "
                    f"but differ in {field}{shown}: the same id would have two rows"
                )


def _check_hash_policy(schema: Schema) -> None:
    for feature in schema.sparse:
        full = feature.transform == "vocabulary" and len(feature.vocabulary) == feature.num_embeddings
        if full and schema.policy_of(feature) == "hash":
            raise ValueError(
                f"sparse feature {feature.name!r}: policy 'hash' sends ids that are not in the vocabulary to rows "
                f"behind it, and its {len(feature.vocabulary)} entries fill all num_embeddings; raise num_embeddings"
            )


def _read_vocabularies(mapping: dict[str, Any], schema_file: Path) -> None:
    """A hand-written schema may name a vocabulary file; from here on the entries travel inside the schema."""
    from tpurec.features.vocabulary import read_vocabulary

    features = mapping.get("sparse", [])
    for feature in features if isinstance(features, list) else []:
        if isinstance(feature, dict) and isinstance(feature.get("vocabulary"), str):
            feature["vocabulary"] = list(read_vocabulary(schema_file.parent / feature["vocabulary"]))


def _without_defaults(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            default = field.default
            if field.name in ("column", "table") and hasattr(value, "name"):
                default = value.name
            if item != default or field.name == "version":
                kept[field.name] = _without_defaults(item)
        return kept
    if isinstance(value, Mapping):
        return {key: _without_defaults(item) for key, item in value.items()}
    return [_without_defaults(item) for item in value] if isinstance(value, tuple) else value
