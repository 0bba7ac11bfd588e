"""Estimates when the next verdict is due, and whether the draft should wait for it instead of stepping.

A step under way when a verdict arrives is of use if the verdict was foreseen, and delays the next candidates if not. So
a draft waits for the verdict if its next step would run into it, unless the step's expected gain exceeds its loss.
"""

from __future__ import annotations

MEMORY = 0.8
"""Weight of the past in estimates of time, per pass or step."""
OUTCOME_MEMORY = 0.95
"""The same in the share of foreseen verdicts."""
DEVIATIONS = 2.0
"""How long a late verdict is waited for, in mean deviations."""


class VerdictClock:
    """Estimates when passes and steps end. All times in nanoseconds of one clock."""

    def __init__(self) -> None:
        self._pass_start_ns: int | None = None
        self._pass_ns = self._deviation_ns = self._step_ns = 0.0  # 0: nothing is known
        self._foreseen = 0.5

    def heard(self, now_ns: int, *, goes_on: bool) -> None:
        """Take in a verdict. `goes_on`: it was foreseen, and the target starts its next pass at once."""
        self._foreseen = OUTCOME_MEMORY * self._foreseen + (1 - OUTCOME_MEMORY) * goes_on
        if self._pass_start_ns is not None:
            pass_ns = now_ns - self._pass_start_ns
            usual_ns = self._pass_ns or pass_ns
            self._deviation_ns = MEMORY * self._deviation_ns + (1 - MEMORY) * abs(pass_ns - usual_ns)
            self._pass_ns = MEMORY * usual_ns + (1 - MEMORY) * pass_ns
        self._pass_start_ns = now_ns if goes_on else None

    def sent(self, now_ns: int) -> None:
        """Candidates were sent: a target that waited for some starts its pass."""
        if self._pass_start_ns is None:
            self._pass_start_ns = now_ns

    def stepped(self, duration_ns: int) -> None:
        """Take in a step that took `duration_ns`."""
        self._step_ns = MEMORY * (self._step_ns or duration_ns) + (1 - MEMORY) * duration_ns

    def patience_ns(self, now_ns: int) -> int:
        """How long to wait for the verdict before a step; 0: a step fits, or nothing is known."""
        if self._pass_start_ns is None or not self._pass_ns:
            return 0
        due_ns = self._pass_start_ns + self._pass_ns
        last_ns = due_ns + DEVIATIONS * self._deviation_ns
        if now_ns >= last_ns:
            return 0
        before_ns = max(0.0, due_ns - now_ns)
        behind_ns = self._step_ns - before_ns
        pays = self._foreseen * before_ns >= (1 - self._foreseen) * behind_ns
        return 0 if pays else int(last_ns - now_ns)
