"""What a policy knows of the pair at work: running estimates, from outcomes that are decided and times that are past.

acceptance          of a candidate behind the right prefix: accepted / tested, where the first rejected candidate of
a pass was tested and those behind it were not
tokens_per_second   committed, waits included
candidate_seconds   waited for a candidate: all time that was waited, by the candidates that it brought; the first one
behind a verdict that nobody foresaw takes longer than one more behind those at hand
rejection_loss      after a rejection the draft has to start anew more often than after full acceptance; the tokens that
the wait for its first candidate costs then
lead_gain           what one more candidate at hand would have brought the last passes; nothing to those that were full,
or for which none could come
chances             of each candidate at hand, with those before it: the draft's own estimate, corrected by how often
its first candidate is accepted against what it says; where it says nothing, by the acceptance alone
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

from amusd.policies.token_rate import TokenRate

HALF_LIFE = 64
"""Tested candidates after which an outcome counts half."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 4.0
"""What is assumed before anything is known, and how many tested candidates that is worth."""
MEMORY = 0.9
"""Weight of the past in the running estimates of time."""
FORGETTING = 0.98
"""Weight of past waits after each pass, so that waiting is tried again where it has been in vain."""
LEAST_WAIT = 0.05
"""Of a candidate: how many the shortest wait so far always counts for."""
LONGEST_WAIT = 3.0
"""Times the usual: how long a wait lasts, and counts, at most. One stall of the machine must not end all waiting, and
a draft that has become slow is noticed all the same, by and by. Usual is the mean weighted by length, in which waits
that take no time, for the others of several candidates that come at once, do not count."""


class _Waits:
    """Time waited for candidates of one kind."""

    def __init__(self) -> None:
        self._seconds = self._squares = self._num_candidates = 0.0
        self._shortest: float | None = None

    @property
    def seconds(self) -> float:
        """For a candidate; 0 before anything was waited for."""
        if self._shortest is None:
            return self._seconds
        return (self._seconds + LEAST_WAIT * self._shortest) / (self._num_candidates + LEAST_WAIT)

    @property
    def longest(self) -> float:
        """As which a longer one counts; infinite before anything was waited for."""
        return LONGEST_WAIT * self._squares / self._seconds if self._seconds else math.inf

    def waited(self, seconds: float, *, came: bool) -> None:
        """So long, and a candidate came or not."""
        seconds = min(seconds, self.longest)
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + seconds**2
        self._num_candidates = MEMORY * self._num_candidates + came
        if came:
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)

    def passed(self) -> None:
        """A pass is over."""
        self._seconds *= FORGETTING
        self._squares *= FORGETTING
        self._num_candidates *= FORGETTING


class Estimates:
    """Of one drafter under one kind of policy; kept from one answer to the next."""

    def __init__(self) -> None:
        self._num_accepted = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        self._num_tested = PRIOR_WEIGHT
        self._rate = TokenRate(MEMORY)
        self._waits_for_first = _Waits()
        self._waits_for_more = _Waits()
        self._lead_gain = 0.0
        self._foreseen = {True: 0.5, False: 0.5}
        self._num_first = self._said_first = PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        """In (0, 1)."""
        return self._num_accepted / self._num_tested

    @property
    def tokens_per_second(self) -> float:
        """0 before the first pass."""
        return self._rate.tokens_per_second

    def candidate_seconds(self, num_candidates: int) -> float:
        """Where so many are at hand; 0 before anything was waited for."""
        return self._waits(num_candidates).seconds

    def longest_wait(self, num_candidates: int) -> float:
        """Where so many are at hand: seconds after which a candidate is not to be expected any more."""
        return self._waits(num_candidates).longest

    @property
    def rejection_loss(self) -> float:
        """In tokens."""
        less_often = max(0.0, self._foreseen[True] - self._foreseen[False])
        return less_often * self.tokens_per_second * self._waits_for_first.seconds

    @property
    def lead_gain(self) -> float:
        """In tokens; 0 before the first pass."""
        return self._lead_gain

    def chances(self, num_candidates: int, weights: Sequence[float]) -> tuple[float, ...]:
        """`weights`: what the draft says of each candidate at hand, or nothing."""
        if not weights:
            return tuple(self.acceptance**number for number in range(1, num_candidates + 1))
        correction = min(1.0, self._num_first / self._said_first)
        return tuple(accumulate((correction * weight for weight in weights), operator.mul))

    def passed(
        self, *, num_judged: int, num_accepted: int, num_tokens: int, seconds: float, foreseen: bool, gain: float = 0.0
    ) -> None:
        """A pass is over; `seconds` since the one before it was.

        `foreseen`: the draft need not start anew. `gain`: tokens that one more candidate was expected to bring.
        """
        self._lead_gain = MEMORY * self._lead_gain + (1 - MEMORY) * gain
        all_accepted = num_accepted == num_judged
        self._foreseen[all_accepted] = MEMORY * self._foreseen[all_accepted] + (1 - MEMORY) * foreseen
        self._waits_for_first.passed()
        self._waits_for_more.passed()
        num_tested = num_accepted + (num_accepted < num_judged)
        kept = 0.5 ** (num_tested / HALF_LIFE)
        self._num_accepted = kept * self._num_accepted + num_accepted
        self._num_tested = kept * self._num_tested + num_tested
        self._rate.passed(num_tokens, seconds)

    def judged_first(self, weight: float, *, accepted: bool) -> None:
        """The first candidate of a pass was judged, of which the draft had said `weight`."""
        kept = 0.5 ** (1 / HALF_LIFE)
        self._num_first = kept * self._num_first + accepted
        self._said_first = kept * self._said_first + weight

    def waited(self, num_candidates: int, seconds: float, *, came: bool) -> None:
        """With so many at hand; one more came or none."""
        self._waits(num_candidates).waited(seconds, came=came)

    def _waits(self, num_candidates: int) -> _Waits:
        return self._waits_for_more if num_candidates else self._waits_for_first
