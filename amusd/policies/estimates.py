"""Running estimates of the pair at work, from outcomes that are decided and times that are past.

acceptance          acceptance rate of candidates behind the right prefix: accepted / tested. The first rejected
                    candidate of a pass was tested, those behind it were not
tokens_per_second   committed tokens per second, waits included
candidate_seconds   wait for one more candidate: all time waited, divided by the candidates that it brought. The first
                    one behind a verdict that was not foreseen takes longer than one more behind those at hand
lead_gain           tokens that one more candidate at its beginning would have brought a recent pass; 0 for passes that
                    were full, or for which none could come
chances             probability, for each candidate at hand, that it and those before it are accepted: the draft's own
                    estimate, corrected by how often its first candidate is accepted compared with it; a power of the
                    acceptance if the draft gives none
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

OUTCOME_MEMORY = 0.5 ** (1 / 64)
"""Weight of past outcomes after each tested candidate: an outcome counts half after 64."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 4.0
"""The acceptance assumed at first, and the number of tested candidates that this assumption is worth."""
MEMORY = 0.9
"""Weight of the past in the running estimates of time, for each pass or wait."""
FORGETTING = 0.98
"""Weight of past waits after each pass, so that waiting is tried again where it was in vain."""
LEAST_WAIT = 0.05
"""Weight of the shortest wait so far, in candidates."""
LONGEST_WAIT = 3.0
"""The longest that a wait lasts, and counts, as a multiple of the usual wait: one stall of the machine must not end all
waiting, and a draft that has become slow is noticed by and by. The usual wait is the mean weighted by length, in which
waits of no length, for further candidates of several that come at once, do not count."""
ROW_MEMORY = 0.98
"""Weight of the past in the cost of a row, for each pass."""
DRAFT_ROW_SHARE = 0.06
"""The cost of a further row as a share of a draft step with one row, before steps of different sizes were seen."""
ROW_FORGETTING = 0.99
"""Weight of the known cost of a row after each pass that says nothing of it."""
MIN_ROW_VARIATION = 8.0
"""The least weighted sum of squared deviations of the number of rows that a line is fitted to."""


class RunningRatio:
    """A sum divided by another one, the past weighing less in both: tokens by seconds, accepted by tested."""

    def __init__(self, memory: float, numerator: float = 0.0, denominator: float = 0.0) -> None:
        """`memory`: weight of the past after one addition. The other two: what to begin with."""
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
    """Waits for candidates of one kind: the first of a pass, or one more."""

    def __init__(self) -> None:
        self._seconds = self._squares = self._num_candidates = 0.0
        self._shortest: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds for each candidate; 0 before the first wait."""
        if self._shortest is None:
            return self._seconds
        return (self._seconds + LEAST_WAIT * self._shortest) / (self._num_candidates + LEAST_WAIT)

    @property
    def longest(self) -> float:
        """The most seconds that a wait counts for; infinite before the first one."""
        return LONGEST_WAIT * self._squares / self._seconds if self._seconds else math.inf

    def waited(self, seconds: float, *, came: bool) -> None:
        """Take in a wait, which brought a candidate or not."""
        seconds = min(seconds, self.longest)
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + seconds**2
        self._num_candidates = MEMORY * self._num_candidates + came
        if came:
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)

    def passed(self) -> None:
        """Forget a little, as a pass is over."""
        self._seconds *= FORGETTING
        self._squares *= FORGETTING
        self._num_candidates *= FORGETTING


class Estimates:
    """The estimates of one drafter under one kind of policy; kept from one answer to the next."""

    def __init__(self) -> None:
        self._acceptance = RunningRatio(OUTCOME_MEMORY, PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self._correction = RunningRatio(OUTCOME_MEMORY, PRIOR_WEIGHT, PRIOR_WEIGHT)
        """First candidates that were accepted, to those that the draft's own estimates promised."""
        self._token_rate = RunningRatio(MEMORY)
        self._waits_for_first = _Waits()
        self._waits_for_more = _Waits()
        self.lead_gain = 0.0
        """The gain of one more candidate at the beginning of a pass, in tokens; 0 before the first pass."""

    @property
    def acceptance(self) -> float:
        """The acceptance rate behind the right prefix, in (0, 1)."""
        return self._acceptance.value

    @property
    def tokens_per_second(self) -> float:
        """0 before the first pass."""
        return self._token_rate.value

    def candidate_seconds(self, num_candidates: int) -> float:
        """Return the wait for one more than `num_candidates`; 0 before the first wait."""
        return self._waits(num_candidates).seconds

    def longest_wait(self, num_candidates: int) -> float:
        """Return the seconds after which one more than `num_candidates` is not expected any more."""
        return self._waits(num_candidates).longest

    def chances(self, num_candidates: int, weights: Sequence[float]) -> tuple[float, ...]:
        """Return the chance of each candidate at hand. `weights`: the draft's own estimates, or nothing."""
        if not weights:
            return tuple(self.acceptance**number for number in range(1, num_candidates + 1))
        correction = min(1.0, self._correction.value)
        return tuple(accumulate((correction * weight for weight in weights), operator.mul))

    def passed(self, *, num_judged: int, num_accepted: int, num_tokens: int, seconds: float, gain: float = 0.0) -> None:
        """Take in a pass that ended `seconds` after the one before it.

        `gain`: tokens that one more candidate was expected to bring.
        """
        self.lead_gain = MEMORY * self.lead_gain + (1 - MEMORY) * gain
        self._waits_for_first.passed()
        self._waits_for_more.passed()
        num_tested = num_accepted + (num_accepted < num_judged)
        self._acceptance.add(num_accepted, num_tested, num_tested)
        self._token_rate.add(num_tokens, seconds)

    def judged_first(self, weight: float, *, accepted: bool) -> None:
        """Take in how the first candidate of a pass was judged, whose probability the draft had put at `weight`."""
        self._correction.add(accepted, weight)

    def waited(self, num_candidates: int, seconds: float, *, came: bool) -> None:
        """Take in a wait with `num_candidates` at hand, which brought one more or none."""
        self._waits(num_candidates).waited(seconds, came=came)

    def _waits(self, num_candidates: int) -> _Waits:
        return self._waits_for_more if num_candidates else self._waits_for_first


class RowCost:
    """The time that a further row adds to a pass of a model, found from passes themselves.

    Rows of one pass share its fixed cost (weights are read once), so the first ones are nearly free; how nearly depends
    on model and machine. It is the slope of a straight line through recent passes, the past weighing less: time over
    rows. The steps of a draft have one line, the passes of a target another.
    """

    def __init__(self, prior_row_share: float = 0.0) -> None:
        """`prior_row_share`: the share assumed until passes of different sizes were seen."""
        self._num = self._rows = self._ns = self._rows_squared = self._rows_ns = 0.0
        self.row_share = prior_row_share
        """The time of a further row as a share of a pass with one row, in [0, 1]."""
        self.row_ns = 0.0
        """The time of a further row in nanoseconds; 0 before passes of different sizes were seen."""

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
