"""Groups of settings as frozen dataclasses that msgspec checks. The settings themselves are in `amusd/config`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import numbers
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union

import msgspec
from msgspec import Meta

from amusd.errors import ConfigError

S = TypeVar("S", bound="Settings")

MAX_COUNT = (1 << 31) - 1
_MAX_SHOWN = 200
_MIN_LIKENESS = 0.85
_KINDS = {int: "a whole number", float: "a number", bool: "true, false", str: "a text", type(None): "null"}

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountFromZero: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1_000_000)]
PositiveAmount: TypeAlias = Annotated[float, Meta(ge=1e-6, le=1_000_000)]  # a nanosecond, in milliseconds
Text: TypeAlias = Annotated[str, Meta(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings. A field's type says which values are allowed; `__post_init__` refuses others.

    Also valid: a mapping for a group or for pairs, a value for a list of one, None for an empty list, NumPy's numbers.
    """

    section = ""

    def __post_init__(self) -> None:
        for name, hint in _hints_of(type(self)).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, msgspec.convert(_prepared(hint, value), hint))
            except (msgspec.ValidationError, UnicodeEncodeError, AttributeError):  # AttributeError: no mapping
                allowed = _allowed(hint)
                near = nearest(shown(value), allowed.split(", "))
                raise ConfigError(f"{self.key(name)}={shown(value)}: expected {allowed}{near}") from None

    @classmethod
    def key(cls, name: str) -> str:
        """The name of a field as users write it."""
        return f"{cls.section}.{name}" if cls.section else name

    def require(self, condition: bool, name: str, allowed: str) -> None:
        """Raise a `ConfigError` with the field, its value and `allowed`, unless the condition holds."""
        if not condition:
            raise ConfigError(f"{self.key(name)}={shown(to_mapping(self)[name])}: {allowed}")


def from_mapping(cls: type[S], values: Mapping[str, Any]) -> S:
    """Build settings from nested mappings. Raises `ConfigError`, one line, on the first mistake."""
    for name, value in values.items():
        if name not in _hints_of(cls):
            raise no_such_key(cls, cls.key(shown(name)), shown(value))
    return cls(**values)


def fields_of(cls: type[Settings]) -> Iterator[tuple[str, str]]:
    """Yield each setting's name, as users write it, and allowed values; inner groups are included."""
    for name, hint in _hints_of(cls).items():
        if isinstance(hint, type) and issubclass(hint, Settings):
            yield from fields_of(hint)
        else:
            yield cls.key(name), _allowed(hint)


def no_such_key(cls: type[Settings], key: str, value: str) -> ConfigError:
    """The error for a key that is no setting of `cls`."""
    return ConfigError(f"{key}={value}: no such key{nearest(key, [*dict(fields_of(cls))])}")


def to_mapping(config: Settings) -> dict[str, Any]:
    """The inverse of `from_mapping`: nested dictionaries and lists of plain values."""
    result: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(config)))  # msgspec's encoder refuses some paths
    return result


def shown(value: object) -> str:
    """A value as text for a line, cut if it is long."""
    text = " ".join(str(value).splitlines())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or '' if no name is similar. Dotted names may match in their last part."""

    def near(text: str, texts: Sequence[str]) -> list[str]:
        return difflib.get_close_matches(text, texts, n=1, cutoff=_MIN_LIKENESS)

    name = name.replace("-", "_")
    parts = {each: each.rpartition(".")[2] for each in names}
    alike = near(name.rpartition(".")[2], list(parts.values()))
    exact = [each for each, part in parts.items() if part == name]
    matches = exact or near(name, names) or [each for each, part in parts.items() if part in alike]
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


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
        single = [] if value is None else [value]
        values = value.items() if is_pairs else value if isinstance(value, (list, tuple)) else single
        return [_prepared(arguments[0], item) for item in values]
    if isinstance(value, Mapping) and isinstance(hint, type) and issubclass(hint, Settings):
        return from_mapping(hint, value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _allowed(hint: Any) -> str:
    """The values that a setting of this type takes, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(arguments)
    if origin is Annotated:
        return arguments[1].description or _allowed(arguments[0]) + _bounds(arguments[1])
    if origin is tuple:
        items = [_allowed(item) for item in arguments if item is not ...]
        return f"a list, each {items[0]}" if ... in arguments else f"[{', '.join(items)}]"
    if origin in (Union, UnionType):
        return ", ".join(map(_allowed, arguments))
    return _KINDS.get(hint, "a mapping")


def _bounds(meta: Meta) -> str:
    if meta.le is not None:
        return f" above {meta.gt} and up to {meta.le}" if meta.ge is None else f" from {meta.ge} to {meta.le}"
    return " (not empty)" if meta.min_length else f" (at most {meta.max_length})" if meta.max_length else ""


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise `ConfigError` unless argument `name` is None or of type `kind`."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={shown(value)}: expected {kind.__name__}")
