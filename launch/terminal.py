"""The launcher's own lines: one each, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from amusd.console import discard

WAIT_LINE_SECONDS = 10.0
"""Between two lines about the same wait."""
_END_SECONDS = 1.0


def tell(line: str) -> None:
    r"""Write one line to stderr; line breaks inside it are shown as `\n`."""
    escaped = "\\n".join(line.splitlines())
    try:
        sys.stderr.write(f"amusd: {escaped}\n")
        sys.stderr.flush()
    except OSError:  # nobody can be told
        discard(sys.stderr)


@contextmanager
def waiting_for(what: str, seconds: float | None = None) -> Iterator[None]:
    """Say what is waited for and how much longer, at once and every few seconds while inside; then, that it is done.

    `seconds`: the deadline, if it is known. A wait that an exception ends says no more. Leaves no thread.
    """
    began, over = time.monotonic(), threading.Event()

    def go_on_telling() -> None:
        while not over.wait(WAIT_LINE_SECONDS):
            passed = time.monotonic() - began
            how_long = f"{passed:.0f} s so far" if seconds is None else f"{max(0.0, seconds - passed):.0f} s left"
            tell(f"still waiting for {what}: {how_long}")

    tell(f"waiting for {what}{'' if seconds is None else f': {seconds:.0f} s at most'}")
    thread = threading.Thread(target=go_on_telling, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_SECONDS)
    tell(f"waited {time.monotonic() - began:.0f} s for {what}: done")
