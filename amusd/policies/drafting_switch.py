"""Decides whether to draft at all, by trying both.

A draft that is hardly ever right shares memory, power or a host with the target, and widens passes. In a rest the
target tells it nothing and decodes alone.

One short rest is tried early, unless drafting yields more than plain decoding could: `MOST_SLOWDOWN` tokens in the time
of the quickest pass. Later a rest is tried if drafting yields less than plain decoding did, or than one token in that
time. Each rest ends, because text changes.
"""

from __future__ import annotations

from amusd.policies.estimates import RunningRatio

FIRST_LOOK = 32
"""Passes before the first rest; doubled after a rest that did not pay."""
FIRST_REST = 6
"""Passes of the first rest; four times as many after one that paid."""
SECOND_LOOK = 16
"""Passes between a rest that paid and the next."""
LONGEST = 1024
"""Most passes between rests, and of a rest."""
MOST_SLOWDOWN = 2.0
MEMORY = 0.98


class DraftingSwitch:
    """Decides for one drafter and all sequences of a pass; kept between answers."""

    def __init__(self) -> None:
        self._drafting, self._plain = RunningRatio(MEMORY), RunningRatio(MEMORY)
        self.drafting_pays = True
        self._num_passes = 0.0
        self._look, self._rest = FIRST_LOOK, FIRST_REST
        self._quickest_rate = 0.0
        """Passes per second, if all were as quick as the quickest."""

    @property
    def plain_tokens_per_second(self) -> float:
        """The yield of past rests; before the first one, a token in the quickest pass."""
        return self._plain.value or self._quickest_rate

    def passed(
        self, num_tokens: int, seconds: float, pass_seconds: float, *, rests: bool, num_sequences: int = 1
    ) -> None:
        """Take in a pass for one of its `num_sequences`, which ended `seconds` after the one before."""
        if pass_seconds:  # 0 on a coarse clock
            self._quickest_rate = max(self._quickest_rate, 1 / pass_seconds)
        self._num_passes += 1 / num_sequences
        (self._plain if rests else self._drafting).add(num_tokens, seconds, 1 / num_sequences)
        if round(self._num_passes, 3) >= (self._look if self.drafting_pays else self._rest):
            self._num_passes = 0.0
            self._end_of_look() if self.drafting_pays else self._end_of_rest()

    def _end_of_look(self) -> None:
        quickest, plain = self._quickest_rate, self._plain.value
        bar = max(plain, quickest) if plain else MOST_SLOWDOWN * quickest
        self.drafting_pays = self._drafting.value >= bar

    def _end_of_rest(self) -> None:
        self.drafting_pays = True
        if self._plain.value > self._drafting.value:
            self._look, self._rest = SECOND_LOOK, min(4 * self._rest, LONGEST)
        else:
            self._look, self._rest = min(2 * max(self._look, FIRST_LOOK), LONGEST), FIRST_REST
