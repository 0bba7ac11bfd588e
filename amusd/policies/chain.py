"""Asynchronous decoding with one continuous chain of candidates.

The draft never stops before its run-ahead limit. The target verifies whatever has arrived. Only where the draft
starts anew (after a rejection, or when its chain had ended), so that nothing useful can be at hand, it may wait for a
few fresh candidates, and never longer than a pass would take: by then a pass without candidates would have been the
better use of the time.

References:
    AMUSD, https://arxiv.org/abs/2410.17375 (the chain); PipeSpec, https://arxiv.org/abs/2505.01572 (the wait).
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, TargetView, Verify, Wait


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """Verify what is there; where the draft starts anew, wait for `min_candidates`."""

    max_lookahead: int
    tokens_per_message: int
    min_candidates: int
    max_wait_passes: float
    fan_out: int = 1
    rows_per_step: int = 1
    breadth: int = 1

    def decide(self, view: TargetView) -> Decision:
        """Verify now, or wait for the rest of `min_candidates`."""
        wanted = min(self.min_candidates, view.max_candidates)
        if view.draft_restarting and view.may_get_more and view.num_candidates < wanted:
            seconds_left = self.max_wait_passes * view.pass_seconds - view.waited_seconds
            if seconds_left > 0:
                return Wait(seconds_left)
        return Verify(view.num_candidates)
