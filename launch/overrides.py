"""Reads each `key=value`: free text, a group's choice, a sweep, or a value for Hydra.

Free text (`prompt=`, paths, model names, `sampling.stop=`) never reaches Hydra's grammar: commas, quotes, braces
and `${...}` arrive as typed. Two forms keep Hydra's meaning: a complete quoted string, and `null`
(no text; `prompt="'null'"` is the word).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, ValueType
from hydra.errors import HydraException

from amusd.config import CAPABILITIES
from amusd.config.plugins import DRAFTERS, entry_point_names, is_reference
from amusd.errors import ConfigError, first_line
from amusd.settings import nearest

from .keys import CONFIG_DIR, CONFIG_NAME, OPTIONS, TEXT_LISTS, groups, keys, sections

MODEL_GROUPS = ("target", "drafter")
"""Groups whose choice may be a model: `target=FOLDER` is short for `target=hf target.model=FOLDER`."""
OPTIONAL_GROUPS = frozenset({"experiment", "pair"})
"""Groups from which nothing is chosen by default; `null` chooses nothing again."""


def split(argument: str) -> tuple[str, str]:
    """`key=value` -> (key, value), the key known to exist. Raises `ConfigError`."""
    key, equals, value = argument.partition("=")
    if not equals:
        raise ConfigError(f'{argument}: expected key=value; a value with spaces needs quotes: prompt="Two words"')
    if key not in (CONFIG_DIR, CONFIG_NAME, *keys(), *groups(), *sections()) and not is_option(key):
        raise ConfigError(_no_such_key(key, value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key}={value!a}: not valid UTF-8 text") from None
    return key, value


def settle(overrides: Sequence[str]) -> dict[str, str]:
    """Values by key: the last of a key holds, a model alone means `hf`. Raises `ConfigError`.

    A choice of target or drafter holds over the kind that a pair or an experiment names, and over its model if there is
    none of this kind.
    """
    values = dict(split(override) for override in overrides)
    chosen = [group for group in MODEL_GROUPS if group in values]
    for group in MODEL_GROUPS:
        key, choice = f"{group}.model", values.get(group)
        if choice is not None and _names_model(group, choice := _unquoted(group, choice)):
            if key in values:
                raise ConfigError(f"{key}={values[key]}: {group}={choice} names a model as well; leave one of them out")
            values |= {group: "hf", key: choice}
        elif choice is None and f"{group}.kind" not in values and values.get(key, "null") != "null":
            values[group] = "hf"
    choice, factory = values.get("drafter"), values.get("drafter.factory", "null")
    if choice is not None and _names_factory(choice):
        if factory != "null":
            raise ConfigError(f"drafter.factory={factory}: drafter={choice} names one as well; leave one of them out")
        values |= {"drafter": "custom", "drafter.factory": choice}
    elif choice is None and "drafter.kind" not in values and factory != "null":
        values["drafter"] = "custom"
    for group in chosen:
        kind = values[group]
        if kind in keys()[f"{group}.kind"].allowed.split(" | "):
            values.setdefault(f"{group}.kind", kind)
            if kind in ("auto", "embedded") or (group == "drafter" and not CAPABILITIES[kind].checkpoint):
                values.setdefault(f"{group}.model", "null")
    return values


def _names_model(group: str, choice: str) -> bool:
    """Whether it is a folder, or `owner/name` of the model hub, and neither a choice of the group nor several."""
    if choice in groups()[group] or choice.endswith(".yaml"):
        return False
    is_folder = os.path.isdir(choice)  # noqa: PTH112 - a name too long is no error
    return is_folder or ("/" in choice and "," not in choice)


def _names_factory(choice: str) -> bool:
    """Whether it is code that makes a drafter, or an entry point for it, and not a choice of the group."""
    return choice not in groups()["drafter"] and (is_reference(choice) or choice in entry_point_names(DRAFTERS))


def option_value(key: str, value: str) -> Any:
    """The value of a key below `OPTIONS`, of all of them, or a mapping; parsed as Hydra does, which cannot take it."""
    check_for_hydra(key, value)
    parsed = _parse(key, value).value()
    return {} if key == OPTIONS and parsed is None else parsed


def is_option(key: str) -> bool:
    """Whether the key is `OPTIONS`, or a name below it."""
    return key == OPTIONS or (key.startswith(f"{OPTIONS}.") and len(key) > len(OPTIONS) + 1)


def is_text(key: str) -> bool:
    """Whether the value of this key is taken literally."""
    return key in (CONFIG_DIR, CONFIG_NAME, *TEXT_LISTS) or (key in keys() and keys()[key].is_text)


def text_value(key: str, value: str) -> Any:
    """The value of a text key: the text as typed; None for `null`; a complete quoted string without its quotes."""
    if key in TEXT_LISTS:
        if value == "null":
            return []
        listed = _parsed_or_none(key, value) if value.startswith("[") else None
        return listed.value() if listed is not None else [_unquoted(key, value)]
    return None if value == "null" else _unquoted(key, value)


def is_file(key: str, value: str) -> bool:
    """Whether an experiment is named by the path of its file."""
    return key == "experiment" and value.endswith(".yaml")


def check_for_hydra(key: str, value: str, folder: Path | None = None) -> None:
    """Refuse what Hydra would refuse in many lines: bad syntax, a sweep without `-m`, an unknown group choice.

    `folder`: of `--config-dir`.
    """
    parsed = _parse(key, value)
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}={value}: several values are a sweep, which needs -m; one list is written [a,b]")
    if key in groups():
        _check_choice(key, value, (*groups(folder)[key], *(entry_point_names(DRAFTERS) if key == "drafter" else ())))
    elif key in sections():
        names = ", ".join(name for name in keys() if name.startswith(f"{key}."))
        raise ConfigError(f"{key}={value}: has keys of its own: {names}")


def expand_sweep(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """The jobs of a sweep, each a list of overrides: the product of all choices, the last one varying fastest.

    The last value of a key holds. Raises `ConfigError` on a mistake in any override.
    """
    last = dict(split(override) for override in overrides)
    return list(itertools.product(*[_choices(key, value) for key, value in last.items()]))


def _choices(key: str, value: str) -> list[str]:
    is_model = key in MODEL_GROUPS and _names_model(key, _unquoted(key, value))
    if is_model or (is_text(key) and (key == "prompt" or not value.startswith("choice("))):
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
        raise ConfigError(f"{key}={value}: {first_line(error)}") from None
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


def _check_choice(group: str, value: str, options: Sequence[str]) -> None:
    if value in options or (value == "null" and group in OPTIONAL_GROUPS):
        return
    own = f"; or yours, with {CONFIG_DIR} FOLDER and FOLDER/{group}/NAME.yaml" if value.endswith(".yaml") else ""
    model = "; or a model: its folder, or OWNER/NAME of the hub" if group in MODEL_GROUPS else ""
    raise ConfigError(f"{group}={value}: allowed: {', '.join(options)}{own or nearest(value, options)}{model}")


def _no_such_key(key: str, value: str) -> str:
    if key.startswith(("+", "~")) and key.lstrip("+~") in {*keys(), *groups()}:
        return f"{key}={value}: keys are neither added nor deleted here; write {key.lstrip('+~')}={value}"
    if re.match(r"hydra\b", key.lstrip("+~")):
        return f"{key}={value}: no such key; Hydra's own settings are not used (run_dir, -m and {CONFIG_DIR} are ours)"
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
        reason = first_line(error)
        raise ConfigError(f"{key}={value}: cannot be read ({reason}); quote text: {key}=\"'...'\"") from None
