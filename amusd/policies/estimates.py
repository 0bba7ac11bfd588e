"""Running estimates of the pair at work, from outcomes that are decided and times that are past.

acceptance          accepted / tested candidates behind the right prefix; those behind a rejected one were not tested
tokens_per_second   committed tokens per second, waits included
candidate_seconds   all time waited, divided by the candidates that it brought. The first one behind a verdict that was
                    not foreseen takes longer than one more behind those at hand
lead_gain           tokens that one more candidate at its beginning would have brought a recent pass; 0 for passes that
                    were full, or for which none could come
chances             probability, for each candidate at hand, that it and those before it are accepted: the draft's own
                    estimate, corrected by how often its first candidate is accepted; else a power of the acceptance
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

from amusd.protocol.verification import PassOutcome

OUTCOME_MEMORY = 0.5 ** (1 / 64)
"""Weight of past outcomes after each tested candidate."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 4.0
"""The acceptance assumed at first, and how many tested candidates that is worth."""
MEMORY = 0.9
"""Weight of the past in estimates of time, for each pass or wait."""
FORGETTING = 0.98
"""Weight of past waits after each pass, so that waiting is tried again."""
LEAST_WAIT = 0.05
"""Weight of the shortest wait so far, in candidates."""
LONGEST_WAIT = 3.0
"""The longest that a wait lasts, and counts, in usual waits: one stall of the machine must not end all waiting. The
usual wait is the mean weighted by length: waits of no length, for candidates that come together, do not count."""
ROW_MEMORY = 0.98
"""Weight of the past in the cost of a row, for each pass."""
DRAFT_ROW_SHARE = 0.06
"""The share assumed for a draft step before steps of different sizes were seen."""
ROW_FORGETTING = 0.99
"""Weight of the known cost of a row after each pass that says nothing of it."""
MIN_ROW_VARIATION = 8.0
"""The least weighted sum of squares of the number of rows that a line is fitted to."""


class RunningRatio:
    """A sum divided by another one, the past weighing less in both."""

    def __init__(self, memory: float, numerator: float = 0.0, denominator: float = 0.0) -> None:
        """`memory`: weight of the past after one addition. The other two: the first sums."""
        self._memory = memory
        self._numerator, self._denominator = numerator, denominator

    @property
    def value(self) -> float:
        """0 before anything was added."""
        return self._numerator / self._denominator if self._denominator else 0.0

    def add(self, numerator: float, denominator: float, num_times: float = 1) -> None:
        """Add to both sums. `num_times`: how many additions it counts for, as to forgetting."""
        kept = self._memory**num_times
        self._numerator = kept * self._numerator + numerator
        self._denominator = kept * self._denominator + denominator


class _Waits:
    """Waits for the first candidate of a pass, or for one more."""

    def __init__(self) -> None:
        self._seconds = self._squares = self._num_candidates = 0.0
        self._shortest: float | None = None

    @property
    def seconds(self) -> float:
        if self._shortest is None:
            return self._seconds
        return (self._seconds + LEAST_WAIT * self._shortest) / (self._num_candidates + LEAST_WAIT)

    @property
    def longest(self) -> float:
        return LONGEST_WAIT * self._squares / self._seconds if self._seconds else math.inf

    def waited(self, seconds: float, *, came: bool) -> None:
        seconds = min(seconds, self.longest)
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + seconds**2
        self._num_candidates = MEMORY * self._num_candidates + came
        if came:
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)

    def passed(self) -> None:
        self._seconds *= FORGETTING
        self._squares *= FORGETTING
        self._num_candidates *= FORGETTING


class Estimates:
    """The estimates of one drafter under one kind of policy; kept from one answer to the next."""

    def __init__(self) -> None:
        self.acceptance = RunningRatio(OUTCOME_MEMORY, PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self._correction = RunningRatio(OUTCOME_MEMORY, PRIOR_WEIGHT, PRIOR_WEIGHT)
        self.tokens_per_second = RunningRatio(MEMORY)
        self._waits = _Waits(), _Waits()
        self.lead_gain = 0.0
        """The gain of one more candidate at the beginning of a pass, in tokens; 0 before the first pass."""

    def candidate_seconds(self, num_candidates: int) -> float:
        """The wait for one more than `num_candidates`; 0 before the first wait."""
        return self._waits[num_candidates > 0].seconds

    def longest_wait(self, num_candidates: int) -> float:
        """The time after which one more than `num_candidates` is not expected any more."""
        return self._waits[num_candidates > 0].longest

    def chances(self, num_candidates: int, weights: Sequence[float]) -> tuple[float, ...]:
        """The chance of each candidate at hand. `weights`: the draft's own estimates, or nothing."""
        if not weights:
            return tuple(self.acceptance.value**number for number in range(1, num_candidates + 1))
        correction = min(1.0, self._correction.value)
        return tuple(accumulate((correction * weight for weight in weights), operator.mul))

    def passed(
        self, outcome: PassOutcome, seconds: float, *, gain: float = 0.0, first_weight: float | None = None
    ) -> None:
        """Take in a pass that ended `seconds` after the one before it.

        `gain`: tokens that one more candidate was expected to bring; `first_weight`: the probability of the first
        candidate at hand by the draft, if it gave any.
        """
        self.lead_gain = MEMORY * self.lead_gain + (1 - MEMORY) * gain
        for waits in self._waits:
            waits.passed()
        num_tested = outcome.num_accepted + (outcome.num_accepted < outcome.num_judged)
        self.acceptance.add(outcome.num_accepted, num_tested, num_tested)
        self.tokens_per_second.add(outcome.num_tokens, seconds)
        if outcome.num_candidates and first_weight is not None:
            self._correction.add(outcome.num_accepted > outcome.num_accepted_alternatives, first_weight)

    def waited(self, num_candidates: int, seconds: float, *, came: bool) -> None:
        """Take in a wait with `num_candidates` at hand, which brought one more or none."""
        self._waits[num_candidates > 0].waited(seconds, came=came)


class RowCost:
    """The time that a further row adds to a pass of a model: the slope of a line through recent passes, time over rows.

    Rows of one pass share its fixed cost (weights are read once), so the first ones are nearly free.
    """

    def __init__(self, prior_row_share: float = 0.0) -> None:
        """`prior_row_share`: the share assumed until passes of different sizes were seen."""
        self._num = self._rows = self._ns = self._rows_squared = self._rows_ns = 0.0
        self.row_share = prior_row_share
        """The cost of a further row as a share of a pass with one row, in [0, 1]."""
        self.row_ns = 0.0
        """The cost in nanoseconds; 0 before passes of different sizes were seen."""

    def passed(self, num_rows: int, ns: int) -> None:
        """Take in a pass over `num_rows` that took `ns`."""
        self._num = ROW_MEMORY * self._num + 1
        self._rows = ROW_MEMORY * self._rows + num_rows
        self._ns = ROW_MEMORY * self._ns + ns
        self._rows_squared = ROW_MEMORY * self._rows_squared + num_rows**2
        self._rows_ns = ROW_MEMORY * self._rows_ns + num_rows * ns
        variation = self._rows_squared - self._rows**2 / self._num
        most_ns = ns / num_rows  # as if rows shared nothing
        if variation < MIN_ROW_VARIATION:
            # a cost that is too high keeps rows away, and with them the passes that would correct it
            self.row_ns = min(ROW_FORGETTING * self.row_ns, most_ns)
            return
        slope = (self._rows_ns - self._rows * self._ns / self._num) / variation
        one_row = self._ns / self._num + slope * (1 - self._rows / self._num)
        self.row_ns = min(max(0.0, slope), most_ns)
        self.row_share = min(1.0, max(0.0, slope / one_row)) if one_row > 0 else 1.0
