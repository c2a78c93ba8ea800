"""The scoring bundle: weights, schema, preprocessing and the metrics at export, in one folder, without pickle.

BUNDLE/manifest.json           format version, model version, checksums of all other files, tables, metrics
BUNDLE/schema.toml             how raw rows become model inputs
BUNDLE/recipe.toml             the resolved recipe that the model was trained with
BUNDLE/dense.safetensors       every weight that is not a table
BUNDLE/tables/NAME.safetensors one table each, under the name `weight`
BUNDLE/examples.parquet        raw rows with the scores that training's evaluation gave them
"""

from tpurec.bundle.bundle import Bundle
from tpurec.bundle.manifest import BundleError, Manifest, read_manifest
from tpurec.bundle.write import write_bundle

__all__ = ["Bundle", "BundleError", "Manifest", "read_manifest", "write_bundle"]
