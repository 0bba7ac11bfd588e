"""How long to wait for a silent draft, when to remind it, when to replace a lost one. Pure: callers pass the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_NONSENSE = 100
"""The draft counts as lost after this many forbidden messages in a row."""
SILENCES = 10
"""The draft counts as lost when it is silent for this multiple of `max_silence_seconds`."""
MAX_SIGN_SECONDS = 10.0
"""Longest time without a candidate in which a sign of work ends a silence."""
TAKE_IN_SECONDS = 0.02
"""Extra seconds of allowed silence for each token that the draft may have to prefill."""

MAX_RESTARTS = 5
"""Most restarts in a row without an accepted candidate."""
BACK_OFF_SECONDS = 0.25
"""Seconds before the second restart, doubled for each further."""
STEADY_SECONDS = 60.0
"""A draft that was up for this long resets the count of restarts."""


@dataclass
class Restarts:
    """Losses in a row, and the pauses between them. Times are in seconds."""

    not_before: float = 0.0
    """Earliest start of the next draft."""
    _num_fruitless: int = 0
    """Restarts in a row without an accepted candidate."""
    _num_refused: int = 0
    """Tries in a row that a server has not answered."""
    _steady_at: float = math.inf

    def on_met(self, now: float) -> None:
        """A draft has said hello."""
        self._num_refused, self._steady_at = 0, now + STEADY_SECONDS

    def on_accepted(self) -> None:
        """A candidate of the present draft was accepted."""
        self._num_fruitless = 0

    def on_lost(self, now: float, *, counts: bool) -> bool:
        """Count a loss; return whether the target now stays alone. `counts`: False for an absent server."""
        if now >= self._steady_at:
            self._num_fruitless = 0
        self._num_fruitless, self._steady_at = self._num_fruitless + counts, math.inf
        self._num_refused = min(self._num_refused + (not counts), MAX_RESTARTS)
        if (number := self._num_fruitless + self._num_refused) > 1:
            self.not_before = now + BACK_OFF_SECONDS * 2 ** (number - 2)
        return self._num_fruitless > MAX_RESTARTS


class DraftState:
    """State of one sequence at the present draft, and the times of reminders while the draft is silent."""

    def __init__(self, now_ns: int, first_ns: int, incarnation: int) -> None:
        """The draft is told at `now_ns`, and reminded after pauses of `first_ns`, twice that, and so on."""
        self.incarnation = incarnation
        self.is_answered = False
        """Whether the draft ever answered, and so has the opening."""
        self.num_features = 0
        """Number of leading positions whose features the draft has."""
        self.waited_ns = 0
        """How long the sequence has waited since the draft's last answer."""
        self._first_ns = self._pause_ns = first_ns
        self._due_ns = now_ns + first_ns

    def on_answer(self, now_ns: int) -> None:
        """The draft answered."""
        self.is_answered = True
        self.waited_ns = 0
        self._pause_ns = self._first_ns
        self._due_ns = now_ns + self._pause_ns

    def take_reminder(self, now_ns: int) -> bool:
        """Whether a reminder is due. The pause before the next one is twice as long."""
        if now_ns < self._due_ns:
            return False
        self._pause_ns *= 2
        self._due_ns = now_ns + self._pause_ns
        return True


@dataclass(slots=True)
class Silence:
    """How long the present draft has owed an answer."""

    is_too_long: bool = False
    """An answer is overdue."""
    first_unanswered_ns: int | None = None
    """Time of the first unanswered message; None: no answer is due."""
    waited_ns: int = 0
    """How long sequences have waited since the draft's last answer."""
    num_nonsense: int = 0
    first_sign_ns: int | None = None
    """Time of the first sign of work since the draft's last candidate."""

    def end(self, first_sign_ns: int | None = None) -> None:
        """The draft owes no answer any more."""
        self.is_too_long, self.first_unanswered_ns, self.waited_ns, self.num_nonsense = False, None, 0, 0
        self.first_sign_ns = first_sign_ns

    def on_sign(self, now_ns: int) -> bool:
        """Note a sign of work; return whether it ends the silence: not after `MAX_SIGN_SECONDS` without a candidate."""
        first_ns = now_ns if self.first_sign_ns is None else self.first_sign_ns
        if now_ns - first_ns > MAX_SIGN_SECONDS * 1e9:
            self.expect_answer(now_ns)
            return False
        self.end(first_ns)
        return True

    def expect_answer(self, now_ns: int) -> None:
        """The draft owes an answer from now on, or from an earlier message."""
        if self.first_unanswered_ns is None:
            self.first_unanswered_ns = now_ns

    def seconds_left(self, limit_seconds: float) -> float:
        """Seconds left to wait for the draft."""
        return 0.0 if self.is_too_long else max(0, round(limit_seconds * 1e9) - self.waited_ns) / 1e9

    def judge(self, now_ns: int, limit_seconds: float, num_new_tokens: int) -> str | None:
        """Update `is_too_long`; return why the draft counts as lost, or None.

        `num_new_tokens`: tokens of sequences that the draft never answered.
        """
        seconds = 0.0 if self.first_unanswered_ns is None else (now_ns - self.first_unanswered_ns) / 1e9
        was_too_long, self.is_too_long = self.is_too_long, seconds > limit_seconds
        if self.is_too_long and not was_too_long:  # maybe long after the limit, if both processes were stopped
            self.first_unanswered_ns = now_ns - round(limit_seconds * 1e9) - 1
            return None
        is_lost = seconds > SILENCES * limit_seconds + TAKE_IN_SECONDS * num_new_tokens
        return f"it has said nothing for {seconds:.1f} s" if is_lost else None
