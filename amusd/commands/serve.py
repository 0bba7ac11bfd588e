"""`amusd serve`: OpenAI's protocol over an engine, until a signal ends it."""

from __future__ import annotations

from collections.abc import Callable

from amusd.config import EngineConfig, RunConfig
from amusd.console import Console
from amusd.engine import Engine
from amusd.errors import MissingDependencyError

INSTALL = "pip install 'amusd[serve]'"


def serve(config: RunConfig, connect: Callable[[EngineConfig], Engine], console: Console) -> int:
    """Serve; returns the exit code. `connect` makes the engine. Raises `ConfigError` for what cannot be had."""
    try:
        from amusd.serving.server import run_server
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"serve: needs {error.name}, which is not installed; {INSTALL}") from None
    run_server(config, connect, lambda line: console.note(f"amusd: {line}"))
    return 0
