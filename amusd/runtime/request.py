"""What a target worker is asked to decode."""

from __future__ import annotations

from dataclasses import dataclass

from amusd.config import GREEDY, Distribution
from amusd.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to decode."""

    prompt: tuple[int, ...]
    max_length: int
    """Prompt and answer together."""
    policy: Policy
    drafter: str | None
    """None: decode without a draft."""
    distribution: Distribution = GREEDY
    logprobs: bool = False
    max_silence_seconds: float = 0.3
    """How long the draft is waited for, all in all, while nothing is heard from it."""
    reference: tuple[int, ...] = ()
    """The answer, where it is known in advance and the drafter is to be told (a synthetic one)."""
