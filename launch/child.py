"""The process that does a rank's work, seen by the rank's own, which starts it, outlives it and knows no torch."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

from amusd.child.lives import Ended, Lives

from .job import Options

_ASKED_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM})
"""Signals that end a worker in order: nobody has to be told."""


def lives_of(options: Options) -> Lives:
    """Of the process that does the work of this rank, one after another."""
    arguments = dataclasses.replace(options, is_child=True).arguments()
    return Lives([sys.executable, str(Path(__file__).with_name("run.py")), *arguments])


def live(lives: Lives, incarnation: int) -> Ended:
    """Start the next life, and wait for its end."""
    lives.start({"incarnation": incarnation})
    end = lives.ended(None)
    assert end is not None, "there is no deadline"
    return end


def killer_of(end: Ended) -> int | None:
    """The signal that ended it, if one did and it did not expect that."""
    return -end.code if end.code < 0 and -end.code not in _ASKED_TO_END else None


def in_words(end: Ended) -> str:
    """How it ended."""
    killer = killer_of(end)
    return f"exit code {end.code}, for the reason above" if killer is None else f"killed by signal {killer}"
