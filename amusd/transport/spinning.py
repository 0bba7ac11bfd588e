"""Looking for a message before sleeping for it: being woken costs both ends more than the way through a link does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_SECONDS = 0.002
"""How long a receiver looks; about what a fast drafter takes for a token, so that waits in mid-answer end within it."""


def give_way() -> None:
    """Let others who wait for this core run first, where the system can do that."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def spin(has_news: Callable[[], bool], deadline: float) -> bool:
    """Look until there is news, at most until `deadline` (monotonic seconds); whether there is.

    Each look gives the core away first: where the other end runs on the same core, this is how it gets its turn.
    """
    if not hasattr(os, "sched_yield"):
        return False
    until = min(deadline, time.monotonic() + SPIN_SECONDS)
    while time.monotonic() < until:
        os.sched_yield()
        if has_news():
            return True
    return False
