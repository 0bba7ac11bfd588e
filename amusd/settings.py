"""Config dataclasses from nested mappings and back.

A mistake is one `ConfigError` line: the key, the value, what is allowed, the nearest match. Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from amusd.errors import ConfigError
from amusd.types import Mode

T = TypeVar("T")


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near."""
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


def from_mapping(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a config dataclass from nested mappings. Raises `ConfigError`, one line, on the first mistake."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigError(f"{prefix}{key}: no such key{nearest(str(key), names)}")
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`: nested dictionaries of plain values (enums as strings, tuples as lists)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mode):
            return value.value
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value

    result: dict[str, Any] = plain(config)
    return result


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, key)
    if origin is Literal or hint is Mode:
        allowed = list(arguments) if origin is Literal else [mode.value for mode in Mode]
        text = value.value if isinstance(value, Mode) else value
        if text not in allowed:
            raise ConfigError(f"{key}={value}: allowed: {', '.join(allowed)}{nearest(str(value), allowed)}")
        return text if origin is Literal else Mode(text)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            value = [value]
        if arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                raise ConfigError(f"{key}={value}: expected {len(arguments)} values")
            return tuple(_convert(hint, item, key) for hint, item in zip(arguments, value, strict=True))
        return tuple(_convert(arguments[0], item, key) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key}={value}: has keys of its own: {', '.join(f.name for f in dataclasses.fields(hint))}"
            )
        return from_mapping(hint, value, f"{key}.")
    return _scalar(hint, value, key)


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (str, int, float)):
        return str(value)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    raise ConfigError(f"{key}={value}: expected {expected}")
