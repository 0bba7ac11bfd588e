"""The seam between the target worker and a schedule.

A policy is a pure function of session state and measured times. It never sees a token, so whether a candidate is
verified cannot depend on its own value (an independence condition of exact sampling).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TargetView:
    """All that a policy may look at. Times in seconds; estimates are running ones, of the latest passes."""

    num_candidates: int
    """Candidates ready for verification."""
    max_candidates: int
    """Candidates that the next pass can take."""
    may_get_more: bool
    """Whether a further candidate may come: the draft has not said that it is done with this committed prefix."""
    draft_restarting: bool
    """Whether the draft starts anew behind the committed prefix: its chain was contradicted, or had ended."""
    waited_seconds: float
    """Time since the last pass ended."""
    pass_seconds: float
    """Estimate of one target pass; 0 before the first."""
    chances: tuple[float, ...] = ()
    """Estimate, for each candidate at hand, that it and those before it are accepted."""
    acceptance: float = 0.5
    """Estimate of the acceptance rate of candidates behind the right prefix."""
    tokens_per_second: float = 0.0
    """Estimate of the committed tokens per second while drafting; 0 before the first pass."""
    candidate_seconds: float = 0.0
    """Estimate of the wait for one more candidate; 0 before the first wait."""
    longest_wait: float = math.inf
    """The time after which a candidate is not expected any more; infinite before the first wait."""
    draft_is_mute: bool = False
    """Whether no candidate has come since a wait in vain, or since the draft joined amid the answer."""
    lead_gain: float = 0.0
    """Estimate of what a pass would gain by one more candidate at its beginning, in tokens."""
    row_seconds: float = 0.0
    """Estimate of the time that one more candidate adds to a pass."""
    drafting_pays: bool = True
    """Whether to draft at all: decoding alone has not been found to be faster."""
    plain_tokens_per_second: float = 0.0
    """Committed tokens per second of decoding alone; before it was tried, the most that it may commit."""

    @property
    def path_chance(self) -> float:
        """Estimate that all candidates at hand are accepted; 1 if there are none."""
        return self.chances[-1] if self.chances else 1.0

    def lacks(self, num_candidates: int) -> bool:
        """Whether fewer are at hand, one more may come, and the next pass has room for it."""
        return self.may_get_more and self.num_candidates < min(num_candidates, self.max_candidates)

    @property
    def can_grow(self) -> bool:
        """Whether one more candidate may come and the next pass has room for it."""
        return self.lacks(self.max_candidates)

    @property
    def gain(self) -> float:
        """Estimate of the tokens that one more candidate brings: one if it and all before it are accepted."""
        return self.path_chance * self.acceptance


@dataclass(frozen=True, slots=True)
class Verify:
    """Start a pass now, with at most this many candidates."""

    num_candidates: int
    reason: str = field(default="", compare=False)
    """A reason for the timeline; empty if the policy has only one."""
    worth: float = field(default=-1.0, compare=False)
    """What it would be worth to the sequence if the pass waited nevertheless, as in `Wait`."""
    min_chance: float = 0.0
    """A candidate beside the likeliest path that is less likely than this is left out."""
    tells_draft: bool = True
    """Whether the draft hears what the pass commits. If not, it comes to rest; its next verdict tells it all."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again when a message arrives, or after `seconds`."""

    seconds: float
    reason: str = field(default="", compare=False)
    """As in `Verify`."""
    worth: float = field(default=1.0, compare=False)
    """What the wait is worth to the sequence. A pass over several waits as long as the sum over all is positive."""


Decision: TypeAlias = Verify | Wait


def because(decision: Decision) -> dict[str, str]:
    """Return the decision's reason as a field of an event; empty if it has none."""
    return {"reason": decision.reason} if decision.reason else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC):
    """Decides when the target verifies, and tells the draft how far and how wide to run ahead."""

    max_lookahead: int = 1
    """Tokens that the draft may be ahead of the committed prefix it knows."""
    tokens_per_message: int = 1
    """Candidates that the draft collects before it sends them."""
    fan_out: int = 1
    """The most candidates that a draft step makes behind a token; 1: the draft keeps to one chain."""
    rows_per_step: int = 1
    """The most nodes of a tree that one draft step computes."""
    max_steps: int = 0
    """The most draft steps behind one committed prefix; 0: no limit."""
    breadth: int = 1
    """The most candidates of one position that a pass verifies, if it can verify several; 1: one path."""

    @abstractmethod
    def decide(self, view: TargetView) -> Decision:
        """Decide what the target does next."""
