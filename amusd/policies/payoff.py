"""Whether drafting pays at all, found by trying both.

A draft that is hardly ever right still costs something: it shares memory, power or a host with the target, and its
candidates widen the target's passes. Where that is more than it brings, the target tells it nothing, so that it comes
to rest, and decodes alone.

What plain decoding would yield is not known before it is tried; so that is done once, for a few passes, unless drafting
yields more than it could: two tokens in the quickest pass seen. After that a rest is tried where drafting yields less
than plain decoding did or could, one token in the quickest pass; and it ends now and then, because text changes.
"""

from __future__ import annotations

from amusd.policies.token_rate import TokenRate

FIRST_LOOK = 32
"""Passes with a draft, until what they yield is looked at; after a rest that did not pay twice as many."""
FIRST_REST = 6
"""Passes of the first rest; after one that paid four times as many."""
SECOND_LOOK = 16
"""Passes with a draft between two rests that pay."""
LONGEST = 1024
"""Passes with or without a draft, until the other is tried again."""
SETTLING = 2
"""Passes behind a change that say nothing: the draft still works, or has only begun."""
MARGIN = 1.01
"""So many times what drafting yields is what a rest has to yield."""
MOST_SLOWDOWN = 2.0
"""So many times as long as plain decoding's is what a pass with candidates is assumed to take at most."""
QUICKEST_GROWS = 1.001
"""The quickest pass is forgotten at this rate, as passes grow with their text."""
DRAFTING_MEMORY, PLAIN_MEMORY = 0.98, 0.9
"""Weight of the past, for each pass: with candidates the number of tokens varies as well as the time."""


class Payoff:
    """Of one drafter; kept from one answer to the next."""

    def __init__(self) -> None:
        self._drafting, self._plain = TokenRate(DRAFTING_MEMORY), TokenRate(PLAIN_MEMORY)
        self._pays = True
        self._num_passes = 0
        """Since that has changed."""
        self._look, self._rest = FIRST_LOOK, FIRST_REST
        self._quickest = 0.0

    @property
    def drafting_pays(self) -> bool:
        """The target speculates, or tries to again."""
        return self._pays

    @property
    def plain_tokens_per_second(self) -> float:
        """What rests have yielded; before the first one what they may well yield, and 0 before the first pass."""
        return self._plain.tokens_per_second or self._of_quickest_pass

    @property
    def _of_quickest_pass(self) -> float:
        """One token in it; tokens per second."""
        return 1 / self._quickest if self._quickest else 0.0

    @property
    def _most_without(self) -> float:
        """What a rest may yield, in tokens per second."""
        if known := self._plain.tokens_per_second:
            return max(known, self._of_quickest_pass)
        return MOST_SLOWDOWN * self._of_quickest_pass

    def passed(self, *, num_tokens: int, seconds: float, pass_seconds: float, rests: bool) -> None:
        """A pass is over, `seconds` after the one before it; it took `pass_seconds` itself. `rests`: the draft does."""
        grown = QUICKEST_GROWS * self._quickest
        self._quickest = min(pass_seconds, grown) if grown else pass_seconds
        self._num_passes += 1
        if self._num_passes > SETTLING:
            (self._plain if rests else self._drafting).passed(num_tokens, seconds)
        if self._num_passes >= (self._look if self._pays else self._rest):
            self._end_of_look() if self._pays else self._end_of_rest()

    def _end_of_look(self) -> None:
        self._num_passes = 0
        self._pays = self._most_without <= self._drafting.tokens_per_second

    def _end_of_rest(self) -> None:
        self._num_passes = 0
        self._pays = True
        if self._plain.tokens_per_second > MARGIN * self._drafting.tokens_per_second:
            self._look, self._rest = SECOND_LOOK, min(4 * self._rest, LONGEST)
        else:
            self._look, self._rest = min(2 * max(self._look, FIRST_LOOK), LONGEST), FIRST_REST
