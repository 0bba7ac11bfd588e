"""The interface between the target worker and a schedule.

A policy sees no token, and no weights of a chain: under the ratio test, whether a candidate is verified must not depend
on its value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TargetView:
    """All that a policy may look at. Times are in seconds; estimates are of the latest passes."""

    num_candidates: int
    max_candidates: int
    may_get_more: bool
    """Whether the draft may send more for this committed prefix."""
    draft_restarting: bool
    """Whether the draft starts anew: its chain was contradicted or had ended, or its tree is empty."""
    waited_seconds: float
    pass_seconds: float
    """Estimate of one target pass; 0 before the first."""
    weights: tuple[float, ...] = ()
    """The draft's own probability of each candidate given those before it; empty for a chain."""
    chances: tuple[float, ...] = ()
    """For each candidate, the chance that it and all before it are accepted."""
    acceptance: float = 0.5
    tokens_per_second: float = 0.0
    """Committed tokens per second while drafting; 0 before the first pass."""
    candidate_seconds: float = 0.0
    """The wait for one more candidate; 0 before the first wait."""
    longest_wait: float = math.inf
    """The time after which no candidate is expected any more."""
    waited_in_vain: bool = False
    """Whether no candidate has come since a wait in vain, or since the draft joined during the answer."""
    lead_gain: float = 0.0
    """Tokens that a pass gains from one more candidate at its start."""
    row_seconds: float = 0.0
    drafting_pays: bool = True
    """False in a pause: plain decoding is tried, or was faster."""
    plain_tokens_per_second: float = 0.0
    """Tokens per second of plain decoding; before any, an upper bound."""

    @property
    def path_chance(self) -> float:
        """Chance that all candidates at hand are accepted."""
        return self.chances[-1] if self.chances else 1.0

    def lacks(self, num_candidates: int) -> bool:
        """Whether fewer than `num_candidates` are at hand, and another may come and fits into the pass."""
        return self.may_get_more and self.num_candidates < min(num_candidates, self.max_candidates)

    @property
    def can_grow(self) -> bool:
        """Whether one more candidate may come and fits into the pass."""
        return self.lacks(self.max_candidates)

    @property
    def gain(self) -> float:
        """Expected tokens from one more candidate."""
        return self.path_chance * self.acceptance


@dataclass(frozen=True, slots=True)
class Verify:
    """Start a pass now, with at most this many candidates."""

    num_candidates: int
    reason: str = field(default="", compare=False)
    """Reason in the timeline; empty if the policy has only one."""
    worth: float = field(default=-1.0, compare=False)
    """Value in tokens of waiting instead of verifying."""
    min_chance: float = 0.0
    """Least chance of a candidate in a pass over several paths."""
    sends_verdict: bool = True
    """Whether the draft gets the verdict of the pass; False pauses drafting."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again when a message arrives, or after `seconds`."""

    seconds: float
    reason: str = field(default="", compare=False)
    worth: float = field(default=1.0, compare=False)
    """Value of the wait in tokens. A pass over several sequences waits while the sum is positive."""


Decision: TypeAlias = Verify | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC):
    """Decides when the target verifies, and tells the draft how far and how wide to run ahead."""

    max_lookahead: int = 1
    tokens_per_message: int = 1
    """Candidates per message of the draft."""
    fan_out: int = 1
    """Most candidates after a token; 1: one chain."""
    rows_per_step: int = 1
    max_steps: int = 0
    """Most draft steps after one committed prefix; 0: no limit."""
    breadth: int = 1
    """Most candidates of one position in a pass; 1: one path."""

    @property
    def name(self) -> str:
        """Name in events."""
        return type(self).__name__.removesuffix("Policy").lower()

    @abstractmethod
    def decide(self, view: TargetView) -> Decision:
        """Decide what the target does next."""
