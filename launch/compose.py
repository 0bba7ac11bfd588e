"""Command line -> `RunConfig`, once, in one process. Hydra reads `conf/`; `amusd/config` has defaults and types."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]  # OmegaConf brings it, without types
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amusd.config import DEFAULT_DRAFTERS, RunConfig
from amusd.console import tell
from amusd.errors import ConfigError
from amusd.settings import from_mapping, to_mapping
from amusd.types import Mode

from .keys import CONFIG_DIR, CONFIG_NAME, conf_folder, keys
from .overrides import OPTIONAL_GROUPS, check_for_hydra, is_file, is_option, is_text, option_value, settle, text_value

_PRIMARY = "config"
_FROM_A_FILE = "_from_a_file"
"""The name of an experiment that is given by its path."""


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one job. Raises `ConfigError`, one line, on the first mistake."""
    typed = settle(overrides)
    folder = _own_folder(typed.get(CONFIG_DIR))
    primary = _primary(typed.get(CONFIG_NAME, _PRIMARY), folder)
    for_hydra = [] if folder is None else [f"hydra.searchpath=[{_quoted(f'file://{folder}')}]"]
    literal: dict[str, Any] = {}
    for key, value in typed.items():
        if key in (CONFIG_DIR, CONFIG_NAME):
            continue
        if is_text(key):
            literal[key] = text_value(key, value)
        elif is_option(key) or (key in keys() and value.startswith("{")):  # Hydra merges no mapping into a list
            literal[key] = option_value(key, value)
        elif is_file(key, value):
            _store(_read(value, f"{key}={value}"), _FROM_A_FILE, group=key)
            for_hydra.append(f"{key}={_FROM_A_FILE}")
        else:
            check_for_hydra(key, value, folder)
            if not (key in OPTIONAL_GROUPS and value == "null"):
                for_hydra.append(f"{key}={value}")
    said = " ".join(f"{key}={value}" for key, value in typed.items() if key not in literal)
    values = _compose_with_hydra(primary, for_hydra, said)
    for key, value in literal.items():
        _assign(values, key, value)
    drafter = values.get("drafter")
    nobody_named_one = isinstance(drafter, dict) and drafter.get("kind") == "auto"
    config = from_mapping(RunConfig, values)
    if nobody_named_one and config.mode is not Mode.AUTOREGRESSIVE and not config.compare.drafters:
        _say_once(DEFAULT_DRAFTERS.get(config.drafter.kind))
    return config


@functools.cache
def _say_once(line: str | None) -> None:
    if line is not None:
        tell(line)


def _own_folder(name: str | None) -> Path | None:
    """The folder of `--config-dir`. Raises `ConfigError`."""
    if name is None:
        return None
    if not Path(name).is_dir():
        raise ConfigError(f"{CONFIG_DIR}={name}: no such folder")
    return Path(name).absolute()


def _primary(name: str, folder: Path | None) -> str:
    """The configuration to start from, as Hydra finds it: its search path is settled after this one is read."""
    name = name.removesuffix(".yaml")
    own = None if folder is None else folder / f"{name}.yaml"
    if name == _PRIMARY:
        return name
    if own is None or not own.is_file():
        raise ConfigError(f"{CONFIG_NAME}={name}: not in {folder or 'any folder; name one with ' + CONFIG_DIR}")
    _store(_read(str(own), f"{CONFIG_NAME}={name}"), name)
    return name


def _read(path: str, said: str) -> DictConfig:
    try:
        node = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{said}: {' '.join(str(error).split())}") from None
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{said}: expected keys and values")
    return node


def _store(node: DictConfig, name: str, group: str | None = None) -> None:
    ConfigStore.instance().store(name=name, node=node, group=group, package=group and "_global_")


def _quoted(text: str) -> str:
    """Any text as one value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _compose_with_hydra(primary: str, overrides: list[str], said: str) -> dict[str, Any]:
    ConfigStore.instance().store(name="amusd_defaults", node=to_mapping(RunConfig()))
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = compose(primary, overrides=overrides)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, yaml.YAMLError) as error:
        reason = (str(error) or str(error.__cause__ or "")).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{said}: {reason[0]}") from None
    return cast("dict[str, Any]", values)


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
    if isinstance(values, dict):  # else a file of the user's has a value in the place of a section, which is refused
        values[name] = value
