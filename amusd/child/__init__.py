"""How a process that this package starts finds the package: the parent's very own, wherever that lies."""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(module: str) -> list[str]:
    """Starts a process that runs `main()` of this module of the package."""
    return [sys.executable, str(Path(__file__).absolute().with_name("run.py")), module]
