"""Code from outside the package that a setting names: `MODULE:FUNCTION`, `FILE.py:FUNCTION`, or an entry point.

Naming it runs it, as `import` does. A file is taken from where its path leads; a module is looked for where Python
looks, and so not in the current directory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from amusd.errors import ConfigError
from amusd.settings import nearest, shown

DRAFTERS = "amusd.drafters"
"""The group of entry points that make drafters."""
POLICIES = "amusd.policies"
"""The group of entry points that make policies."""
FORMS = "MODULE:FUNCTION or FILE.py:FUNCTION"
_REFERENCE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):([A-Za-z_][\w.]*)", re.ASCII)
_NAME = re.compile(r"[\w][\w.-]*", re.ASCII)


def is_reference(text: str) -> bool:
    """Whether it is `MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
    return _REFERENCE.fullmatch(text) is not None


def entry_point_names(group: str) -> tuple[str, ...]:
    """The names of the entry points in this group, of all packages that are installed."""
    return tuple(sorted({point.name for point in metadata.entry_points(group=group)}))


def check_named(key: str, named: str, group: str) -> None:
    """Raise `ConfigError` for what cannot name a function. Does not look whether it is there."""
    if not is_reference(named) and _NAME.fullmatch(named) is None:
        raise ConfigError(f"{key}={shown(named)}: expected {FORMS}, or the name of an entry point of {group}")


@functools.cache
def load_function(key: str, named: str, group: str) -> Callable[..., Any]:
    """Import the function that `named` stands for; a file is run once. Raises `ConfigError`, one line."""
    said = f"{key}={shown(named)}"
    reference = named if is_reference(named) else _entry_point(said, named, group)
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigError(f"{said}: its entry point is {shown(reference)}; expected MODULE:FUNCTION")
    try:
        module = _run_file(said, Path(found[1])) if found[1].endswith(".py") else _import(said, found[1])
    except ConfigError:
        raise
    except Exception as error:
        raise failure(key, named, error) from error
    function: Any = module
    for name in found[2].split("."):
        if not hasattr(function, name):
            raise ConfigError(f"{said}: {found[1]} has no {found[2]}{nearest(name, vars(function))}")
        function = getattr(function, name)
    if not callable(function):
        raise ConfigError(f"{said}: {found[2]} is no function, but of type {type(function).__name__}")
    result: Callable[..., Any] = function
    return result


def failure(key: str, named: str, error: Exception) -> ConfigError:
    """One line for what the user's code has raised, with the place; raise it from `error`, which has the rest."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = shown(error)
    return ConfigError(f"{key}={shown(named)}: raises {type(error).__name__}{text and f': {text}'}{place}")


def _entry_point(said: str, name: str, group: str) -> str:
    for point in metadata.entry_points(group=group, name=name):
        return point.value
    names = entry_point_names(group)
    installed = f", or an entry point of {group}: {', '.join(names)}" if names else ""
    raise ConfigError(f"{said}: no installed package has such an entry point of {group}; allowed: {FORMS}{installed}")


def _import(said: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another that is not
        raise ConfigError(
            f"{said}: no module named {error.name}; install its package, put its folder into PYTHONPATH, or write "
            "FILE.py:FUNCTION"
        ) from None


def _run_file(said: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{said}: no such file")
    name = f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "its name ends with .py"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
