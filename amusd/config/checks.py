"""What is out of range is one `ConfigError` line: the key, the value, what is allowed."""

from __future__ import annotations

from amusd.errors import ConfigError


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless it holds."""
    if not condition:
        raise ConfigError(f"{key}={value}: {allowed}")


def check_model(key: str, kind: str, model: str | None) -> None:
    """Raise `ConfigError` unless a checkpoint is named where one is needed, and only there."""
    if kind == "hf" and not model:
        raise ConfigError(f"{key}.model: required with {key}=hf (a folder or hub name of a transformers checkpoint)")
    if kind != "hf" and model:
        raise ConfigError(f"{key}.model={model}: only allowed with {key}=hf, not with {key}={kind}")
