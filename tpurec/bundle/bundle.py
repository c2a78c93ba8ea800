"""A loaded bundle: raw rows in, scores out; the same numbers as training's evaluation, offline and online."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tpurec.bundle.manifest import EXAMPLES, RECIPE, SCHEMA, BundleError, Manifest, check_files, read_manifest
from tpurec.bundle.weights import load_weights
from tpurec.config import from_mapping, read_toml
from tpurec.errors import TpurecError
from tpurec.features import Columns, Ladder, Schema, pack
from tpurec.features.transform import Transformer
from tpurec.models.config import ModelConfig, TablesConfig

if TYPE_CHECKING:
    from torch import nn

EXPECTED_SCORE = "tpurec.expected_score"
# Sums are taken in another order on other processors and in batches of other sizes; a wrong weight or transform shows
# in the first decimals.
EXAMPLE_TOLERANCE = 1e-5
BATCH_ROWS = 8192
# Nothing here is compiled for a shape, so ids are padded no further than to a multiple of 8.
_LADDER = Ladder((8,))


class Bundle:
    """A model that is ready to score raw rows. Make one with `Bundle.load`.

    Args:
        path: its folder.
        manifest: what it says about itself.
        schema: how raw rows become model inputs.
        model: `forward(dense, kjt) -> logits`, in evaluation mode.

    >>> bundle = Bundle.load("build/demo/bundle")        # doctest: +SKIP
    >>> bundle.score(pq.read_table("rows.parquet"))      # doctest: +SKIP
    array([0.031, 0.274, ...], dtype=float32)
    """

    def __init__(self, path: Path, manifest: Manifest, schema: Schema, model: nn.Module) -> None:
        self.path = path
        self.manifest = manifest
        self.schema = schema
        self.transformer = Transformer(schema)
        self._model = model

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Read a bundle; every file is compared with its checksum first, and nothing is unpickled.

        Args:
            path: the folder.

        Returns:
            The bundle.

        Raises:
            BundleError: not a bundle, another format version, or a file that is missing, damaged, or does not fit the
                others; names the file and what to do.
        """
        return cls._load(Path(path), None)

    @classmethod
    def reload(cls, path: str | Path, model: nn.Module) -> Bundle:
        """Read a bundle as `load` does, but into a model that is there already: no table is held twice.

        Args:
            path: the folder.
            model: of the bundle's structure; its weights are overwritten, and it goes into evaluation mode.

        Returns:
            The bundle.

        Raises:
            BundleError: as in `load`.
        """
        return cls._load(Path(path), model)

    @classmethod
    def _load(cls, path: Path, model: nn.Module | None) -> Bundle:
        manifest = read_manifest(path)
        check_files(path, manifest)
        schema = _read_schema(path, manifest)
        configs = _read_recipe(path)
        if model is None:
            model = _build(*configs, schema)
        load_weights(model, path, manifest)
        return cls(path, manifest, schema, model.eval())

    @property
    def version(self) -> str:
        """The model's version, 16 hex digits."""
        return self.manifest.version

    def score(self, table: pa.Table, source: str = "input") -> np.ndarray:
        """Score raw rows.

        Args:
            table: N rows with the columns of the schema's features; others are ignored.
            source: file name for error texts.

        Returns:
            float32 [N], probabilities.

        Raises:
            DataError: a column that is absent or of a wrong type, or a value that breaks the schema.
        """
        return self.predict(self.transformer(table, labels=False, source=source))

    def predict(self, columns: Columns, batch_rows: int = BATCH_ROWS) -> np.ndarray:
        """Score transformed rows.

        Args:
            columns: N rows from `transformer`.
            batch_rows: rows that the model sees at once; it bounds memory and has no effect on the scores beyond
                the rounding of float32 sums.

        Returns:
            float32 [N], probabilities.
        """
        import torch

        from tpurec.embeddings.jagged import to_torch

        scores = np.empty(len(columns), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(columns), batch_rows):
                rows = columns.slice(start, start + batch_rows)
                batch = to_torch(pack(rows, len(rows), _LADDER))
                scores[start : start + len(rows)] = torch.sigmoid(self._model(batch.dense, batch.features)).numpy()
        return scores

    def examples(self) -> pa.Table:
        """The raw example rows, with the column `tpurec.expected_score`.

        Returns:
            At least one row.
        """
        path = self.path / EXAMPLES
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise BundleError(f"{path}: not a Parquet file: {error}.", "Export the bundle again.") from None
        if EXPECTED_SCORE not in table.column_names or not len(table):
            raise BundleError(f"{path}: has no expected scores.", "Export the bundle again.")
        return table

    def check_examples(self) -> float:
        """Score the example rows and compare with what training's evaluation said: does this bundle work here?

        Returns:
            The largest difference.

        Raises:
            BundleError: a score differs by more than 1e-5; names the row and both scores.
        """
        table = self.examples()
        expected = table.column(EXPECTED_SCORE).to_numpy()
        try:
            scores = self.score(table, source=str(self.path / EXAMPLES))
        except TpurecError as error:
            raise BundleError(f"The bundle cannot score its own examples: {error.problem}", error.remedy) from None
        difference = np.abs(scores - expected)
        row = int(np.nanargmax(difference)) if np.isfinite(difference).any() else 0
        if not difference.max() <= EXAMPLE_TOLERANCE:  # also true where one is NaN
            row = int(np.flatnonzero(~(difference <= EXAMPLE_TOLERANCE))[0])
            raise BundleError(
                f"{self.path / EXAMPLES}: row {row} scores {scores[row]:.6f} here, {expected[row]:.6f} in training.",
                "This installation computes something else than the one that trained: compare `tpurec doctor` of both.",
            )
        return float(difference[row])


def _read_schema(path: Path, manifest: Manifest) -> Schema:
    file = path / SCHEMA
    try:
        schema = Schema.from_text(file.read_text(encoding="utf-8"), where=str(file))
    except (TpurecError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read: {error}", "Export the bundle again.") from None
    if schema.fingerprint() != manifest.schema_fingerprint:
        raise BundleError(
            f"{file}: fingerprint {schema.fingerprint()}, the manifest says {manifest.schema_fingerprint}.",
            "This version of tpurec reads the schema otherwise than the one that exported it; export the bundle again.",
        )
    return schema


def _read_recipe(path: Path) -> tuple[ModelConfig, TablesConfig]:
    file = path / RECIPE
    try:
        recipe = read_toml(file)
        model = from_mapping(ModelConfig, recipe.get("model", {}), f"{file} [model]")
        return model, from_mapping(TablesConfig, recipe.get("tables", {}), f"{file} [tables]")
    except TpurecError as error:
        raise BundleError(error.problem, error.remedy) from None


def _build(model: ModelConfig, tables: TablesConfig, schema: Schema) -> nn.Module:
    """The recipe's model; without an optimizer its tables have no state, and the lookup is that of training."""
    from tpurec.models import build_model

    try:
        return build_model(model, tables, schema)
    except TpurecError as error:
        raise BundleError(f"The bundle's model cannot be built: {error.problem}", error.remedy) from None
