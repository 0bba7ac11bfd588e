"""The launcher's own lines: one each, on stderr."""

from __future__ import annotations

import sys


def tell(line: str) -> None:
    r"""Write one line to stderr; line breaks inside it are shown as `\n`."""
    escaped = "\\n".join(line.splitlines())
    sys.stderr.write(f"amusd: {escaped}\n")
    sys.stderr.flush()
