"""What a policy knows of the pair at work: running estimates, from outcomes that are decided and times that are past.

acceptance          of a candidate behind the right prefix: accepted / tested, where the first rejected candidate of
a pass was tested and those behind it were not
tokens_per_second   committed, waits included
candidate_seconds   from the decision to wait until the next candidate; the first one behind a verdict that nobody
foresaw takes longer than one more behind those at hand
path_chance         of all candidates at hand: the draft's own estimate, corrected by how often its first candidate
is accepted against what it says; where it says nothing, by the acceptance alone
"""

from __future__ import annotations

import math
from collections.abc import Sequence

HALF_LIFE = 64
"""Tested candidates after which an outcome counts half."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 4.0
"""What is assumed before anything is known, and how many tested candidates that is worth."""
MEMORY = 0.9
"""Weight of the past in the running estimates of time."""


class Estimates:
    """Of one drafter under one kind of policy; kept from one answer to the next."""

    def __init__(self) -> None:
        self._num_accepted = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        self._num_tested = PRIOR_WEIGHT
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._candidate_seconds: dict[bool, float] = {}
        self._num_first = self._said_first = PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        """In (0, 1)."""
        return self._num_accepted / self._num_tested

    @property
    def tokens_per_second(self) -> float:
        """0 before the first pass."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def candidate_seconds(self, num_candidates: int) -> float:
        """Where so many are at hand; 0 before anything was waited for."""
        return self._candidate_seconds.get(num_candidates == 0, 0.0)

    def path_chance(self, num_candidates: int, weights: Sequence[float]) -> float:
        """`weights`: what the draft says of each candidate at hand, or nothing."""
        if not weights:
            return self.acceptance**num_candidates
        return math.prod(weights) * min(1.0, self._num_first / self._said_first) ** len(weights)

    def passed(self, *, num_judged: int, num_accepted: int, num_tokens: int, seconds: float) -> None:
        """A pass is over; `seconds` since the one before it was."""
        num_tested = num_accepted + (num_accepted < num_judged)
        kept = 0.5 ** (num_tested / HALF_LIFE)
        self._num_accepted = kept * self._num_accepted + num_accepted
        self._num_tested = kept * self._num_tested + num_tested
        self._num_tokens = MEMORY * self._num_tokens + num_tokens
        self._seconds = MEMORY * self._seconds + seconds

    def judged_first(self, weight: float, *, accepted: bool) -> None:
        """The first candidate of a pass was judged, of which the draft had said `weight`."""
        kept = 0.5 ** (1 / HALF_LIFE)
        self._num_first = kept * self._num_first + accepted
        self._said_first = kept * self._said_first + weight

    def waited(self, num_candidates: int, seconds: float) -> None:
        """One more candidate came after this long."""
        is_first = num_candidates == 0
        before = self._candidate_seconds.get(is_first, seconds)
        self._candidate_seconds[is_first] = MEMORY * before + (1 - MEMORY) * seconds
