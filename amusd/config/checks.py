"""What is out of range is one `ConfigError` line: the key, the value, what is allowed."""

from __future__ import annotations

from amusd.errors import ConfigError
from amusd.settings import shown

_MAX_SECONDS = 1e6
_OF_CHECKPOINTS = ("hf", "cascade")
"""Kinds of models that are a checkpoint of the user's."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless it holds."""
    if not condition:
        raise ConfigError(f"{key}={shown(value)}: {allowed}")


def check_seconds(key: str, value: float) -> None:
    """Raise `ConfigError` unless this is a time that can be waited."""
    require(0 < value <= _MAX_SECONDS, key, value, f"must be above 0 and at most {_MAX_SECONDS:g}")


def check_model(key: str, kind: str, model: str | None) -> None:
    """Raise `ConfigError` unless a checkpoint is named where one is needed, and only there."""
    if kind in _OF_CHECKPOINTS and not model:
        raise ConfigError(
            f"{key}.model: required with {key}={kind} (a folder or hub name of a transformers checkpoint)"
        )
    if kind not in _OF_CHECKPOINTS and model:
        raise ConfigError(f"{key}.model={model}: only allowed with {key}=hf, not with {key}={kind}")
