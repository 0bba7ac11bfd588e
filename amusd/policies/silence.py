"""How long the target has waited for a draft since it last heard from it. Pure: times come in as arguments.

Only waiting counts: a draft that says nothing while nobody waits for it costs nothing. Once the limit is reached the
target stops waiting altogether, until the draft is heard again; so a draft that is stopped or hangs costs one pause.

What a draft does not answer it may not have got, and it says nothing before it hears something. So it is told again, at
longer and longer intervals: the link of a stopped one must not fill.
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


class Reminder:
    """When to tell a draft again what may have been lost. Times in seconds of one clock."""

    def __init__(self, now: float, first_seconds: float) -> None:
        """It is told now; without an answer again after `first_seconds`, then after twice that, and so on."""
        self._first_seconds = self._seconds = first_seconds
        self._due = now + first_seconds
        self._is_answered = False

    @property
    def is_answered(self) -> bool:
        """The draft has answered at least once, so it has got what it was told first."""
        return self._is_answered

    def heard(self, now: float) -> None:
        """The draft answered."""
        self._is_answered = True
        self._seconds = self._first_seconds
        self._due = now + self._seconds

    def is_due(self, now: float) -> bool:
        """Whether it is to be told now; the next time is later then."""
        if now < self._due:
            return False
        self._seconds *= 2
        self._due = now + self._seconds
        return True
