"""`python -m amusd`: the command that is installed as `amusd`."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

if __name__ == "__main__":
    commands = entry_points(group="console_scripts", name="amusd")
    sys.exit(next(iter(commands)).load()() if commands else "amusd: not installed; pip install amusd, or `make demo`")
