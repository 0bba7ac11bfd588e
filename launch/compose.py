"""Command line -> `RunConfig`, once, in one process. Hydra reads `conf/`; `amusd/config` has defaults and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.settings import from_mapping, to_mapping

from .keys import conf_folder
from .overrides import OPTIONAL_GROUPS, check_for_hydra, is_text, split, text_value


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one job. Raises `ConfigError`, one line, on the first mistake."""
    for_hydra: list[str] = []
    literal: dict[str, Any] = {}
    for key, value in dict(split(override) for override in overrides).items():  # the last of a key holds
        if is_text(key):
            literal[key] = text_value(key, value)
        else:
            check_for_hydra(key, value)
            if not (key in OPTIONAL_GROUPS and value == "null"):
                for_hydra.append(f"{key}={value}")
    values = _compose_with_hydra(for_hydra)
    for key, value in literal.items():
        _assign(values, key, value)
    return from_mapping(RunConfig, values)


def _compose_with_hydra(overrides: list[str]) -> dict[str, Any]:
    ConfigStore.instance().store(name="amusd_defaults", node=to_mapping(RunConfig()))
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = compose("config", overrides=overrides)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{' '.join(overrides)}: {reason[0]}") from None
    return cast("dict[str, Any]", values)


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        values = values[part]
    values[name] = value
