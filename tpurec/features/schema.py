"""The schema: which columns are label, dense and sparse, and how raw values become model inputs.

A schema is written in TOML and travels with everything made from it: in Parquet metadata (key `tpurec.schema`), in a
RUN folder and in a bundle. It is frozen; `with_id_policy` returns a changed copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import MISSING, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpurec.config import from_mapping, read_toml, to_toml
from tpurec.errors import ConfigError, DataError
from tpurec.features.feature_specs import DenseFeature, IdPolicy, LabelColumn, SparseFeature, TextInput

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"tpurec.schema"
VERSION = 1


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
    input: TextInput = field(default_factory=TextInput)
    hash: Literal["mix64"] = "mix64"
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the schema format; this software reads version {VERSION}")
        if not self.dense and not self.sparse:
            raise ValueError("the schema has no feature")
        _refuse_twice("feature", [f.name for f in (*self.dense, *self.sparse)])
        _storage_kinds(self)
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
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None) is not None:  # the system's, such as a lack of permission
                raise
            raise DataError(f"{file}: not a Parquet file: {str(error).rstrip('.')}.", "Is it complete?") from None

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

        types = {"number": pa.float32(), "integer": pa.int64(), "text": pa.string(), "weight": pa.float32()}
        fields = []
        for column, (kind, multi_valued) in _storage_kinds(self).items():
            if labels or self.label is None or column != self.label.column:
                fields.append(pa.field(column, pa.list_(types[kind]) if multi_valued else types[kind]))
        return self.with_metadata(pa.schema(fields))

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


def _refuse_twice(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} is there twice")


def _storage_kinds(schema: Schema) -> dict[str, tuple[str, bool]]:
    """Column to (number | integer | text | weight, multi_valued): a column that several features use has one type."""
    uses = [(schema.label.column, "number", False)] if schema.label is not None else []
    uses += [(dense.column, "number", False) for dense in schema.dense]
    for sparse in schema.sparse:
        uses.append((sparse.column, "integer" if sparse.kind == "integer" else "text", sparse.multi_valued))
        if sparse.weights:
            uses.append((sparse.weights, "weight", sparse.multi_valued))
    kinds: dict[str, tuple[str, bool]] = {}
    for column, *use in uses:
        before = kinds.setdefault(column, tuple(use))
        if {before, tuple(use)} == {("number", False), ("integer", False)}:
            kinds[column] = ("integer", False)  # such as an age: a number and an id
        elif before != tuple(use):
            shown = [("list of " if multi_valued else "") + kind for kind, multi_valued in (before, tuple(use))]
            raise ValueError(f"column {column!r} cannot be {shown[0]} for one feature and {shown[1]} for another")
    return kinds


def _check_tables(schema: Schema) -> None:
    """Features that share a table must send one id to one row."""
    first: dict[str, SparseFeature] = {}
    for feature in schema.sparse:
        other = first.setdefault(feature.table, feature)
        for key in ("num_embeddings", "kind", "transform", "salt", "vocabulary"):
            mine, its = getattr(feature, key), getattr(other, key)
            if mine != its:
                shown = "" if key == "vocabulary" else f" ({its!r} and {mine!r})"
                raise ValueError(
                    f"features {other.name!r} and {feature.name!r} share table {feature.table!r} "
                    f"but differ in {key}{shown}: the same id would have two rows"
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
    if isinstance(value, tuple):
        return [_without_defaults(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kept: dict[str, Any] = {}
    for spec in dataclasses.fields(value):
        item = getattr(value, spec.name)
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if spec.name in ("column", "table") and hasattr(value, "name"):
            default = value.name
        if item != default or spec.name == "version":
            kept[spec.name] = _without_defaults(item)
    return kept
