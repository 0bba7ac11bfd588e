"""Running estimates that the target and the draft draw from their passes, steps and waits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate

from amusd.policies.base import TargetView
from amusd.protocol.verification import PassOutcome

MEMORY = 0.9
"""Weight of the past in estimates of time, per pass or wait."""


class RunningRatio:
    """The ratio of two exponentially decaying sums."""

    def __init__(self, memory: float, numerator: float = 0.0, denominator: float = 0.0) -> None:
        """`memory`: factor on both sums per addition; the others: initial sums."""
        self._memory = memory
        self._numerator, self._denominator = numerator, denominator

    @property
    def value(self) -> float:
        """The ratio; 0 before any addition."""
        return self._numerator / self._denominator if self._denominator else 0.0

    def add(self, numerator: float, denominator: float, num_times: float = 1) -> None:
        """Add to both sums after `num_times` decays."""
        kept = self._memory**num_times
        self._numerator = kept * self._numerator + numerator
        self._denominator = kept * self._denominator + denominator


FORGETTING = 0.98
"""Weight of past waits after each pass; below 1, so that waiting is tried again."""
PRIOR_WAITS = 0.3
"""Weight, in candidates, of a prior from the draft's step time: keeps estimates finite while no candidate comes."""
LONGEST_WAIT = 3.0
"""Longest wait, in usual waits. Longer ones count as this long: one stall must not end all waiting.

The usual wait is the mean weighted by length.
"""


class Waits:
    """How long the target waits for one more candidate."""

    def __init__(self, num_steps: float) -> None:
        """`num_steps`: assumed length of a wait, in steps of the draft."""
        self._num_steps = num_steps
        self._seconds = self._squares = self._num_candidates = self._step_seconds = 0.0

    @property
    def candidate_seconds(self) -> float:
        """The estimated wait for one candidate; 0: unknown."""
        prior_seconds = PRIOR_WAITS * self._num_steps * self._step_seconds
        return (self._seconds + prior_seconds) / (self._num_candidates + PRIOR_WAITS)

    @property
    def longest_seconds(self) -> float:
        """The wait after which no candidate is expected any more."""
        return LONGEST_WAIT * self._squares / self._seconds if self._seconds else math.inf

    def on_wait(self, seconds: float, *, came: bool) -> None:
        """Take in a wait; `came`: whether a candidate came."""
        seconds = min(seconds, self.longest_seconds)
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + seconds**2
        self._num_candidates = MEMORY * self._num_candidates + came

    def on_step(self, step_seconds: float) -> None:
        """Take in the time of a draft step. The shortest counts, as it had no stall."""
        self._step_seconds = min(self._step_seconds or math.inf, step_seconds)

    def on_pass(self) -> None:
        """Forget a part of past waits."""
        self._seconds *= FORGETTING
        self._squares *= FORGETTING
        self._num_candidates *= FORGETTING


OUTCOME_MEMORY = 0.5 ** (1 / 64)
"""Weight of the past in the acceptance rate, per tested candidate, and in its correction, per pass."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 4.0
"""The assumed acceptance, and its weight in tested candidates."""
STEP_DONE = 0.5
"""Average share of the draft's step that is done when the target could begin a pass."""


class Estimates:
    """Estimates of one drafter under one kind of policy; kept between answers.

    acceptance          accepted / tested candidates; none is tested after a rejected one
    tokens_per_second   committed tokens per second, waits included
    lead_gain           tokens that one more candidate at the beginning would add to a pass; 0 if the pass was full, or
                        none could come
    """

    def __init__(self) -> None:
        self.acceptance = RunningRatio(OUTCOME_MEMORY, PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self._correction = RunningRatio(OUTCOME_MEMORY, PRIOR_WEIGHT, PRIOR_WEIGHT)
        self.tokens_per_second = RunningRatio(MEMORY)
        self._first_waits, self._further_waits = Waits(1.0), Waits(STEP_DONE)
        self.lead_gain = 0.0

    def waits(self, num_candidates: int) -> Waits:
        """Waits with this many candidates at hand; the first candidate takes longer than a further one."""
        return self._further_waits if num_candidates else self._first_waits

    def on_step(self, step_seconds: float) -> None:
        """Take in the time of a step of the draft."""
        self._first_waits.on_step(step_seconds)
        self._further_waits.on_step(step_seconds)

    def chances(self, num_candidates: int, weights: Sequence[float]) -> tuple[float, ...]:
        """For each candidate at hand, the chance that it and all before it are accepted.

        `weights`: the draft's estimates, which are corrected by the acceptance of earlier first candidates. Without
        weights, each candidate has the acceptance rate.
        """
        if not weights:
            return tuple(self.acceptance.value**number for number in range(1, num_candidates + 1))
        return tuple(accumulate((min(1.0, self._correction.value) * weight for weight in weights), operator.mul))

    def on_pass(self, outcome: PassOutcome, seconds: float, view: TargetView) -> None:
        """Take in a pass that was begun on `view`, and ended `seconds` after the previous one."""
        self.lead_gain = MEMORY * self.lead_gain + (1 - MEMORY) * (view.gain if view.can_grow else 0.0)
        self._first_waits.on_pass()
        self._further_waits.on_pass()
        num_tested = outcome.num_accepted + (outcome.num_accepted < outcome.num_judged)
        self.acceptance.add(outcome.num_accepted, num_tested, num_tested)
        self.tokens_per_second.add(outcome.num_tokens, seconds)
        if outcome.num_candidates and view.weights:
            self._correction.add(outcome.num_accepted > outcome.num_accepted_alternatives, view.weights[0])


ROW_MEMORY = 0.98
"""Weight of the past in the cost of a row, per pass or step."""
OUTLIER = 5.0
"""A pass or step counts as stalled above this multiple of the usual time and of the usual time per row."""
DRAFT_ROW_SHARE = 0.06
"""Row share of a draft step, assumed before steps of different sizes. Measured on the embedded draft."""
ROW_FORGETTING = 0.99
"""Factor on the row cost after a pass that cannot measure it."""
MIN_ROW_VARIATION = 8.0
"""Least weighted sum of squared deviations of the row count for a fit."""


def without_stall(seconds: float, usual_seconds: float) -> float:
    """`seconds`, but at most `OUTLIER` times `usual_seconds` (0: unknown)."""
    return min(seconds, OUTLIER * usual_seconds or math.inf)


class RowCost:
    """The time that a further row adds to a pass: the slope of a line fitted to recent passes, time over rows."""

    def __init__(self, prior_row_share: float = 0.0) -> None:
        """`prior_row_share`: the share assumed before passes of different sizes."""
        self._sums: tuple[float, ...] = (0.0,) * 5
        """Decaying sums over passes: number, rows, nanoseconds, rows squared, and rows times nanoseconds."""
        self.row_share = prior_row_share
        """Cost of a further row as a share of a pass with one row, in [0, 1]."""
        self.row_ns = 0.0
        """Nanoseconds of a further row; 0 before passes of different sizes."""

    def add(self, num_rows: int, ns: int) -> None:
        """Take in a pass over `num_rows` that took `ns`."""
        num, sum_rows, sum_ns, *_ = self._sums
        if num >= 1 and ns > OUTLIER * sum_ns * max(1 / num, num_rows / sum_rows):
            self._sums = tuple(ROW_MEMORY * past for past in self._sums)  # the old sums fade: a lasting slowdown counts
            return
        added = 1, num_rows, ns, num_rows**2, num_rows * ns
        self._sums = tuple(ROW_MEMORY * past + new for past, new in zip(self._sums, added, strict=True))
        num, sum_rows, sum_ns, sum_squares, sum_products = self._sums
        variation = sum_squares - sum_rows**2 / num
        most_ns = ns / num_rows  # as if rows shared nothing
        if variation < MIN_ROW_VARIATION:
            # decays, since a cost that is too high prevents the large passes that would correct it
            self.row_ns = min(ROW_FORGETTING * self.row_ns, most_ns)
            return
        slope = (sum_products - sum_rows * sum_ns / num) / variation
        one_row = sum_ns / num + slope * (1 - sum_rows / num)
        self.row_ns = min(max(0.0, slope), most_ns)
        self.row_share = min(1.0, max(0.0, slope / one_row)) if one_row > 0 else 1.0


VERDICT_MEMORY = 0.8
"""Weight of the past in a draft's estimates of time, per pass or step."""
FORESEEN_MEMORY = 0.95
"""Weight of the past in the share of foreseen verdicts."""
DEVIATIONS = 2.0
"""Longest wait for a late verdict, in mean deviations."""


class VerdictClock:
    """When a draft's next verdict is due, and whether to wait for it instead of stepping. Times in nanoseconds.

    A step during which a verdict arrives is useful if the verdict was foreseen; else it delays the next candidates. So
    a draft whose next step would overlap the verdict waits, unless the step's expected gain exceeds its loss.
    """

    def __init__(self) -> None:
        self._pass_start_ns: int | None = None
        self._pass_ns = self._deviation_ns = self._step_ns = 0.0  # 0: nothing is known
        self._foreseen = 0.5

    def on_verdict(self, now_ns: int, *, goes_on: bool) -> None:
        """Take in a verdict. `goes_on`: it was foreseen, and the target starts its next pass at once."""
        self._foreseen = FORESEEN_MEMORY * self._foreseen + (1 - FORESEEN_MEMORY) * goes_on
        if self._pass_start_ns is not None:
            pass_ns = now_ns - self._pass_start_ns
            usual_ns = self._pass_ns or pass_ns
            self._deviation_ns = VERDICT_MEMORY * self._deviation_ns + (1 - VERDICT_MEMORY) * abs(pass_ns - usual_ns)
            self._pass_ns = VERDICT_MEMORY * usual_ns + (1 - VERDICT_MEMORY) * pass_ns
        self._pass_start_ns = now_ns if goes_on else None

    def on_candidates(self, now_ns: int) -> None:
        """Candidates were sent: a target that waited for them starts its pass."""
        if self._pass_start_ns is None:
            self._pass_start_ns = now_ns

    def on_step(self, duration_ns: int) -> None:
        """Take in a step that took `duration_ns`."""
        self._step_ns = VERDICT_MEMORY * (self._step_ns or duration_ns) + (1 - VERDICT_MEMORY) * duration_ns

    def patience_ns(self, now_ns: int) -> int:
        """How long to wait for the verdict before a step; 0: a step fits, or nothing is known."""
        if self._pass_start_ns is None or not self._pass_ns:
            return 0
        due_ns = self._pass_start_ns + self._pass_ns
        last_ns = due_ns + DEVIATIONS * self._deviation_ns
        if now_ns >= last_ns:
            return 0
        before_ns = max(0.0, due_ns - now_ns)
        after_ns = self._step_ns - before_ns
        pays = self._foreseen * before_ns >= (1 - self._foreseen) * after_ns
        return 0 if pays else int(last_ns - now_ns)
