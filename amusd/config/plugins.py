"""User code that a setting names: `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

Loading runs the code, as `import` does. Modules are found on Python's path, without the current directory.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from amusd.errors import AmusdError, ConfigError
from amusd.settings import shown

_PACKAGE = Path(__file__).parents[1]
_REFERENCE = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*", re.ASCII)


def is_reference(text: str) -> bool:
    """Whether `text` has the form `MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
    return _REFERENCE.fullmatch(text) is not None


def load_function(key: str, named: str) -> Callable[..., Any]:
    """Import the function of the reference `named`; a file is run once. Raises `ConfigError`, one line."""
    place, _, name = named.rpartition(":")
    with failing_in_one_line(key, named):
        module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function: Callable[..., Any] = operator.attrgetter(name)(module)
    if not callable(function):
        raise ConfigError(f"{key}={shown(named)}: {name} is no function, but of type {type(function).__name__}")
    return function


def call(key: str, named: str, kinds: tuple[Any, ...], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return a user function's result. Raises `ConfigError`, one line, for an error or a result not of `kinds`."""
    with failing_in_one_line(key, named):
        made = function(*args, **options)
    if not isinstance(made, kinds):
        expected = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise ConfigError(f"{key}={shown(named)}: returns {shown(repr(made))}; expected {expected}")
    return made


@contextmanager
def failing_in_one_line(key: str, named: str) -> Iterator[None]:
    """Turn an error in user code into a `ConfigError` that names the place and is raised from the error."""
    try:
        yield
    except AmusdError:
        raise
    except Exception as error:
        found = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in found if not Path(frame.filename).is_relative_to(_PACKAGE)]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raised = f"{type(error).__name__}: {shown(error)}".removesuffix(": ")
        raise ConfigError(f"{key}={shown(named)}: raises {raised}{place}") from error


@functools.cache
def _run_file(path: Path) -> ModuleType:
    name = f"own_{path.stem}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    SourceFileLoader(name, str(path)).exec_module(module)
    return module
