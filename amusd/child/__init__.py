"""Processes that this package starts and that import the parent's very own copy of it, wherever that lies.

Such a process runs this file: `__init__.py MODULE`. The folder that the package lies in is all that is added to where
modules are looked for, and only if it is missing there; the current directory is not looked in.
"""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(module: str) -> list[str]:
    """Return the command of a process that runs `main()` of this module of the package."""
    return [sys.executable, str(Path(__file__).absolute()), module]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        del sys.path[0]  # this file's own folder

    import importlib

    _folder = str(Path(__file__).parents[2])
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
    importlib.import_module(sys.argv[1]).main()
