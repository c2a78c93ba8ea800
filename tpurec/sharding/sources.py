"""Where the planner's tables come from: a table list, a recipe, a RUN, a Parquet data set, or a TorchRec model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpurec.config import apply_overrides, from_mapping, read_toml
from tpurec.errors import ConfigError
from tpurec.models.factory import load_factory
from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.checkpoint_manifest import MANIFEST
from tpurec.sharding.config import ShardingConfig
from tpurec.sharding.measure import measure
from tpurec.sharding.tables import FeatureSpec, TableList, TableSpec, from_table_mapping, read_tables

if TYPE_CHECKING:
    from tpurec.features.schema import Schema
    from tpurec.models.config import ModelConfig, TablesConfig

RECIPE_SECTIONS = {"model", "data", "tables", "train", "device", "sharding", "checkpoint", "export"}


def read_source(
    source: str, overrides: Iterable[str] = (), embedding_dim: int | None = None, data: str | None = None
) -> TableList:
    """Read what stands at TABLES.

    Args:
        source: a table list (.toml, .json), a recipe (.toml), a RUN folder or one of its checkpoints, a folder or file
            of training Parquet (then `embedding_dim` is needed), or a TorchRec model as `module:factory`, a function
            without arguments that returns a module with embedding collections.
        overrides: `section.key=value`; for a model or Parquet `assumptions.NAME=value` only.
        embedding_dim: columns of the tables of a Parquet data set.
        data: training Parquet to measure ids per example and unique shares from; a Parquet source is always measured.

    Returns:
        Tables, assumptions (with the model's own dense part where it is known), batch size, and what was measured.

    Raises:
        ConfigError: nothing there that can be read so; the text says what is expected.
        DataError: the data cannot be measured.
    """
    if not source.strip():
        raise ConfigError(
            "TABLES is empty.", "Give a table list, recipe, RUN, checkpoint, Parquet data set or module:factory."
        )
    path = Path(source)
    overrides = list(overrides)
    recipe = recipe_path(source)
    is_data = recipe is None and (path.is_dir() or path.suffix == ".parquet")
    if embedding_dim is not None and not is_data:
        raise ConfigError(
            f"{source}: says itself how wide its tables are.",
            "Leave out --embedding-dim; it goes with a Parquet data set.",
        )
    if recipe is not None:
        found = _from_recipe(recipe, overrides, is_run=path.is_dir())
    elif is_data:
        changes = _assumed(overrides, source)
        found = _assume(_from_parquet(path, embedding_dim), changes)
        data = data or source
    elif path.suffix in (".toml", ".json"):
        found = _from_list(path, overrides)
    elif ":" in source and not path.exists():
        changes = _assumed(overrides, source)
        found = _assume(_from_model(source), changes)
    else:
        raise ConfigError(
            f"{source}: is no table list (.toml, .json), recipe, RUN, checkpoint, Parquet data set or module:factory.",
            "Check the path.",
        )
    if not data:
        return found
    tables, measured = measure(found.tables, data)
    return dataclasses.replace(found, tables=tables, measured=measured)


def _assumed(overrides: list[str], source: str) -> dict[str, Any]:
    """The assumptions among --set, which are all that it can change where there is no file of settings."""
    changes = apply_overrides({}, overrides)
    for override in overrides:
        if not override.strip().startswith("assumptions."):
            raise ConfigError(
                f"{source}: --set {override} has nothing to change there.", "Only --set assumptions.NAME=VALUE has."
            )
    return changes.get("assumptions", {})


def _assume(found: TableList, changes: dict[str, Any]) -> TableList:
    known = dataclasses.asdict(found.assumptions)
    return dataclasses.replace(found, assumptions=from_mapping(Assumptions, known | changes, "--set assumptions"))


def recipe_path(source: str) -> Path | None:
    """The recipe that stands at TABLES.

    Args:
        source: as of `read_source`.

    Returns:
        Its file: a recipe, or that of a RUN or of the RUN that a checkpoint is in; None if it is something else.

    Raises:
        ConfigError: a file that is no TOML, or a checkpoint outside of a RUN.
    """
    path = Path(source)
    if path.is_dir():
        if (path / "recipe.toml").is_file():
            return path / "recipe.toml"
        if not (path / MANIFEST).is_file():
            return None
        run = path.absolute().parent.parent
        if not (run / "recipe.toml").is_file():
            raise ConfigError(
                f"{source}: is a checkpoint outside of a RUN, and does not say which features look up in its tables.",
                "Give the recipe it was trained with, or a table list.",
            )
        return run / "recipe.toml"
    is_recipe = path.suffix == ".toml" and not isinstance(read_toml(path).get("tables"), list)
    return path if is_recipe else None


def _from_list(path: Path, overrides: list[str]) -> TableList:
    if not overrides:
        return read_tables(path)
    if path.suffix == ".json":
        raise ConfigError("--set changes a recipe or a TOML table list.", "Edit the JSON file instead.")
    return from_table_mapping(apply_overrides(read_toml(path), overrides), str(path))


def _from_recipe(path: Path, overrides: list[str], is_run: bool) -> TableList:
    from tpurec.features.schema import Schema
    from tpurec.models.config import ModelConfig, TablesConfig

    mapping = apply_overrides(read_toml(path), overrides)
    unknown = sorted(mapping.keys() - RECIPE_SECTIONS)
    if unknown or "data" not in mapping:
        problem = f"unknown section {unknown[0]!r}" if unknown else "neither a list [[tables]] nor a section [data]"
        raise ConfigError(
            f"{path}: {problem}.", "A table list has [[tables]] entries; a recipe has [model], [data], [tables], ..."
        )
    model = from_mapping(ModelConfig, mapping.get("model", {}), f"{path} [model]")
    tables = from_mapping(TablesConfig, mapping.get("tables", {}), f"{path} [tables]")
    kept = path.with_name("schema.toml")  # a RUN keeps its schema; its data may be elsewhere by now
    if is_run and kept.is_file() and not any(override.strip().startswith("data.") for override in overrides):
        schema = Schema.load(kept)
    else:
        schema = Schema.load(mapping["data"]["schema"]) if mapping["data"].get("schema") else _schema_of(mapping, path)
    batch_size = mapping.get("train", {}).get("batch_size")
    sharding = from_mapping(ShardingConfig, mapping.get("sharding", {}), f"{path} [sharding]")
    return recipe_tables(model, tables, sharding, schema, batch_size if isinstance(batch_size, int) else None)


def recipe_tables(
    model: ModelConfig, tables: TablesConfig, sharding: ShardingConfig, schema: Schema, batch_size: int | None
) -> TableList:
    """Put the sections of a recipe together to what the planner takes.

    Args:
        model: the section [model].
        tables: the section [tables].
        sharding: the section [sharding].
        schema: of the data.
        batch_size: rows of a global batch; None if the recipe does not say.

    Returns:
        Tables with their constraints, assumptions and batch size.

    Raises:
        ConfigError: an override or constraint that no table can have.
    """
    from tpurec.models.dense_size import dense_parameters
    from tpurec.models.tables import table_specs

    specs = table_specs(tables, schema)
    weighted = {feature.name for feature in schema.sparse if feature.weights}
    found = tuple(
        TableSpec(
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=spec.embedding_dim,
            features=tuple(FeatureSpec(name, weighted=name in weighted) for name in spec.features),
            dtype=spec.dtype,
            pooling=spec.pooling,
            optimizer=spec.optimizer,
        )
        for spec in specs
    )
    known: dict[str, Any] = {"dense_input_bytes": 4 * len(schema.dense) + 5}  # label and mask besides
    parameters = dense_parameters(model, len(schema.dense), len(schema.sparse), specs[0].embedding_dim) if specs else 0
    if parameters is not None:
        known["dense_parameters"] = parameters
    return TableList(sharding.constrain(found), sharding.assume(known), batch_size)


def _schema_of(mapping: dict[str, Any], path: Path) -> Any:
    from tpurec.features.schema import Schema

    train = mapping["data"].get("train")
    first = train[0] if isinstance(train, list) and train else train
    if not isinstance(first, str):
        raise ConfigError(f"{path} [data]: neither schema nor train is given.", "Add data.train or data.schema.")
    if not Path(first).exists():
        raise ConfigError(
            f"{path} [data]: train = {first!r} does not exist, and its schema names the tables.",
            "Make it with `tpurec data synth` or `tpurec data convert`, or pass --set data.schema=criteo.",
        )
    return Schema.from_parquet(first)


def _from_parquet(path: Path, embedding_dim: int | None) -> TableList:
    from tpurec.features.schema import Schema

    schema = Schema.from_parquet(path)
    if embedding_dim is None:
        raise ConfigError(f"{path}: a data set does not say how wide its tables are.", "Add --embedding-dim, say 64.")
    tables = tuple(
        TableSpec(
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            features=tuple(
                FeatureSpec(feature.name, weighted=feature.weights is not None)
                for feature in schema.sparse
                if feature.table == name
            ),
        )
        for name, num_embeddings in schema.tables.items()
    )
    return TableList(tables, Assumptions(dense_input_bytes=4 * len(schema.dense) + 5))


def _from_model(source: str) -> TableList:
    from torch import nn
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

    factory = load_factory(source, source)
    try:
        model = factory() if callable(factory) else factory
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{source}: calling it raised {type(error).__name__}: {error}.",
            "It is called without arguments; `tpurec --traceback plan ...` shows where.",
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source}: gives a {type(model).__name__}, not a torch module.", "Return the whole model.")
    configs: dict[str, tuple[BaseEmbeddingConfig, bool, str]] = {}
    for module in model.modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            if callable(getattr(module, method, None)):
                weighted = method == "embedding_bag_configs" and bool(module.is_weighted())
                for config in getattr(module, method)():
                    pooling = config.pooling.name.lower() if method == "embedding_bag_configs" else "none"
                    first, _, _ = configs.setdefault(config.name, (config, weighted, pooling))
                    shapes = [(one.num_embeddings, one.embedding_dim, one.feature_names) for one in (first, config)]
                    if shapes[0] != shapes[1]:  # alike: a wrapper shows what the module in it has
                        raise ConfigError(
                            f"{source}: two collections have different tables of the name {config.name!r}.",
                            "Give each table its own name.",
                        )
    if not configs:
        raise ConfigError(
            f"{source}: the model has no EmbeddingBagCollection or EmbeddingCollection.", "Return the whole model."
        )
    tables = tuple(
        TableSpec(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            features=tuple(FeatureSpec(name, weighted=weighted) for name in config.feature_names),
            dtype=str(data_type_to_dtype(config.data_type)).removeprefix("torch."),
            pooling=pooling,
        )
        for config, weighted, pooling in configs.values()
    )
    in_tables = sum(table.num_embeddings * table.embedding_dim for table in tables)
    dense = sum(parameter.numel() for parameter in model.parameters()) - in_tables
    return TableList(tables, Assumptions(dense_parameters=max(0, dense)))
