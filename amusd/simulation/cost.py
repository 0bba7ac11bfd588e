"""Durations of each kind of work, in whole nanoseconds: measured lists, or one with a spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Duration:
    """Times to draw from, each as likely as any other."""

    samples: tuple[int, ...]
    """Measured nanoseconds; at least one."""
    spread: float = 0.0
    """Relative standard deviation of a uniform distribution around the sample."""
    together: tuple[int, ...] = ()
    """Nanoseconds while the other worker works; empty: as `samples`."""

    @classmethod
    def of_ms(cls, milliseconds: float, spread: float = 0.0) -> Duration:
        """Return one time with a spread."""
        return cls((round(milliseconds * 1e6),), spread)

    def draw(self, random: Random, other_works: bool = False) -> int:
        """Draw one of the times."""
        samples = (other_works and self.together) or self.samples
        ns = samples[0] if len(samples) == 1 else samples[int(random.random() * len(samples))]
        if self.spread:
            ns = round(ns * (1 + self.spread * math.sqrt(3) * (2 * random.random() - 1)))
        return ns

    @property
    def mean_ms(self) -> float:
        """The mean, in milliseconds."""
        return statistics.fmean(self.samples) / 1e6

    def as_dict(self) -> dict[str, float]:
        """Mean times in milliseconds, without and with the other worker."""
        return {"alone_ms": self.mean_ms, "together_ms": statistics.fmean(self.together or self.samples) / 1e6}


NOTHING = Duration((0,))


def nearest(numbers: Iterable[int], wanted: int) -> int:
    """The nearest of these numbers; of two, the lower one."""
    return min(numbers, key=lambda number: (abs(number - wanted), number))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The times of a pair of workers and of the link between them."""

    passes: Mapping[int, Duration]
    """A target pass, by number of candidates, alternatives included, or the nearest number."""
    draft_token: Duration
    """A draft step on a chain, per token."""
    sequence_ns: int = 0
    """Added to a target pass for each sequence beyond the first: reading its cache."""
    tree_steps: Mapping[int, Duration] = field(default_factory=dict)
    """A draft step on a tree, by number of nodes or the nearest; without any, one node costs a chain's token."""
    tree_row_ns: int = 0
    """Added to a draft step for each node beyond the nearest number, and on chains for each further sequence."""
    draft_sequence_ns: int = 0
    """Added to a draft step for each sequence beyond the first."""
    knee_rows: int | None = None
    """Rows beyond which time is in proportion: computing takes longer than reading weights."""
    host: Duration = NOTHING
    """The target's host time after each pass; `together`: with a draft."""
    target_prefill: Duration = NOTHING
    draft_prefill: Duration = NOTHING
    advance: Duration = NOTHING
    """Taking in a verdict that discards nothing."""
    rollback: Duration = NOTHING
    """Taking in a verdict that discards nodes."""
    to_target: Duration = NOTHING
    to_draft: Duration = NOTHING

    def pass_ns(self, num_candidates: int, draft_works: bool, random: Random, *, num_sequences: int) -> int:
        """Draw the time of a target pass over `num_candidates` in all."""
        num_rows = num_candidates + num_sequences
        more = self._below_knee(num_rows) - 1
        ns = self._beyond_knee(self.passes[nearest(self.passes, more)].draw(random, draft_works), num_rows)
        return ns + self.sequence_ns * (num_sequences - 1)

    def step_ns(self, target_works: bool, random: Random, *, num_sequences: int) -> int:
        """Draw the time of a draft step on chains: one token for each sequence."""
        more_ns = self.tree_row_ns * (self._below_knee(num_sequences) - 1)
        ns = self._beyond_knee(self.draft_token.draw(random, target_works) + more_ns, num_sequences)
        return ns + self.draft_sequence_ns * (num_sequences - 1)

    def tree_step_ns(self, num_nodes: int, target_works: bool, random: Random, *, num_sequences: int) -> int:
        """Draw the time of a draft step on trees with `num_nodes` in all."""
        steps, counted = self.tree_steps or {1: self.draft_token}, self._below_knee(num_nodes)
        known = nearest(steps, counted)
        ns = max(0, steps[known].draw(random, target_works) + self.tree_row_ns * (counted - known))
        return self._beyond_knee(ns, num_nodes) + self.draft_sequence_ns * (num_sequences - 1)

    def _below_knee(self, num_rows: int) -> int:
        return num_rows if self.knee_rows is None else min(num_rows, self.knee_rows)

    def _beyond_knee(self, ns: int, num_rows: int) -> int:
        if self.knee_rows is None or num_rows <= self.knee_rows:
            return ns
        return round(ns * num_rows / self.knee_rows)

    def as_dict(self) -> dict[str, Any]:
        """Mean times in milliseconds, for a result."""
        names = ("target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft")
        return {
            "target_pass": {str(num): shared.as_dict() for num, shared in sorted(self.passes.items())},
            "sequence_ms": self.sequence_ns / 1e6,
            "draft_token": self.draft_token.as_dict(),
            "tree_step": {str(num): shared.as_dict() for num, shared in sorted(self.tree_steps.items())},
            "tree_row_ms": self.tree_row_ns / 1e6,
            "draft_sequence_ms": self.draft_sequence_ns / 1e6,
            "knee_rows": self.knee_rows,
            "host": self.host.as_dict(),
            **{f"{name}_ms": getattr(self, name).mean_ms for name in names},
        }
