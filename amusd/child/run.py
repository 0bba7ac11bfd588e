"""The file that such a process runs: `run.py MODULE`.

The folder that the package lies in is all that is added to where modules are looked for, and only if it is missing
there; the current directory is not looked in. What the child imports first is its module's affair.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        del sys.path[0]  # this file's own folder

    import importlib
    from pathlib import Path

    _folder = str(Path(__file__).parents[2])
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
    importlib.import_module(sys.argv[1]).main()
