"""What one `key=value` means: free text, a group's choice, a sweep, or a value for Hydra.

Free text (`prompt=`, paths, model names, `sampling.stop=`) never reaches Hydra's grammar: commas, quotes, braces
and `${...}` arrive as typed. Two forms keep Hydra's meaning: a complete quoted string, and `null`
(no text; `prompt="'null'"` is the word).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, ValueType
from hydra.errors import HydraException

from amusd.errors import ConfigError
from amusd.settings import nearest

from .keys import TEXT_LISTS, groups, keys, sections

OPTIONAL_GROUPS = frozenset({"experiment"})
"""Groups from which nothing is chosen by default; `null` chooses nothing again."""


def split(argument: str) -> tuple[str, str]:
    """`key=value` -> (key, value), the key known to exist. Raises `ConfigError`."""
    key, equals, value = argument.partition("=")
    if not equals:
        raise ConfigError(f'{argument}: expected key=value; a value with spaces needs quotes: prompt="Two words"')
    if key not in keys() and key not in groups() and key not in sections():
        raise ConfigError(_no_such_key(key, value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key}={value!a}: not valid UTF-8 text") from None
    return key, value


def is_text(key: str) -> bool:
    """Whether the value of this key is taken literally."""
    return key in TEXT_LISTS or (key in keys() and keys()[key].is_text)


def text_value(key: str, value: str) -> Any:
    """What a text key is set to: the text as typed; None for `null`; a complete quoted string without its quotes."""
    if key in TEXT_LISTS:
        if value == "null":
            return []
        listed = _parsed_or_none(key, value) if value.startswith("[") else None
        return listed.value() if listed is not None else [_unquoted(key, value)]
    return None if value == "null" else _unquoted(key, value)


def check_for_hydra(key: str, value: str) -> None:
    """Refuse what Hydra would refuse in many lines: bad syntax, a sweep without `-m`, an unknown group choice."""
    parsed = _parse(key, value)
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}={value}: several values are a sweep, which needs -m; one list is written [a,b]")
    if key in groups():
        _check_choice(key, value)
    elif key in sections():
        names = ", ".join(name for name in keys() if name.startswith(f"{key}."))
        raise ConfigError(f"{key}={value}: has keys of its own: {names}")


def expand_sweep(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """The jobs of a sweep, each a list of overrides: the product of all choices, the last one varying fastest.

    Raises `ConfigError` on a mistake in any override.
    """
    return list(itertools.product(*[_choices(*split(override)) for override in overrides]))


def _choices(key: str, value: str) -> list[str]:
    if is_text(key) and (key == "prompt" or not value.startswith("choice(")):
        return [f"{key}={value}"]
    parsed = _parse(key, value)
    if not parsed.is_sweep_override():
        return [f"{key}={value}"]
    if parsed.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return [f"{key}={name}" for name in _glob(key, value, parsed.value())]
    if parsed.value_type is ValueType.INTERVAL_SWEEP:
        raise ConfigError(f"{key}={value}: an interval has no end of values; use a,b,c or range(start,stop,step)")
    try:
        if is_text(key):  # Hydra's escapes are for its own grammar, which text does not pass again
            values = [str(getattr(item, "text", item)) for item in parsed.sweep_iterator()]
        else:
            values = list(parsed.sweep_string_iterator())
    except HydraException as error:
        raise ConfigError(f"{key}={value}: {_first_line(error)}") from None
    if not values:
        raise ConfigError(f"{key}={value}: a sweep over nothing")
    return [f"{key}={one}" for one in values]


def _glob(key: str, value: str, pattern: Any) -> list[str]:
    assert isinstance(pattern, Glob)
    if key not in groups():
        raise ConfigError(f"{key}={value}: glob() chooses from a group: {', '.join(groups())}")
    names: list[str] = pattern.filter(list(groups()[key]))
    if not names:
        raise ConfigError(f"{key}={value}: matches none of {', '.join(groups()[key])}")
    return names


def _check_choice(group: str, value: str) -> None:
    options = groups()[group]
    if value in options or (value == "null" and group in OPTIONAL_GROUPS):
        return
    raise ConfigError(f"{group}={value}: allowed: {', '.join(options)}{nearest(value, options)}")


def _no_such_key(key: str, value: str) -> str:
    if key.startswith(("+", "~")) and key.lstrip("+~") in {*keys(), *groups()}:
        return f"{key}={value}: keys are neither added nor deleted here; write {key.lstrip('+~')}={value}"
    names = [*keys(), *groups()]
    same_end = [name for name in names if name.rpartition(".")[2] == key]
    near = f"; did you mean '{same_end[0]}'?" if same_end else nearest(key, names)
    return f"{key}={value}: no such key{near}; `amusd generate --help` lists them all"


def _unquoted(key: str, value: str) -> str:
    if len(value) >= 2 and value[0] in "'\"" and value[-1] == value[0]:
        parsed = _parsed_or_none(key, value)
        if parsed is not None:
            return str(parsed.value())
    return value


def _parsed_or_none(key: str, value: str) -> Override | None:
    """The parsed override when its value is one complete element of Hydra's grammar."""
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        return None
    return parsed if parsed.value_type is ValueType.ELEMENT else None


def _parse(key: str, value: str) -> Override:
    try:
        return OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException as error:
        reason = _first_line(error)
        raise ConfigError(f"{key}={value}: cannot be read ({reason}); quote text: {key}=\"'...'\"") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
