"""How long the target has waited for a draft since it last heard from it. Pure: times come in as arguments.

Only waiting counts: a draft that says nothing while nobody waits for it costs nothing. Once the limit is reached the
target stops waiting altogether, until the draft is heard again; so a draft that is stopped or hangs costs one pause.
"""

from __future__ import annotations


class Silence:
    """Adds up the waits in which nothing was heard. Times in seconds."""

    def __init__(self) -> None:
        self._waited_seconds = 0.0

    def waited(self, seconds: float) -> None:
        """So long, in vain as far as is known."""
        self._waited_seconds += seconds

    def heard(self) -> None:
        """The draft said something that makes sense."""
        self._waited_seconds = 0.0

    def seconds_left(self, limit_seconds: float) -> float:
        """How much longer it may be waited for; 0: not at all, it is silent."""
        return max(0.0, limit_seconds - self._waited_seconds)
