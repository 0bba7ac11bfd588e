"""What the draft's process runs, as a file: so it is the parent's very package, wherever the parent has found that.

The folder that the package lies in is all that is added to where modules are looked for, and only if it is missing
there; the current directory is not looked in.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        del sys.path[0]  # this file's own folder
    _folder = str(Path(__file__).parents[2])
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

    from amusd.runtime.supervisor import main

    main()
