"""TOML into frozen dataclasses, with errors that name the key and the remedy.

The dataclasses live beside what they configure; this file knows none of them.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import tomli_w
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tpurec.errors import ConfigError

T = TypeVar("T")
_STRICT = ConfigDict(extra="forbid")
_SCALAR_TYPES = ("int_type", "float_type", "bool_type")  # pydantic's names for a value of another type


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: the file.

    Returns:
        The parsed mapping.

    Raises:
        ConfigError: the file is missing, is a folder, or is not TOML (with the line).
    """
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.", "Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, a TOML file is expected.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def to_toml(config: Any) -> str:
    """Write a dataclass or mapping as TOML text; keys whose value is None are left out.

    Args:
        config: a dataclass instance or a mapping of plain values.

    Returns:
        TOML text that `from_mapping` reads back to an equal value.
    """
    plain = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config
    return tomli_w.dumps(_without_none(plain))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `mapping` with `key=value` overrides applied.

    Args:
        mapping: parsed TOML.
        overrides: texts such as `train.epochs=2`; the key is dotted, the value is a TOML value, or else a plain string.

    Returns:
        A new mapping.

    Raises:
        ConfigError: an override has no `=`, or its key goes through something that is not a table.

    >>> apply_overrides({"train": {"epochs": 1}}, ["train.epochs=2", "data.train=logs/train"])
    {'train': {'epochs': 2}, 'data': {'train': 'logs/train'}}
    """
    result = copy.deepcopy(dict(mapping))
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {override!r}: expected key=value.", "Write it like --set train.epochs=2.")
        target = result
        for part in parts[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {override!r}: {part!r} is a value, not a table.")
        target[parts[-1]] = _parse_value(text)
    return result


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Build a (frozen) dataclass, nested ones included, from a mapping; unknown keys and wrong types fail.

    Args:
        cls: the dataclass; its `__post_init__` may raise ConfigError or ValueError for bad values.
        mapping: parsed TOML or JSON.
        where: file and section for the error text, such as `demo.toml [train]`.

    Returns:
        An instance of `cls`.

    Raises:
        ConfigError: naming section, key, value and remedy.
    """
    adapter = TypeAdapter(_forbid_extra(cls))
    try:
        found = adapter.validate_python(dict(mapping))
    except ValidationError as error:
        raise ConfigError(*_explain(cls, error.errors()[0], where)) from None
    # pydantic turns true into 1 and "64" into 64. Its strict mode does not, but refuses a whole float (1e6) for an
    # integer too: only where it minds a bool, a text or a number in a bool's place is the type wrong.
    try:
        adapter.validate_json(json.dumps(dict(mapping)), strict=True)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] in _SCALAR_TYPES and isinstance(problem["input"], (bool, str, int)):
                raise ConfigError(*_explain(cls, problem, where)) from None
    return found


def _forbid_extra(cls: type, seen: set[type] | None = None) -> type:
    """pydantic reads `__pydantic_config__` from standard dataclasses; set it on this one and those nested in it."""
    seen = set() if seen is None else seen
    if cls in seen or not dataclasses.is_dataclass(cls):
        return cls
    seen.add(cls)
    cls.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    for hint in get_type_hints(cls).values():
        for inner in _classes_in(hint):
            _forbid_extra(inner, seen)
    return cls


def _classes_in(hint: Any) -> list[type]:
    found = [hint] if isinstance(hint, type) else []
    for argument in get_args(hint):
        found += _classes_in(argument)
    return found


def _explain(cls: type, first: Any, where: str) -> tuple[str, str]:
    key = ".".join(str(part) for part in first["loc"]) or "(the whole)"
    if first["type"] == "unexpected_keyword_argument":
        known = _fields_at(cls, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
        return f"{where}: unknown key {key!r}.", hint
    if first["type"] == "missing_argument" or first["type"] == "missing":
        return f"{where}: key {key!r} is missing.", "Add it."
    message = first["msg"].removeprefix("Value error, ")
    # What a section's own check says names key and value; the whole section would only bury them.
    shown = key if isinstance(first["input"], Mapping) else f"{key} = {first['input']!r}"
    return f"{where}: {shown}: {message.removesuffix('.')}.", ""


def _fields_at(cls: Any, location: tuple[Any, ...]) -> list[str]:
    for part in location:
        if dataclasses.is_dataclass(cls) and isinstance(part, str):
            hint = get_type_hints(cls).get(part)
            inner = [c for c in _classes_in(hint) if dataclasses.is_dataclass(c)]
            if inner:
                cls = inner[0]
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
