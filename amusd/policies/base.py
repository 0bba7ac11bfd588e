"""The seam between the target worker and a schedule.

A policy is a pure function of what the session shows and of measured times. It never sees a token, so whether a
candidate is verified can never depend on its own value (an independence condition of exact sampling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TargetView:
    """What a policy may look at. Times in seconds."""

    num_candidates: int
    """Candidates ready for verification."""
    max_candidates: int
    """How many the next pass can take."""
    may_get_more: bool
    """The draft has not said that it is done with the present committed prefix."""
    draft_restarting: bool
    """The draft starts anew behind the committed prefix (its chain was contradicted, or had ended)."""
    waited_seconds: float
    """Since the last pass ended."""
    pass_seconds: float
    """Running estimate of one target pass; 0 before the first."""
    chances: tuple[float, ...] = ()
    """Of each candidate at hand: estimate that it and those before it are accepted."""
    acceptance: float = 0.5
    """Running estimate for one candidate behind the right prefix."""
    tokens_per_second: float = 0.0
    """Running estimate of what is committed; 0 before the first pass."""
    candidate_seconds: float = 0.0
    """Running estimate of the wait for a candidate; 0 before the first one."""
    longest_wait: float = math.inf
    """After so long a candidate is not to be expected any more; infinite before the first one."""
    draft_is_mute: bool = False
    """No candidate has come since it was waited for in vain, or since it joined amid the answer."""
    rejection_loss: float = 0.0
    """Running estimate, in tokens, of what a rejection costs beyond the candidate itself."""
    lead_gain: float = 0.0
    """Running estimate, in tokens, of what one more candidate at its beginning would bring a pass."""
    row_seconds: float = 0.0
    """Running estimate of what one more candidate adds to a pass."""
    drafting_pays: bool = True
    """Decoding alone has not been found to be quicker."""
    plain_tokens_per_second: float = 0.0
    """What decoding alone was found to commit; before it was tried, what it may commit at most."""

    @property
    def path_chance(self) -> float:
        """Estimate that all candidates at hand are accepted; 1 where there are none."""
        return self.chances[-1] if self.chances else 1.0

    def lacks(self, num_candidates: int) -> bool:
        """Whether fewer are at hand, the next pass has room for one more, and one may come."""
        return self.may_get_more and self.num_candidates < min(num_candidates, self.max_candidates)

    @property
    def can_grow(self) -> bool:
        """The next pass has room for one more candidate, and one may come."""
        return self.lacks(self.max_candidates)

    @property
    def gain(self) -> float:
        """Estimate, in tokens, of what one more candidate brings; behind a rejected one less is prepared."""
        return self.path_chance * (self.acceptance - (1 - self.acceptance) * self.rejection_loss)


@dataclass(frozen=True, slots=True)
class Verify:
    """Start a pass now, with at most this many candidates."""

    num_candidates: int
    reason: str = field(default="", compare=False)
    """For the timeline, where it is not always the same."""
    min_chance: float = 0.0
    """Candidates beside the likeliest path that are less likely than this are not worth their row."""
    tells_draft: bool = True
    """The draft hears what the pass commits. Else it comes to rest; the next verdict that it gets tells all."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again when something arrives, or after this long."""

    seconds: float
    reason: str = field(default="", compare=False)
    """Likewise."""


Decision: TypeAlias = Verify | Wait


def because(decision: Decision) -> dict[str, str]:
    """Its reason, as a field of an event; nothing where it gives none."""
    return {"reason": decision.reason} if decision.reason else {}


class Policy(Protocol):
    """When the target verifies, and what the draft is told about running ahead."""

    @property
    def max_lookahead(self) -> int:
        """How many tokens the draft may be ahead of the committed prefix it knows."""
        ...

    @property
    def tokens_per_message(self) -> int:
        """Candidates are sent once this many are ready."""
        ...

    @property
    def fan_out(self) -> int:
        """Candidates that a draft step makes behind a token at most; 1: the draft keeps to one chain."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Nodes of a tree that one draft step computes at most."""
        ...

    @property
    def breadth(self) -> int:
        """Candidates of one position that a pass verifies at most, where it can verify several; 1: one path."""
        ...

    def decide(self, view: TargetView) -> Decision:
        """What the target does next."""
        ...
