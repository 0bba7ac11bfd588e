"""Config dataclasses from nested mappings and back.

A mistake is one `ConfigError` line: the key, the value, what is allowed, the nearest match. Standard library only.
Knows no configuration: `amusd/config` uses it to check what is made from Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import numbers
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from amusd.errors import ConfigError
from amusd.types import Mode

T = TypeVar("T")

_MAX_SHOWN = 200
"""Characters of a value in a message at most."""
_MAX_SECONDS = 1e6
_MIN_LIKENESS = 0.6
"""Each word of a name has to be this much like a word of the name that is suggested for it."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}={shown(value)}: {allowed}")


def check_range(
    config: Any, prefix: str, *names: str, least: float | None = None, above: float = -math.inf, most: float = math.inf
) -> None:
    """Raise `ConfigError` unless these fields of `config` are in a range; None is allowed, and infinity is not.

    The range begins with `least`, or behind `above`, and ends with `most`; each value of a tuple has to be in it.
    `prefix`: of the fields' names in the message.
    """
    words = f"above {above:g}" if least is None else f"at least {least:g}"
    if most < math.inf:
        words = f"{words} and at most {most:g}" if least is None else f"between {least:g} and {most:.7g}"

    def fits(number: float | None) -> bool:
        if number is None:
            return True
        return (number > above if least is None else number >= least) and number <= most and number < math.inf

    for name in names:
        value = getattr(config, name)
        if isinstance(value, tuple):
            require(all(map(fits, value)), prefix + name, list(value), f"each must be {words}")
        else:
            require(fits(value), prefix + name, value, f"must be {words}")


def check_seconds(key: str, value: float) -> None:
    """Raise `ConfigError` unless this is a time that can be waited."""
    require(0 < value <= _MAX_SECONDS, key, value, f"must be above 0 and at most {_MAX_SECONDS:g}")


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near: `min_tokens` is no misspelt `max_tokens`."""

    def is_like(word: str, other: str) -> bool:
        is_part = word.startswith(other) or other.startswith(word)
        return is_part or difflib.SequenceMatcher(None, word, other).ratio() >= _MIN_LIKENESS

    for match in difflib.get_close_matches(name, list(names), cutoff=0.5):
        words = re.split(r"[\W_]", match)
        if all(any(is_like(word, other) for other in words) for word in re.split(r"[\W_]", name)):
            return f"; did you mean '{match}'?"
    return ""


def from_mapping(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a config dataclass from nested mappings. Raises `ConfigError`, one line, on the first mistake."""
    hints = _hints_of(cls)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: no such key{nearest(str(key), hints)}")
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def convert_fields(config: Any, prefix: str) -> None:
    """Convert the fields of a new config dataclass as `from_mapping` does. Raises `ConfigError`, one line, as well."""
    for name, hint in _hints_of(type(config)).items():
        object.__setattr__(config, name, _convert(hint, getattr(config, name), f"{prefix}{name}"))


def shown(value: object) -> str:
    """A value as it is put into one line for people: cut where it is long."""
    try:
        text = " ".join(str(value).splitlines())
    except ValueError:  # a number of more digits than Python prints
        return "(a huge number)"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`: nested dictionaries of plain values (enums as strings, tuples as lists)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mode):
            return value.value
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {name: plain(item) for name, item in value.items()}
        return value

    result: dict[str, Any] = plain(config)
    return result


def changed(config: Any, defaults: Any) -> dict[str, Any]:
    """Return the values in which a config dataclass differs from another one of its kind, by dotted name."""

    def found(values: Mapping[str, Any], others: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from found(value, others.get(name) or {}, f"{prefix}{name}.")
            elif value != others.get(name):
                yield prefix + name, value

    return dict(found(to_mapping(config), to_mapping(defaults), ""))


def _hints_of(cls: type) -> dict[str, Any]:
    """Type of each field, in their order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        plain = (argument for argument in arguments if argument is not type(None))
        return _convert(str if str in arguments else next(plain), value, key)  # a choice or text is checked later
    if origin is Literal or hint is Mode:
        allowed = list(arguments) if origin is Literal else [mode.value for mode in Mode]
        text = value.value if isinstance(value, Mode) else value
        if text not in allowed:
            raise ConfigError(f"{key}={shown(value)}: allowed: {', '.join(allowed)}{nearest(shown(value), allowed)}")
        return text if origin is Literal else Mode(text)
    if origin is tuple:
        return _tuple(arguments, value, key)
    if origin is Mapping:
        return _options(value, key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key}={shown(value)}: has keys of its own: {', '.join(f.name for f in dataclasses.fields(hint))}"
            )
        return from_mapping(hint, value, f"{key}.")
    return _scalar(hint, value, key)


def _tuple(hints: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    """A tuple from a sequence, from the pairs of a mapping, or from a single value."""
    if isinstance(value, Mapping):
        value = list(value.items())
    elif not isinstance(value, (list, tuple)):
        value = [value]
    if hints[-1] is Ellipsis:
        return tuple(_convert(hints[0], item, key) for item in value)
    if len(value) != len(hints):
        raise ConfigError(f"{key}={shown(value)}: expected {len(hints)} values")
    return tuple(_convert(hint, item, key) for hint, item in zip(hints, value, strict=True))


def _options(value: Any, key: str) -> Any:
    """A mapping of names to plain values: texts, numbers, booleans, null, and lists and mappings of them."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={shown(value)}: expected names and values")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{key}.{shown(name)}: a name is text")
    return {name: _plain_value(item, f"{key}.{name}") for name, item in value.items()}


def _plain_value(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return _options(value, key)
    if isinstance(value, (list, tuple)):
        return tuple(_plain_value(item, key) for item in value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ConfigError(f"{key}={shown(value)}: expected text, a number, true or false, or a list or mapping of these")


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if isinstance(value, numbers.Integral if hint is int else numbers.Real):
                return hint(value)
    if hint is str and isinstance(value, (str, int, float)):
        return str(value)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    raise ConfigError(f"{key}={shown(value)}: expected {expected}")
