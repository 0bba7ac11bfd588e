"""From arguments to a `RunConfig`, by Hydra."""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amusd.config import CAPABILITIES, RunConfig
from amusd.config.engine import DEFAULT_DRAFTERS
from amusd.config.plugins import is_reference
from amusd.errors import ConfigError, first_line
from amusd.logs import logger
from amusd.settings import fields_of, from_mapping, nearest, no_such_key, shown, to_mapping

CONFIG_NAME = "config"
HYDRA_VERSION = "1.3"
_MODELS = ("target", "drafter")
_KINDS = {"auto", *CAPABILITIES}
_WITHOUT_MODEL = {"auto", *(kind for kind, can in CAPABILITIES.items() if not can.checkpoint)}
_NO_NAME = r"null|true|false|[\d._-]*"
_KEYS = dict(fields_of(RunConfig))
"""The values that each setting takes, by key."""


def conf_folder() -> Path:
    """The folder of configuration files: in the installed package, or beside `launch` in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


def store_defaults() -> None:
    """Give Hydra every key with its default. Idempotent."""
    defaults = to_mapping(RunConfig())
    defaults["sampling"]["logit_bias"] = None  # so that a list or a mapping can replace it
    ConfigStore.instance().store(name="amusd_defaults", node=defaults)


def compose_config(arguments: Sequence[str]) -> RunConfig:
    """The configuration of `key=value` arguments. Raises `ConfigError`, one line."""
    store_defaults()
    with errors_of_hydra(arguments), initialize_config_dir(str(conf_folder()), version_base=HYDRA_VERSION):
        return config_of(compose(CONFIG_NAME, overrides=for_hydra(arguments)))


def config_of(composed: DictConfig) -> RunConfig:
    """The typed configuration. Logs a line if the drafter is a default. Raises `ConfigError`, one line."""
    try:
        values = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from None
    config = from_mapping(RunConfig, values)
    is_default = values["drafter"].get("kind") == "auto" and config.drafter.kind in DEFAULT_DRAFTERS
    if is_default and config.mode != "autoregressive" and not config.compare.drafters:
        logger.info(DEFAULT_DRAFTERS[config.drafter.kind])
    return config


@contextmanager
def errors_of_hydra(arguments: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's refusal of an argument into a `ConfigError`, one line that names the argument."""
    try:
        yield
    except MissingConfigException as error:
        key, _, choice = str(error.missing_cfg_file).rpartition("/")
        choices = [name for name in error.options or () if name]
        others = ", the folder or hub name (OWNER/NAME) of a checkpoint" if key in _MODELS else ""
        allowed = f"expected {', '.join(choices)}{others}{nearest(choice, choices)}" if key else first_line(error)
        raise ConfigError(f"{key or '--config-name'}={choice}: {allowed}") from None
    except OSError as error:
        is_long = error.errno == errno.ENAMETOOLONG  # a key or a choice, which is looked for as a file
        named = shown(max(arguments, key=len) if is_long else f"run_dir={error.filename}")
        raise ConfigError(f"{named}: cannot be used ({error.strerror})") from None
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        text = " ".join(str(error).partition("See https:")[0].split())
        for argument in arguments:
            key = re.escape(argument.partition("=")[0].lstrip("+~"))
            is_named = re.search(rf"(?<![\w.]){key}(\.kind)?(?![\w.])", getattr(error, "override", text))
            if is_named and not key.startswith("hydra"):
                raise _refusal(argument, text) from None
        raise ConfigError(text) from None


def _refusal(argument: str, text: str) -> ConfigError:
    """The line for an argument that Hydra refuses with this text."""
    key, _, value = argument.lstrip("+~").partition("=")
    sweep = "; several values are a sweep, which needs -m" if "multirun" in text else ""
    if (conf_folder() / key.partition("@")[0]).is_dir() or key.startswith("drafter.options."):
        return ConfigError(f"{shown(argument)}: {sweep[2:] or text}")
    if key not in _KEYS:
        return no_such_key(RunConfig, shown(key), shown(value))
    as_list = f", as [{value}]" if sweep and _KEYS[key].startswith("a list") else ""
    return ConfigError(f"{shown(argument)}: expected {_KEYS[key]}{as_list}{sweep}")


def for_hydra(arguments: Sequence[str], *, own_config: bool = False) -> list[str]:
    """Arguments for Hydra: free text is quoted, and a checkpoint as a choice is spelt out.

    `own_config`: Hydra begins with a file of the user's. Values of a choice's file override that file, a pair and an
    experiment. Raises `ConfigError` for an argument that is no `key=value`.
    """
    typed = {argument.partition("=")[0] for argument in arguments}
    has_rival = own_config or not typed.isdisjoint(("pair", "experiment"))
    spelt = [word for argument in arguments for word in _spelt(argument, typed, has_rival=has_rival)]
    values = [value for word in spelt for value in _values_of(word)] if has_rival else []
    return [*values, *spelt]  # typed arguments come last and override all


def _spelt(argument: str, typed: AbstractSet[str], *, has_rival: bool) -> Iterator[str]:
    key, _, value = argument.partition("=")
    allowed, kinds = _KEYS.get(key, ""), value.split(",")
    begin = "[" if allowed.startswith("a list") else "choice("
    if not re.fullmatch(r"~[\w.@/]+|[+~]*[\w.@/]+=.*", argument, re.DOTALL):
        dashes = ", without dashes" if argument.startswith("-") else ""
        near = nearest(key.lstrip("-"), [*_KEYS]) or f"; a prompt is written prompt={shlex.quote(argument)}"
        raise ConfigError(f"{shown(argument)}: expected KEY=VALUE{dashes}{near}")
    if key == "drafter" and is_reference(value):
        yield from ("drafter=custom", f"drafter.factory={_quoted(value)}")
    elif key in _MODELS and _names_model(key, value):
        yield from (f"{key}=hf", f"{key}.model={_quoted(value)}")
    elif key in _MODELS and has_rival and len(kinds) > 1 and _KINDS.issuperset(kinds):  # a sweep, over another kind
        yield f"{key}.kind={value}"
        if _WITHOUT_MODEL.issuperset(kinds) and f"{key}.model" not in typed:
            yield f"{key}.model=null"
    elif (conf_folder() / key).is_dir() and re.fullmatch(_NO_NAME, value):
        yield f"~{key}" if value == "null" else f"{key}={_quoted(value)}"
    elif key.startswith("drafter.options"):
        yield f"++{argument}"  # `++`: add or replace
    elif "a text" in allowed and value != "null" and not value.startswith(begin) and not _is_quoted(key, value):
        yield f"{key}={_quoted(value)}"
    else:
        yield argument


def _values_of(choice: str) -> Iterator[str]:
    """Arguments for the values in our file of `GROUP=CHOICE`; none for a pair, an experiment or another word."""
    group, _, name = choice.partition("=")
    file = conf_folder() / group / f"{name}.yaml"
    if group in ("pair", "experiment") or not re.fullmatch(r"\w+", name) or not file.is_file():
        return
    found = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
    is_global = file.read_text(encoding="utf-8").startswith("# @package _global_")
    for key, value in (found if is_global else {group: found}).items():
        values = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        yield from (f"{name}={json.dumps(each)}" for name, each in values.items())
    if group in _MODELS and name in _WITHOUT_MODEL:
        yield f"{group}.model=null"


def text_of(argument: str) -> str:
    """The text of a `key=value` argument, with or without quotes."""
    key, _, value = argument.partition("=")
    return value[1:-1] if _is_quoted(key, value) else value


def _names_model(group: str, choice: str) -> bool:
    has_file = (conf_folder() / group / f"{choice}.yaml").is_file()
    return not has_file and (Path(choice).is_dir() or ("/" in choice and "," not in choice))


def _quoted(text: str) -> str:
    """The text as Hydra's parser reads it back, without interpolation."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    return QuotedString(text, Quote.single).with_quotes()


def _is_quoted(key: str, value: str) -> bool:
    is_framed = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    with suppress(HydraException):
        return is_framed and OverridesParser.create().parse_override(f"{key}={value}").value_type is ValueType.ELEMENT
    return False
