"""The process that does a rank's work, seen by the rank's own, which starts it, outlives it and knows no torch."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

from amusd.child.lives import Ended, Lives

from .job import Options
from .signals import PEER_FAILED

_OWN = frozenset({PEER_FAILED, signal.SIGALRM})
"""Signals that end a worker because the run is over: nobody has to be told."""
_INTERRUPTED = 128
"""Exit code of a worker that a signal asked to end, less that signal."""


def lives_of(options: Options) -> Lives:
    """Of the process that does the work of this rank, one after another."""
    arguments = dataclasses.replace(options, is_child=True).arguments()
    return Lives([sys.executable, str(Path(__file__).with_name("run.py")), *arguments])


def live(lives: Lives) -> Ended:
    """Start the next life, and wait for its end."""
    lives.prepare({})
    lives.start({})
    end = lives.ended(None)
    assert end is not None, "there is no deadline"
    return end


def killer_of(end: Ended) -> int | None:
    """The signal that ended it alone, if one did; who ends the whole run ends the caller too."""
    signum = -end.code if end.code < 0 else end.code - _INTERRUPTED
    return signum if signum > 0 and signum not in _OWN else None


def in_words(end: Ended) -> str:
    """How it ended."""
    killer = killer_of(end)
    return f"exit code {end.code}, for the reason above" if killer is None else f"killed by signal {killer}"
