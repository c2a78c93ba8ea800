"""TOML into dataclasses: wrong types are named, never turned into something that fits."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tpurec.config import from_mapping
from tpurec.errors import ConfigError


@dataclass(frozen=True)
class _Part:
    count: int = 1
    rate: float = 1.0
    flag: bool = False
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    path: Path | None = None

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count = {self.count}: must not be negative")


@dataclass(frozen=True)
class _Whole:
    part: _Part = field(default_factory=_Part)
    parts: dict[str, _Part] = field(default_factory=dict)


@pytest.mark.parametrize("where", ["part", "parts.a"])
@pytest.mark.parametrize(
    ("key", "value", "at"),
    [
        ("count", True, "count = True"),
        ("count", "64", "count = '64'"),
        ("rate", "0.5", "rate = '0.5'"),
        ("rate", False, "rate = False"),
        ("flag", 1, "flag = 1"),
        ("flag", "yes", "flag = 'yes'"),
        ("limit", "3", "limit = '3'"),
        ("sizes", [8, True], "sizes.1 = True"),
    ],
)
def test_a_value_of_another_type_is_named_and_not_converted(where, key, value, at):
    given = {key: value}
    with pytest.raises(ConfigError) as caught:
        from_mapping(_Whole, {"part": given} if where == "part" else {"parts": {"a": given}}, "r.toml")
    assert f"r.toml: {where}.{at}: " in caught.value.problem


def test_what_toml_can_only_write_so_is_converted():
    part = from_mapping(
        _Part, {"count": 1e6, "rate": 2, "flag": True, "limit": 3, "sizes": [1, 2], "path": "p"}, "r.toml"
    )
    assert part == _Part(1_000_000, 2.0, True, 3, (1, 2), Path("p"))


def test_a_section_s_own_check_is_not_buried_under_the_section():
    with pytest.raises(ConfigError) as caught:
        from_mapping(_Whole, {"part": {"count": -1, "rate": 2.0}}, "r.toml")
    assert caught.value.problem == "r.toml: part: count = -1: must not be negative."
