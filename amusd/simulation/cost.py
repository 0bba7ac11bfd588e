"""What each piece of work costs: lists of measured times, or one time with a spread. Whole nanoseconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Duration:
    """Times that are drawn from, each as likely as any other."""

    samples: tuple[int, ...]
    """In nanoseconds; at least one."""
    spread: float = 0.0
    """Standard deviation relative to the sample, evenly distributed around it."""

    @classmethod
    def of_ms(cls, milliseconds: float, spread: float = 0.0) -> Duration:
        """One time, with a spread."""
        return cls((round(milliseconds * 1e6),), spread)

    def draw(self, random: Random) -> int:
        """One of the times."""
        ns = self.samples[0] if len(self.samples) == 1 else self.samples[int(random.random() * len(self.samples))]
        if self.spread:
            ns = round(ns * (1 + self.spread * math.sqrt(3) * (2 * random.random() - 1)))
        return ns

    @property
    def mean_ms(self) -> float:
        """The mean, in milliseconds."""
        return statistics.fmean(self.samples) / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Named figures in milliseconds."""
        return {
            "mean_ms": self.mean_ms,
            "median_ms": statistics.median(self.samples) / 1e6,
            "num_samples": len(self.samples),
        } | ({"spread": self.spread} if self.spread else {})


NOTHING = Duration((0,))
"""Takes no time."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A piece of work whose cost depends on what the other worker does: they may share cores, memory or power."""

    alone: Duration
    """While the other worker rests."""
    together: Duration
    """While it works."""

    @classmethod
    def same(cls, duration: Duration) -> Shared:
        """The other worker makes no difference."""
        return cls(duration, duration)

    def when(self, other_works: bool) -> Duration:
        """The one that holds."""
        return self.together if other_works else self.alone

    def as_dict(self) -> dict[str, Any]:
        """Named figures in milliseconds, once where both are the same."""
        if self.alone == self.together:
            return self.alone.as_dict()
        return {"draft_and_target_apart": self.alone.as_dict(), "at_the_same_time": self.together.as_dict()}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The times of a pair of workers and of the link between them."""

    passes: Mapping[int, Shared]
    """Of a target pass, by number of candidates, alternatives included; for one that is not named, the nearest."""
    draft_token: Shared
    """Of a draft step, for each token that it drafts."""
    row_ns: int = 0
    """Added to a target pass for each candidate."""
    tree_steps: Mapping[int, Shared] = field(default_factory=dict)
    """Of a draft step that computes so many nodes of a tree; for a number that is not named, the nearest. One node
    costs what a token does where nothing is named at all."""
    tree_row_ns: int = 0
    """Added to a step for each node that it has beyond the nearest number."""
    host: Shared = field(default_factory=lambda: Shared.same(NOTHING))
    """Of the target's host after each pass: decoding without a draft (`alone`), and with one."""
    host_before_verdict: float = 1.0
    """The share of that time that passes before the verdict is on its way."""
    target_prefill: Duration = NOTHING
    draft_prefill: Duration = NOTHING
    advance: Duration = NOTHING
    """Of a verdict that throws nothing away, on the draft."""
    rollback: Duration = NOTHING
    """Of one that does."""
    to_target: Duration = NOTHING
    """From the draft's sending to the target's receiving."""
    to_draft: Duration = NOTHING
    """The other way."""

    def pass_ns(self, num_candidates: int, draft_works: bool, random: Random) -> int:
        """How long the target's next pass takes."""
        shared = self.passes.get(num_candidates)
        if shared is None:
            shared = self.passes[min(self.passes, key=lambda known: (abs(known - num_candidates), known))]
        return shared.when(draft_works).draw(random) + self.row_ns * num_candidates

    def step_ns(self, num_tokens: int, target_works: bool, random: Random) -> int:
        """How long the draft's next step takes."""
        duration = self.draft_token.when(target_works)
        return sum(duration.draw(random) for _ in range(num_tokens))

    def tree_step_ns(self, num_nodes: int, target_works: bool, random: Random) -> int:
        """How long the draft's next step takes on a tree."""
        steps = self.tree_steps or {1: self.draft_token}
        nearest = min(steps, key=lambda known: (abs(known - num_nodes), known))
        return max(0, steps[nearest].when(target_works).draw(random) + self.tree_row_ns * (num_nodes - nearest))

    @property
    def steps_per_pass(self) -> float:
        """Draft steps per target pass, neither disturbed by the other. A step takes a nanosecond at least."""
        return self.passes[min(self.passes)].alone.mean_ms / max(self.draft_token.alone.mean_ms, 1e-6)

    @property
    def tree_row_share(self) -> float:
        """What a further node adds to a step, relative to the smallest step."""
        smallest = self.tree_steps[min(self.tree_steps)] if self.tree_steps else self.draft_token
        return self.tree_row_ns / 1e6 / smallest.alone.mean_ms

    def as_dict(self) -> dict[str, Any]:
        """All of it in milliseconds, for a result."""
        return {
            "target_pass": {str(num): shared.as_dict() for num, shared in sorted(self.passes.items())},
            "row_ms": self.row_ns / 1e6,
            "draft_token": self.draft_token.as_dict(),
            "tree_step": {str(num): shared.as_dict() for num, shared in sorted(self.tree_steps.items())},
            "tree_row_ms": self.tree_row_ns / 1e6,
            "host": self.host.as_dict(),
            "host_before_verdict": self.host_before_verdict,
        } | {
            name: getattr(self, name).as_dict()
            for name in ("target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft")
        }
