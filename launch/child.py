"""The process that does a rank's work, seen by the rank's own, which starts it, outlives it and knows no torch."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .job import Options

_ASKED_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM})
"""Signals that end a worker in order: nobody has to be told."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has come to its end."""

    pid: int
    code: int
    """Its exit code; minus the signal that ended it."""
    said: str
    """What it wrote to `Options.pipe`."""

    @property
    def killed_by(self) -> int | None:
        """The signal that it did not expect, if one ended it."""
        return -self.code if self.code < 0 and -self.code not in _ASKED_TO_END else None

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.killed_by is not None:
            return f"killed by signal {self.killed_by}"
        return f"exit code {self.code}, for the reason above"


def run_child(options: Options, incarnation: int) -> Ended:
    """Start the process that does the work of this rank, and wait for its end."""
    reading, writing = os.pipe()
    arguments = dataclasses.replace(options, incarnation=incarnation, pipe=writing).arguments()
    command = [sys.executable, str(Path(__file__).with_name("run.py")), *arguments]
    try:
        child = subprocess.Popen(command, pass_fds=(writing,))
    finally:
        os.close(writing)
    with open(reading, encoding="utf-8") as pipe:  # noqa: PTH123 - a descriptor
        code = child.wait()
        return Ended(pid=child.pid, code=code, said=pipe.read())


def say(options: Options, text: str) -> None:
    """The child's: tell the process that has started it, if one has."""
    if options.pipe is not None:
        os.write(options.pipe, text.encode())
