"""Processes that this package starts and that import the parent's very own copy of it, wherever that lies."""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(module: str) -> list[str]:
    """Return the command of a process that runs `main()` of this module of the package."""
    return [sys.executable, str(Path(__file__).absolute().with_name("run.py")), module]
