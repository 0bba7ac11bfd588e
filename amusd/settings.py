"""Groups of settings: frozen dataclasses that msgspec checks. `amusd/config` has the settings themselves."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import numbers
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from amusd.errors import ConfigError

S = TypeVar("S", bound="Settings")

_MAX_COUNT = (1 << 31) - 1
_MAX_SHOWN = 200
_MIN_LIKENESS = 0.85

Count: TypeAlias = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
CountFromZero: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1_000_000)]
PositiveAmount: TypeAlias = Annotated[float, Meta(gt=0, le=1_000_000)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings. A field's type says what it takes; `__post_init__` refuses all else.

    A field also takes a mapping for a group or a list of pairs, a single value for a list of one, and NumPy's numbers.
    """

    section = ""

    def __post_init__(self) -> None:
        for name, hint in _hints_of(type(self)).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, msgspec.convert(_prepared(hint, value), hint))
            except msgspec.ValidationError as error:
                choices = _choices(hint)
                allowed = f"expected {', '.join(choices)}{nearest(shown(value), choices)}" if choices else error
                raise ConfigError(f"{self.key(name)}={shown(value)}: {allowed}") from None

    @classmethod
    def key(cls, name: str) -> str:
        """The name of a field as users write it."""
        return f"{cls.section}.{name}" if cls.section else name

    def require(self, condition: bool, name: str, allowed: str) -> None:
        """Raise `ConfigError` that names a field and its value unless the condition holds."""
        if not condition:
            raise ConfigError(f"{self.key(name)}={shown(to_mapping(self)[name])}: {allowed}")


def from_mapping(cls: type[S], values: Mapping[str, Any]) -> S:
    """Build settings from nested mappings. Raises `ConfigError`, one line, on the first mistake."""
    names = _hints_of(cls)
    for name in values:
        if name not in names:
            raise ConfigError(f"{cls.key(shown(name))}: no such key{nearest(str(name), names)}")
    return cls(**values)


def to_mapping(config: Settings) -> dict[str, Any]:
    """The inverse of `from_mapping`: nested dictionaries and lists of plain values."""
    result: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(config)))  # msgspec's own refuses odd paths
    return result


def shown(value: object) -> str:
    """A value for one line to people, cut where it is long."""
    text = " ".join(str(value).splitlines())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=_MIN_LIKENESS)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def _read_hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


_hints_of: Callable[[type], dict[str, Any]] = functools.cache(_read_hints)


def _prepared(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _prepared(arguments[0], value)
    if origin is tuple:
        is_pairs = isinstance(value, Mapping) and typing.get_origin(arguments[0]) is tuple
        values = value.items() if is_pairs else value if isinstance(value, (list, tuple)) else [value]
        return [_prepared(arguments[0], item) for item in values]
    if isinstance(value, Mapping) and isinstance(hint, type) and issubclass(hint, Settings):
        return from_mapping(hint, value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _choices(hint: Any) -> list[str]:
    """What a setting takes, where that can be listed."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(arguments)
    if typing.get_origin(hint) is Annotated:
        return [arguments[1].description] if arguments[1].description else []
    return [text for argument in arguments for text in _choices(argument)]
