"""Lines for people. All go to one logger, which the command line shows on standard error."""

from __future__ import annotations

import logging
import os
import sys
from functools import lru_cache
from typing import TextIO

logger = logging.getLogger("amusd")


@lru_cache(maxsize=1000)
def warn_once(line: str) -> None:
    """Log a warning, unless the last thousand of this process include it."""
    logger.warning("%s", line)


def show_lines() -> None:
    """Show log lines on standard error only. Idempotent. For programs, not for the library."""
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class LineHandler(logging.Handler):
    """Writes each record to standard error as one line, above the progress line."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message, its line breaks escaped."""
        message = "\\n".join(record.getMessage().splitlines())
        self._replace(f"amusd: {message}\n", self._progress)

    def show_progress(self, label: str, done: int, num_steps: int) -> None:
        """Show progress: one line, rewritten, on a terminal; elsewhere a line for each tenth."""
        if sys.stderr.isatty():
            filled = 20 * done // num_steps
            self._replace("", f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{num_steps}  {label}"[:110])
        elif 10 * done // num_steps != 10 * (done - 1) // num_steps:
            self._replace(f"{done}/{num_steps}  {label}\n", "")

    def end_progress(self) -> None:
        """Wipe the progress line."""
        self._replace("", "")

    def _replace(self, text: str, progress: str) -> None:
        assert self.lock is not None, "a handler has one"
        with self.lock:
            wiped = f"\r{' ' * len(self._progress)}\r" if self._progress else ""
            self._progress = progress
            write_at_once(sys.stderr, f"{wiped}{text}{progress}")


_lines = LineHandler()
show_progress, end_progress = _lines.show_progress, _lines.end_progress


def write_at_once(out: TextIO, text: str) -> OSError | None:
    """Write and flush; return the error if it fails (`amusd ... | head`). All further text then goes to /dev/null."""
    try:
        out.write(text)
        out.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
        return error
    return None
