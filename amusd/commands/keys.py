"""`amusd keys`: keys for a link between machines."""

from __future__ import annotations

from pathlib import Path

from amusd.logs import logger
from amusd.transport.curve import write_keys


def run(folder: Path) -> int:
    """Write the keys into a new folder; return the exit code. Raises `ConfigError`."""
    write_keys(folder)
    logger.info(f"keys: {folder}; each machine needs its own role's .key_secret and the other role's .key")
    return 0
