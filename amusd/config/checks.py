"""Checks of settings. A value out of range is one `ConfigError` line: the key, the value, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amusd.config.plugins import DRAFTERS, check_named
from amusd.errors import ConfigError
from amusd.settings import shown

WITH_CHECKPOINT = ("hf", "eagle", "medusa", "dflash")
"""Kinds of models that are read from a folder or the hub."""
_MAX_SECONDS = 1e6


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless it holds."""
    if not condition:
        raise ConfigError(f"{key}={shown(value)}: {allowed}")


def check_seconds(key: str, value: float) -> None:
    """Raise `ConfigError` unless this is a time that can be waited."""
    require(0 < value <= _MAX_SECONDS, key, value, f"must be above 0 and at most {_MAX_SECONDS:g}")


def check_model(key: str, kind: str, model: str | None) -> None:
    """Raise `ConfigError` unless a checkpoint is named where one is needed, and only there."""
    if kind in WITH_CHECKPOINT and not model:
        raise ConfigError(f"{key}.model: required with {key}={kind} (a folder or hub name of a checkpoint)")
    if kind not in WITH_CHECKPOINT and model:
        allowed = " or ".join(f"{key}={kind}" for kind in WITH_CHECKPOINT) if key == "drafter" else f"{key}=hf"
        raise ConfigError(f"{key}.model={model}: only allowed with {allowed}, not with {key}={kind}")


def check_factory(kind: str, factory: str | None, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless code is named where it makes the drafter, and only there."""
    if kind == "custom":
        if not factory:
            raise ConfigError("drafter.factory: required with drafter=custom (MODULE:FUNCTION or FILE.py:FUNCTION)")
        check_named("drafter.factory", factory, DRAFTERS)
    for key, value in (("factory", factory), ("options", dict(options))):
        require(kind == "custom" or not value, f"drafter.{key}", value, f"only allowed with drafter=custom, not {kind}")
