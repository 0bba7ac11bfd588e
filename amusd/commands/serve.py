"""`amusd serve`: an HTTP server."""

from __future__ import annotations

from amusd.commands.job import Job
from amusd.errors import ConfigError


def run(job: Job) -> int:
    """Serve until a signal; return the exit code. Raises `ConfigError` as `run_server`, or without its packages."""
    try:
        from amusd.serving.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: needs {error.name}, which is not installed; pip install 'amusd[serve]'") from None
    run_server(job.config, job.make_engine)
    return 0
