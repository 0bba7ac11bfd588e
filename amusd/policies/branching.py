"""Asynchronous decoding with continuations prepared for the likely verdicts.

The draft computes a tree, the likeliest nodes first, while the target verifies; the target holds what it has been sent,
so that after a verdict which the tree foresaw the next block is at hand without a message. Where it is shorter than
`min_candidates`, as after a verdict that nobody foresaw, the target waits for the rest, and never longer than a pass
would take.

References:
    SSD / Saguaro, https://arxiv.org/abs/2603.03251 (a cache of outcomes); EAGLE-2, https://arxiv.org/abs/2406.16858
    (trees grown by confidence).
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, TargetView, Verify, Wait


@dataclass(frozen=True, slots=True)
class BranchingPolicy:
    """Verify the likeliest path once it has `min_candidates`."""

    max_lookahead: int
    fan_out: int
    rows_per_step: int
    min_candidates: int
    max_wait_passes: float
    breadth: int = 1
    tokens_per_message: int = 1

    def decide(self, view: TargetView) -> Decision:
        """Verify now, or wait for the rest of `min_candidates`."""
        wanted = min(self.min_candidates, view.max_candidates)
        if view.may_get_more and view.num_candidates < wanted:
            seconds_left = self.max_wait_passes * view.pass_seconds - view.waited_seconds
            if seconds_left > 0:
                return Wait(seconds_left)
        return Verify(view.num_candidates)
