"""Asynchronous decoding in windows: while one is verified, the draft fills the next.

Where the draft starts anew nothing can be at hand, so that the pass goes ahead without candidates (pre-verification:
its token is compared with the draft's own first one when that arrives). Otherwise the target waits for a whole window
(post-verification), however long the draft takes for it. A baseline: `chain` takes what is there instead.

References:
    PEARL, https://arxiv.org/abs/2408.11850.
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, TargetView, Verify, Wait


@dataclass(frozen=True, slots=True)
class WindowedPolicy:
    """Verify window by window."""

    num_speculative_tokens: int
    """Tokens of a window."""
    timeout_seconds: float
    """A window that takes longer is not waited for."""
    fan_out: int = 1
    rows_per_step: int = 1
    breadth: int = 1

    @property
    def max_lookahead(self) -> int:
        """The window that is verified, and the next."""
        return 2 * self.num_speculative_tokens

    @property
    def tokens_per_message(self) -> int:
        """A window travels as one message."""
        return self.num_speculative_tokens

    def decide(self, view: TargetView) -> Decision:
        """Wait for a window unless the draft starts anew."""
        if view.num_candidates == 0 and view.may_get_more and not view.draft_restarting:
            seconds_left = self.timeout_seconds - view.waited_seconds
            if seconds_left > 0:
                return Wait(seconds_left)
        return Verify(min(view.num_candidates, self.num_speculative_tokens))
